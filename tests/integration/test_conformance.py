"""Lightning stays Lightning: the same hooks in the same order, the same metrics at every turn."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

from ..models import TinyModule, loader, trainer
from ..pairwise import keeping
from .hooks import Record, recording

NUM_LAYERS = 5
BATCH_SIZE = 8


class Metrics(pl.Callback):
    """What the trainer's metrics are after every batch and at the end."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def _note(self, pl_trainer: pl.Trainer) -> None:
        for kind in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            found = getattr(pl_trainer, kind)
            self.record.append((kind, {name: float(value) for name, value in found.items()}))
        self.record.append(("global_step", float(pl_trainer.global_step)))

    def on_train_batch_end(self, trainer: pl.Trainer, *_args: Any) -> None:
        self._note(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note(trainer)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note(trainer)


class LoggingModule(TinyModule):
    """Logs in every way that `self.log` has."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("longest", float(batch["attention_mask"].sum(1).max()), reduce_fx="max")
        self.log_dict({"double": 2 * loss, "rows": float(len(batch["labels"]))}, batch_size=1)
        return {"loss": loss, "rows": torch.ones(len(batch["labels"]))}


def run(strategy: Any) -> tuple[Record, Record]:
    calls: Record = []
    metrics: Record = []
    module = recording(LoggingModule, "module", calls)(NUM_LAYERS)
    callback = recording(pl.Callback, "callback", calls)()
    data = loader(5 * BATCH_SIZE, BATCH_SIZE)
    made = trainer(
        strategy,
        max_epochs=2,
        accumulate_grad_batches=2,
        num_sanity_val_steps=1,
        gradient_clip_val=1.0,
        callbacks=[callback, Metrics(metrics)],
    )
    made.fit(module, data, loader(2 * BATCH_SIZE, BATCH_SIZE))
    made.validate(module, loader(2 * BATCH_SIZE, BATCH_SIZE), verbose=False)
    made.test(module, loader(2 * BATCH_SIZE, BATCH_SIZE), verbose=False)
    made.predict(module, loader(2 * BATCH_SIZE, BATCH_SIZE))
    return calls, metrics


@pytest.fixture(scope="module")
def plain() -> tuple[Record, Record]:
    return run("auto")


@pytest.mark.filterwarnings("ignore:The first batch logs other values")
@pytest.mark.parametrize("micro_batching", keeping(["boundary"], ["step", "boundary"]))
def test_hooks_and_metrics_are_those_of_one_device(
    micro_batching: Any, plain: tuple[Record, Record], workers: list[str]
) -> None:
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan([workers[0]], (1, 3)),
        StagePlan([workers[1]], (3, NUM_LAYERS)),
    ]
    plan = Plan(stages, micro_batches=4)
    strategy = HeteroPipelineStrategy(workers[:2], plan, micro_batching=micro_batching)
    calls, metrics = run(strategy)
    assert calls == plain[0]
    assert [name for name, _ in metrics] == [name for name, _ in plain[1]]
    for (name, found), (_, expected) in zip(metrics, plain[1], strict=True):
        if micro_batching == "step" and isinstance(found, dict):
            # How many rows a step had is logged per micro-batch: the mean over them.
            found, expected = (
                {k: v for k, v in d.items() if "rows" not in k} for d in (found, expected)
            )
        assert found == pytest.approx(expected, rel=1e-5), name


def run_boring(strategy: Any) -> tuple[Tensor, list[Tensor]]:
    """Lightning's own model: its weights after training, and what it predicts."""
    torch.manual_seed(0)
    module, data = BoringModel(), BoringDataModule()
    made = trainer(strategy, max_epochs=1, limit_train_batches=5, limit_val_batches=2)
    made.fit(module, datamodule=data)
    made.validate(module, datamodule=data, verbose=False)
    made.test(module, datamodule=data, verbose=False)
    predicted = made.predict(module, datamodule=data)
    return module.layer.weight, [torch.as_tensor(batch) for batch in predicted or []]


def test_a_single_linear_is_a_list_of_one_layer(workers: list[str]) -> None:
    weight, predicted = run_boring(HeteroPipelineStrategy(workers[:1], "even", layers="layer"))
    expected_weight, expected = run_boring("auto")
    assert torch.equal(weight, expected_weight)
    assert len(predicted) == len(expected) > 0
    assert all(map(torch.equal, predicted, expected))
