"""What people do with one trainer after the other, and one run after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.utilities.model_summary import ModelSummary

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import ModelError

from ..equality import assert_close, weights_of
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import keeping

# Makes a trainer with the strategy that is tried.
MakeTrainer = Callable[..., pl.Trainer]


def numbers(run: pl.Trainer) -> list[float]:
    """What a run left behind, in short."""
    return [float(value) for _, value in sorted(run.callback_metrics.items())]


def fit_twice(make: MakeTrainer, _folder: Path) -> list[Any]:
    run, module = make(max_epochs=1), TinyModule()
    run.fit(module, loader(20, 4))
    run.fit(module, loader(20, 4))
    return module.losses


def fit_for_more_epochs(make: MakeTrainer, _folder: Path) -> list[Any]:
    run, module = make(max_epochs=1), TinyModule()
    run.fit(module, loader(12, 4))
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(12, 4))
    return [*module.losses, run.global_step, run.current_epoch]


def fit_another_module(make: MakeTrainer, _folder: Path) -> list[Any]:
    run, first, second = make(max_epochs=1), TinyModule(), TinyModule(num_layers=3)
    run.fit(first, loader(12, 4))
    run.fit_loop.max_epochs = 2
    run.fit(second, loader(12, 4))
    return first.losses + second.losses


def all_four(make: MakeTrainer, _folder: Path) -> list[Any]:
    run, module = make(max_epochs=1), TinyModule()
    run.fit(module, loader(12, 4), loader(8, 4))
    found = numbers(run)
    for evaluate in (run.validate, run.test):
        evaluate(module, loader(8, 4), verbose=False)
        found += numbers(run)
    return found + [batch.tolist() for batch in run.predict(module, loader(8, 4)) or []]


def validate_before_fit(make: MakeTrainer, _folder: Path) -> list[Any]:
    run, module = make(max_epochs=1), TinyModule()
    run.validate(module, loader(8, 4), verbose=False)
    before = numbers(run)
    run.fit(module, loader(12, 4))
    return before + module.losses


def best_and_last(make: MakeTrainer, folder: Path) -> list[Any]:
    checkpoint = ModelCheckpoint(
        folder, monitor="val_loss", mode="max", save_top_k=2, save_last=True
    )
    options = {"callbacks": [checkpoint], "enable_checkpointing": True}
    run, module = make(max_epochs=2, **options), TinyModule()
    run.fit(module, loader(12, 4), loader(8, 4))
    found = []
    for path in ("best", "last"):
        run.test(module, loader(8, 4), ckpt_path=path, verbose=False)
        found += numbers(run)
    more = make(max_epochs=3, **options)
    more.fit(module, loader(12, 4), loader(8, 4), ckpt_path="last")
    assert found[0] != found[-1]
    return [*found, *numbers(more), more.global_step]


class Writer(BasePredictionWriter):
    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.written: list[Any] = []

    def write_on_batch_end(self, *args: Any) -> None:
        prediction, indices, batch_idx = args[2], args[3], args[5]
        self.written.append([prediction.tolist(), indices, batch_idx])

    def write_on_epoch_end(self, *args: Any) -> None:
        predictions, indices = args[2:]
        self.written.append([[batch.tolist() for batch in predictions], indices])


def write_predictions(make: MakeTrainer, _folder: Path) -> list[Any]:
    writer = Writer("batch_and_epoch")
    make(callbacks=[writer]).predict(TinyModule(), loader(8, 4), return_predictions=False)
    assert len(writer.written) == 3
    return writer.written


class Summary(pl.Callback):
    """The summary that `ModelSummary` prints, while the layers are away."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        summary = ModelSummary(pl_module, max_depth=-1)
        self.found = [
            *summary.layer_names,
            *summary.param_nums,
            summary.total_parameters,
            summary.trainable_parameters,
        ]


def count_parameters(make: MakeTrainer, _folder: Path) -> list[Any]:
    summary, module = Summary(), TinyModule()
    module.model.model.embed_tokens.requires_grad_(False)
    make(max_steps=1, callbacks=[summary]).fit(module, loader(4, 4))
    return summary.found


USES = (
    fit_twice,
    fit_for_more_epochs,
    fit_another_module,
    all_four,
    validate_before_fit,
    best_and_last,
    write_predictions,
    count_parameters,
)


@pytest.mark.parametrize(
    "use",
    keeping([fit_another_module, all_four, best_and_last, write_predictions], USES),
    ids=lambda use: use.__name__,
)
def test_it_goes_as_on_one_device(
    use: Callable[[MakeTrainer, Path], list[Any]], workers: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    expected = use(trainer, tmp_path / "plain")

    def over_workers(**options: Any) -> pl.Trainer:
        strategy = HeteroPipelineStrategy(workers[:2], "even", micro_batches=3)
        return trainer(strategy, **options)

    torch.manual_seed(0)
    found = use(over_workers, tmp_path / "cut")
    assert_near(found, expected)


class Beside(pl.Callback):
    """Trains another module meanwhile, on a thread or on the thread of this training."""

    def __init__(self, workers: list[str], takes_thread: bool) -> None:
        self._workers = workers
        self._takes_thread = takes_thread
        self.module = TinyModule()
        self.error: Exception | None = None

    def on_train_batch_end(self, *args: Any) -> None:
        if self._takes_thread:
            thread = threading.Thread(target=self.train)
            thread.start()
            thread.join()
        else:
            self.train()

    def train(self) -> None:
        try:
            fit(self.module, HeteroPipelineStrategy(self._workers, "even"), loader(4, 4))
        except ModelError as error:
            self.error = error


@pytest.mark.follows("Train one after the other, or start a process for each training.")
def test_only_one_thread_trains_over_workers(workers: list[str]) -> None:
    beside, alone = Beside(workers[1:2], takes_thread=True), TinyModule()
    fit(TinyModule(), HeteroPipelineStrategy(workers[:1], "even"), loader(4, 4), callbacks=[beside])
    assert "Another thread of this process trains over workers" in str(beside.error)
    beside.error = None
    beside.on_train_batch_end()
    assert beside.error is None
    fit(alone, data=loader(4, 4))
    assert_close(weights_of(beside.module), weights_of(alone))


def test_a_callback_trains_another_module(workers: list[str]) -> None:
    beside, alone = Beside(workers[1:2], takes_thread=False), TinyModule()
    fit(TinyModule(), HeteroPipelineStrategy(workers[:1], "even"), loader(4, 4), callbacks=[beside])
    assert beside.error is None
    fit(alone, data=loader(4, 4))
    assert_close(weights_of(beside.module), weights_of(alone))


def assert_near(found: Any, expected: Any) -> None:
    """Nested lists of numbers, compared number by number."""
    if isinstance(expected, (str, type(None))):
        assert found == expected
        return
    if not isinstance(expected, list):
        assert found == (pytest.approx(expected, rel=1e-4, abs=1e-5))
        return
    assert len(found) == len(expected)
    for mine, wanted in zip(found, expected, strict=True):
        assert_near(mine, wanted)
