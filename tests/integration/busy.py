"""A module with every kind of state that a ``training_step`` may change, and its comparison."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from ..conftest import worker_process
from ..patterns.learner import BATCH_SIZE, CLASSES, WIDTH, Block, Learner, cross_entropy


@pytest.fixture(scope="module")
def allowing() -> Iterator[list[str]]:
    """Two workers that may import the layers."""
    with worker_process("--allow", "tests") as first, worker_process("--allow", "tests") as second:
        yield [first.address, second.address]


class DroppingBlock(Block):
    """Drops numbers at random."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def update(self, hidden: Tensor) -> Tensor:
        update: Tensor = self.dropout(super().update(hidden))
        return update


@dataclass
class Memory:
    """An object of the user's own."""

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    total: Tensor = field(default_factory=lambda: torch.zeros(()))


class Busy(Learner):
    """Has every kind of state that a ``training_step`` may change."""

    layer = DroppingBlock

    def __init__(self, mode: str, noise: float, has_norm: bool) -> None:
        super().__init__()
        self.automatic_optimization = mode != "manual"
        self.noise = noise
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(WIDTH) if has_norm else nn.Identity()
        self.register_buffer("seen", torch.zeros(()))
        self.memory = Memory()
        self.kept: list[Tensor] = []
        self.counts = {"steps": 0}
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.mean, self.sum = MeanMetric(), SumMetric()
        self.collection = MetricCollection(
            [MulticlassF1Score(CLASSES), MulticlassAccuracy(CLASSES)]
        )
        self.torch_draws = torch.Generator().manual_seed(1)
        self.numpy_draws = np.random.default_rng(1)
        self.old_draws = np.random.RandomState(1)
        self.python_draws = random.Random(1)

    def leave(self, hidden: Tensor) -> Tensor:
        return super().leave(self.norm(self.dropout(hidden).transpose(1, 2)).transpose(1, 2))

    def drawn(self) -> float:
        """A number from every generator that there is."""
        own = [self.numpy_draws.random(), self.old_draws.rand(), self.python_draws.random()]
        everyones = [torch.rand(()), np.random.rand(), random.random()]
        return float(sum([*own, *everyones], start=torch.rand((), generator=self.torch_draws)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        logits = self(inputs)
        loss = cross_entropy(logits, targets) + self.noise * self.drawn()
        self.keep(loss.detach())
        self.measure(logits.detach().flatten(0, 1), targets.flatten())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss if self.automatic_optimization else self.step_with(loss)

    def keep(self, loss: Tensor) -> None:
        """Leave something of a loss in every place."""
        self.seen += 1
        self.kept.append(loss)
        self.counts["steps"] += 1
        self.memory.steps += 1
        self.memory.losses.append(float(loss))
        self.memory.total += loss.cpu()

    def measure(self, logits: Tensor, targets: Tensor) -> None:
        """Call metrics, update metrics, and log them."""
        self.accuracy(logits, targets)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.mean.update(logits)
        self.sum(logits.sum())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log_dict(self.collection(logits, targets))

    def step_with(self, loss: Tensor) -> None:
        """One step by hand."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=BATCH_SIZE)

    def state(self) -> dict[str, Any]:
        """All that a run may have changed."""
        return {
            "weights": {**dict(self.named_parameters()), **dict(self.named_buffers())},
            "kept": [self.kept, self.counts, vars(self.memory)],
            "metrics": [
                [metric.metric_state, metric._update_count]
                for metric in (self.mean, self.sum, self.accuracy, *self.collection.values())
            ],
            "generators": [
                self.torch_draws.get_state(),
                self.numpy_draws.bit_generator.state,
                self.old_draws.get_state(),
                self.python_draws.getstate(),
                torch.get_rng_state(),
                np.random.get_state(),
                random.getstate(),
            ],
        }


def _array(values: Any) -> Any:
    return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)


def assert_same(found: Any, expected: Any) -> None:
    """Bit for bit, at any depth."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            assert_same(mine, other)
    elif isinstance(expected, (Tensor, np.ndarray)):
        assert np.array_equal(_array(found), _array(expected), equal_nan=True)
    else:
        assert found == expected
