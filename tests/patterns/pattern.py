"""A way of writing a LightningModule, and what becomes of it over two workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

from ..models import trainer
from .learner import NUM_LAYERS, NUM_STEPS, samples

MICRO_BATCHES = 4
TOLERANCE = 1e-5
# Relative to how far training has moved the weights, which rounding does not know.
TOLERANCE_OF_MOVES = 2e-4


@dataclass(frozen=True)
class Pattern:
    """One way of writing a LightningModule.

    Args:
        name: Of one line in the table.
        says: What the module does, in a sentence.
        module: Makes the module, with the same weights at every call.
        data: Makes the batches.
        settings: Arguments of the strategy; ``here`` is the number of first layers that the
            coordinator has.
        refused: What the error says that ends the run with these settings; None where it is to
            have the numbers of plain Lightning.
        said: What is said with these settings, where the run goes on.
        differs: Whether the numbers are others then.
        remedy: Settings in addition, with which the numbers are those of plain Lightning.
        said_with_remedy: What is said with them.
        trainer: Arguments of the Trainer.
        callbacks: Make the callbacks.
        num_layers: How many layers there are.
    """

    name: str
    says: str
    module: Callable[[], pl.LightningModule]
    data: Callable[[], DataLoader[Any]] = samples
    settings: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None
    said: str | None = None
    differs: bool = False
    remedy: Mapping[str, Any] | None = None
    said_with_remedy: str | None = None
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Callable[[], pl.Callback]] = ()
    num_layers: int = NUM_LAYERS

    @property
    def is_equal(self) -> bool:
        """Whether it has the numbers of plain Lightning without the remedy."""
        return self.refused is None and not self.differs

    def strategy(self, workers: Sequence[str], more: Mapping[str, Any]) -> HeteroPipelineStrategy:
        """The strategy with the pattern's settings, and some more."""
        settings = {"layers": "layers", "here": 0, **self.settings, **more}
        micro_batches = settings.pop("micro_batches", MICRO_BATCHES)
        plan = plan_of(workers, settings.pop("here"), self.num_layers, micro_batches)
        return HeteroPipelineStrategy(list(workers[: len(plan.stages) - 1]), plan, **settings)


def plan_of(workers: Sequence[str], here: int, num_layers: int, micro_batches: int) -> Plan:
    """So many first layers with the coordinator, and the others on one or two workers."""
    middle = (here + num_layers + 1) // 2
    ranges = [(here, middle), (middle, num_layers)]
    remote = [
        StagePlan([worker], layers)
        for worker, layers in zip(workers, ranges, strict=False)
        if layers[0] < layers[1]
    ]
    return Plan([StagePlan(["coordinator"], (0, here)), *remote], micro_batches)


@dataclass(frozen=True)
class Outcome:
    """What a run has left.

    Args:
        losses: After each batch.
        values: What was logged and predicted, by name.
        weights: All parameters and buffers.
        moved: By how much each of them has changed.
    """

    losses: Sequence[float]
    values: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    moved: Mapping[str, Tensor]

    def apart(self, other: Outcome) -> float:
        """The distance of the weights of two runs, relative to how far training has moved them."""
        assert self.moved.keys() == other.moved.keys()
        found, expected = (
            torch.cat([tensor.flatten().double() for tensor in each.moved.values()])
            for each in (self, other)
        )
        return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


class Losses(pl.Callback):
    """Keeps the loss of every batch."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        logged = trainer.callback_metrics
        self.found.append(float(logged.get("loss_step", logged.get("loss", torch.nan))))


def run(pattern: Pattern, strategy: Any = "auto") -> Outcome:
    """Train, and validate and predict where the module can."""
    module, losses = pattern.module(), Losses()
    before = _copies(module)
    torch.manual_seed(1)
    options: dict[str, Any] = {"max_steps": NUM_STEPS, "max_epochs": -1, **pattern.trainer}
    callbacks = [losses, *(make() for make in pattern.callbacks)]
    run_of = trainer(strategy, callbacks=callbacks, **options)
    validates = is_overridden("validation_step", module)
    run_of.fit(module, pattern.data(), pattern.data() if validates else None)
    values = {name: value.detach().clone() for name, value in run_of.callback_metrics.items()}
    if is_overridden("predict_step", module):
        predictions = run_of.predict(module, pattern.data()) or []
        values |= {f"prediction {i}": each for i, each in enumerate(predictions)}  # type: ignore[misc]
    weights = _copies(module)
    moved = {name: weights[name].double() - before[name].double() for name in weights}
    return Outcome(losses.found, values, weights, moved)


def _copies(module: pl.LightningModule) -> dict[str, Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def assert_equal(found: Outcome, expected: Outcome) -> None:
    """Compare losses, values and weights of two runs."""
    torch.testing.assert_close(found.losses, expected.losses, rtol=TOLERANCE, atol=1e-6)
    for mine, other in ((found.values, expected.values), (found.weights, expected.weights)):
        assert mine.keys() == other.keys()
        for name, tensor in other.items():
            difference = (mine[name].double() - tensor.double()).norm()
            error = float(difference / tensor.double().norm().clamp(min=0.1))
            assert error <= TOLERANCE, f"{name} is off by {error:.1e}"
    assert found.apart(expected) <= TOLERANCE_OF_MOVES
