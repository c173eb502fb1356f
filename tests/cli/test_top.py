from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from lightning_hetero import HeteroPipelineStrategy, cli
from lightning_hetero.cli.top import table
from lightning_hetero.discovery.status import Sighting, seen_again
from lightning_hetero.errors import WorkerUnreachable

from ..conftest import worker_process
from ..discovery.answers import answer
from ..models import TinyModule, loader, trainer
from .command import run


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")


def top(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "top", *arguments])
    cli.main()


def test_once_shows_free_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workers: list[str]
) -> None:
    top(monkeypatch, *workers, "--once")
    shown = capsys.readouterr().out
    assert all(worker in shown for worker in workers)
    assert shown.count("free") == len(workers)


class Looking(TinyModule):
    """Looks at its workers while it trains."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, workers: list[str]) -> None:
        super().__init__()
        self.look = lambda: top(monkeypatch, *workers, "--once")

    def on_train_end(self) -> None:
        self.look()


def test_once_shows_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workers: list[str]
) -> None:
    strategy = HeteroPipelineStrategy(workers=workers[:2], plan="even")
    module = Looking(monkeypatch, workers[:2])
    trainer(strategy, max_steps=3).fit(module, loader(12, 4))
    lines = [line for line in capsys.readouterr().out.splitlines() if "training" in line]
    assert len(lines) == 2
    assert re.search(r"1: layers \d to \d +\d", lines[0])
    assert all("%" in line for line in lines)
    assert len(module.losses) == 3


def test_in_130_columns_nothing_is_cut() -> None:
    name = "strix.example.org:9999"
    first, second = (answer(float(n), 1.0 * n, 2.0 * n, sent=10**7 * n) for n in (1, 2))
    sighting = seen_again(seen_again(Sighting(name), first), second)
    console = Console(width=130, record=True, file=StringIO())
    console.print(table([sighting]))
    shown = console.export_text()
    for whole in (name, "training", "layers", "%", "↓20.0/↑10.0"):
        assert whole in shown
    assert "…" not in shown


def test_a_worker_that_does_not_answer_is_shown_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with worker_process() as worker:
        address = worker.address
    assert run(monkeypatch, "top", address, "--once") == 1
    shown = capsys.readouterr().out
    assert "not there" in shown
    assert f"No worker answers at {address}" in shown


def test_top_looks_again_until_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workers: list[str]
) -> None:
    """Three looks: the worker is there, gone, and there again."""
    gone = WorkerUnreachable("No worker answers.")
    seen = Mock(side_effect=[answer(1.0, 1.0, 2.0, sent=10**6), gone, answer(3.0, 1.0, 2.0)])
    monkeypatch.setattr("lightning_hetero.cli.top.ask_status", seen)

    def sleep(_: float) -> None:
        if seen.call_count == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("lightning_hetero.cli.top.time.sleep", sleep)
    monkeypatch.setenv("TERM", "dumb")
    states: list[str] = []

    def noted(sightings: list[object]) -> object:
        states.extend(each.state for each in sightings)  # type: ignore[attr-defined]
        return table(sightings)  # type: ignore[arg-type]

    monkeypatch.setattr("lightning_hetero.cli.top.table", noted)
    assert run(monkeypatch, "top", workers[0]) == 130
    assert states == ["training", "gone", "training"]


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["a:1", "--interval", "0"]])
def test_wrong_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(monkeypatch, "top", *arguments) == 2
    assert "see `lightning-hetero top --help`" in capsys.readouterr().err


def test_without_a_token_other_machines_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "top", "strix.example:9999", "--once") == 1
    assert "make one with `lightning-hetero token`" in " ".join(capsys.readouterr().out.split())
