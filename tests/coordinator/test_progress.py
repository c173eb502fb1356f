"""Long transfers log a line at each quarter, or show a bar of the Trainer's kind.

The training bar shows two more figures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from rich import reconfigure
from rich.progress import Progress as RichProgress

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.coordinator import progress as bars
from lightning_hetero.coordinator.progress import (
    PROGRESS_FROM_BYTES,
    Bars,
    ProgressInLines,
    PublishedProgress,
    TrainingFigures,
    progress_of_bytes,
    progress_of_parts,
)
from lightning_hetero.events import Observers

from ..models import TinyModule, loader, trainer


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the progress lines logged: workers of earlier tests may still log theirs."""
    caplog.set_level(logging.INFO)
    return lambda: [r.getMessage() for r in caplog.records if "rank_zero" in r.name]


def test_each_quarter_is_logged_once(lines: Callable[[], list[str]]) -> None:
    progress = ProgressInLines("Gathering", 4 * 2**30)
    for _ in range(18):
        progress.advance(2**28)
    assert lines() == [f"Gathering: {n}.0 of 4.0 GiB" for n in (1, 2, 3, 4)]


def test_a_short_transfer_logs_nothing(lines: Callable[[], list[str]]) -> None:
    ProgressInLines("Gathering", PROGRESS_FROM_BYTES - 1).advance(PROGRESS_FROM_BYTES - 1)
    ProgressInLines("Gathering", 0).advance(0)
    assert lines() == []


GIB = 2**30


def run_with(bar: ProgressBar | None) -> pl.Trainer:
    own = [] if bar is None else [bar]
    return trainer(callbacks=own, enable_progress_bar=bar is not None)


def test_with_tqdm_a_bar_of_tqdm_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    progress = progress_of_bytes(run_with(TQDMProgressBar()), "Sending layers", GIB)
    progress.advance(GIB // 2)
    progress.close()
    shown = capsys.readouterr()
    assert "Sending layers" in shown.err + shown.out
    assert "1.00G" in shown.err + shown.out


def test_with_rich_a_bar_of_rich_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    reconfigure(force_terminal=True, width=120)
    try:
        progress = progress_of_bytes(run_with(RichProgressBar()), "Sending layers", GIB)
        progress.advance(GIB)
        progress.close()
    finally:
        reconfigure()
    shown = capsys.readouterr().out
    assert "Sending layers" in shown
    assert "1.0/1.0 GiB" in shown


def test_a_line_is_added_to_a_bar_of_rich_that_is_on_the_screen() -> None:
    bar = RichProgressBar()
    with RichProgress(disable=False) as live:
        bar.progress = live  # type: ignore[assignment]
        progress = progress_of_bytes(run_with(bar), "Gathering", GIB)
        progress.advance(GIB // 4)
        (task,) = live.tasks
        assert (task.description, task.total, task.completed) == ("Gathering (MiB)", 1024, 256)
        progress.close()
        assert live.tasks == []


def test_a_transfer_that_ends_too_early_leaves_no_bar() -> None:
    bar = RichProgressBar()
    with RichProgress(disable=False) as live:
        bar.progress = live  # type: ignore[assignment]
        observers = Observers([Bars(run_with(bar))])
        with closing(PublishedProgress(observers, "Gathering", GIB)) as transfer:
            transfer.advance(GIB // 4)
            transfer.advance(GIB // 4)
            assert [task.completed for task in live.tasks] == [512]
        assert live.tasks == []
        PublishedProgress(observers, "Gathering", GIB).advance(GIB // 8)
        assert [task.completed for task in live.tasks] == [128]


def test_without_a_bar_of_the_trainer_no_bar_is_shown(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    lines: Callable[[], list[str]],
) -> None:
    run = run_with(None)
    capsys.readouterr()
    caplog.clear()
    parts = progress_of_parts(run, "Measuring", 3)
    parts.advance(3)
    parts.close()
    assert "".join(capsys.readouterr()) == ""
    assert lines() == []
    progress = progress_of_bytes(run, "Gathering", GIB)
    progress.advance(GIB)
    progress.close()
    assert lines() == ["Gathering: 1.0 of 1.0 GiB"]


def test_a_short_transfer_shows_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with(TQDMProgressBar())
    capsys.readouterr()
    progress = progress_of_bytes(run, "Gathering", GIB // 8)
    progress.advance(GIB // 8)
    progress.close()
    assert "".join(capsys.readouterr()) == ""


class OwnBar(TQDMProgressBar):
    """A user's bar with something of its own."""

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        return {**super().get_metrics(*args), "mine": "1"}


def test_figures_are_added_to_what_a_bar_shows_and_taken_away_again() -> None:
    bar, module, tokens, seconds = OwnBar(), TinyModule(), [0], [0.0]
    run = run_with(bar)
    before = bar.get_metrics(run, module)
    figures = TrainingFigures(run, lambda: tokens[0], lambda: "stage 2", lambda: seconds[0])
    assert bar.get_metrics(run, module) == before | {"bottleneck": "stage 2"}
    tokens[0], seconds[0] = 5000, 2.0
    assert bar.get_metrics(run, module)["tok/s"] == "2,500"
    figures.detach()
    assert bar.get_metrics(run, module) == before
    assert "get_metrics" not in vars(bar)


@contextmanager
def everything_is_long() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bars, "PROGRESS_FROM_BYTES", 0)
        yield


WIDE = {"force_terminal": True, "width": 200}


@pytest.mark.parametrize(
    "bar", [TQDMProgressBar(), RichProgressBar(console_kwargs=WIDE)], ids=["tqdm", "rich"]
)
def test_a_run_shows_its_bars(
    bar: ProgressBar, workers: list[str], tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            bar = trainer.progress_bar_callback
            assert bar is not None
            seen.append(bar.get_metrics(trainer, module))

        def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "it.ckpt")

    strategy = HeteroPipelineStrategy(workers[:2], "even", micro_batches=2)
    run = trainer(strategy, max_epochs=1, callbacks=[bar, Look()], enable_progress_bar=True)
    reconfigure(**WIDE)
    try:
        with everything_is_long():
            run.fit(TinyModule(), loader(40, 4))
    finally:
        reconfigure()
    shown = "".join(capsys.readouterr())
    for what in ("Sending layers to the workers", "Gathering the", "optimizer's"):
        assert what in shown
    assert seen[-1]["bottleneck"] in ("coordinator", "stage 1", "stage 2")
    assert float(seen[-1]["tok/s"].replace(",", "")) > 0
    assert "get_metrics" not in vars(bar)
