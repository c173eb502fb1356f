"""Torchmetrics objects have the values of one device, at every step and at the end of an epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassRecall,
)
from torchmetrics.text import Perplexity

from lightning_hetero import HeteroPipelineStrategy

from ..models import VOCABULARY, TinyModule, loader, trainer
from ..pairwise import keeping


class WholeState(Metric):
    """Its update looks at what it has seen before."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.tensor(0.0), dist_reduce_fx="max")
        self.largest: Tensor

    def update(self, values: Tensor) -> None:
        self.largest = torch.maximum(self.largest, values.max().float())

    def compute(self) -> Tensor:
        return self.largest


class Measured(TinyModule):
    """Logs metrics in all the ways that torchmetrics and Lightning have."""

    def __init__(self) -> None:
        super().__init__()
        self.perplexity = Perplexity(ignore_index=-100)
        self.nested = nn.ModuleDict({"auroc": MulticlassAUROC(VOCABULARY)})
        self.collection = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(VOCABULARY, average="micro"),
                "recall": MulticlassRecall(VOCABULARY),
                "f1": MulticlassF1Score(VOCABULARY),
            },
            prefix="all/",
        )
        self.updated, self.epoch, self.twice = MeanMetric(), MeanMetric(), MeanMetric()
        self.largest = WholeState()
        self.history: list[dict[str, float]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
        self.perplexity(logits, labels)
        self.log("perplexity", self.perplexity, on_step=True, on_epoch=True, prog_bar=True)
        known = labels != -100
        self.collection(logits[known], labels[known])
        self.log_dict(self.collection, on_step=True, on_epoch=True)
        self.nested["auroc"](logits[known].softmax(-1), labels[known])
        self.log("auroc", self.nested["auroc"])
        self.log_means(batch["input_ids"].float())
        loss: Tensor = output.loss
        return loss

    def log_means(self, values: Tensor) -> None:
        self.updated.update(values)
        self.log("updated", self.updated, on_step=True, on_epoch=True)
        self.epoch(values)
        self.log("epoch", self.epoch, on_step=False, on_epoch=True)
        self.twice(values)
        self.log("first", self.twice)
        self.twice(2 * values)
        self.log("second", self.twice)
        self.largest(values)
        self.log("largest", self.largest, on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = self.trainer.logged_metrics
        self.history.append({name: float(value) for name, value in logged.items()})

    def on_train_epoch_end(self) -> None:
        self.history.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})


@pytest.mark.parametrize("micro_batching", keeping(["boundary"], ["step", "boundary"]))
def test_metrics_are_those_of_one_device_at_every_step(
    micro_batching: Any, workers: list[str]
) -> None:
    histories = []
    strategy = HeteroPipelineStrategy(
        workers[:1], "even", micro_batches=3, micro_batching=micro_batching
    )
    for chosen in ("auto", strategy):
        module = Measured()
        run = trainer(chosen, max_epochs=2, log_every_n_steps=1)
        run.fit(module, loader(14, 7, padded=True))
        histories.append(module.history)
    expected, found = histories
    assert "perplexity_step" in expected[0]
    assert "updated_step" not in expected[0]
    assert len(found) == len(expected) == 6
    for step, wanted in zip(found, expected, strict=True):
        assert step == pytest.approx(wanted, rel=1e-5)
