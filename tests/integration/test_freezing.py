"""Parameters that are frozen and unfrozen during the run, on stages as on one device."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import ModelError

from ..models import TinyModule, loader, trainer
from ..pairwise import covering

NUM_LAYERS = 4


class InPhases(TinyModule):
    """Trains the head alone, then everything, then the early layers alone."""

    PHASES = (("lm_head",), ("",), ("layers.0", "layers.1", "embed"))

    def __init__(self) -> None:
        super().__init__(NUM_LAYERS)
        self.train_only(self.PHASES[0])

    def train_only(self, names: tuple[str, ...]) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(part in name for part in names))

    def on_train_epoch_start(self) -> None:
        self.train_only(self.PHASES[self.current_epoch])


def over(workers: list[str], micro_batching: Any, **stage: Any) -> HeteroPipelineStrategy:
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan([workers[0]], (1, 2), **stage),
        StagePlan([workers[1]], (2, NUM_LAYERS)),
    ]
    plan = Plan(stages, micro_batches=2)
    return HeteroPipelineStrategy(workers[:2], plan, micro_batching=micro_batching)


def train(strategy: Any) -> InPhases:
    module = InPhases()
    trainer(strategy, max_epochs=3, accumulate_grad_batches=2).fit(module, loader(24, 6))
    return module


@cache
def plain_run() -> InPhases:
    return train("auto")


@pytest.mark.parametrize(
    ("micro_batching", "recompute"), covering(product(["step", "boundary"], [False, True]))
)
def test_phases_equal_one_device(micro_batching: str, recompute: bool, workers: list[str]) -> None:
    expected = plain_run()
    found = train(over(workers, micro_batching, recompute=recompute))
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    others = expected.state_dict()
    for name, tensor in found.state_dict().items():
        assert (tensor - others[name]).norm() <= 1e-5 * others[name].norm(), name


def test_weights_in_a_narrow_dtype_cannot_be_unfrozen(workers: list[str]) -> None:
    with pytest.raises(ModelError, match="of layer 1 was unfrozen .* float16"):
        train(over(workers, "step", dtype="float16"))


def test_a_group_that_joins_late_is_refused(workers: list[str]) -> None:
    class AddsLate(TinyModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.lm_head.parameters(), lr=0.1)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                optimizer = self.optimizers(use_pl_optimizer=False)
                optimizer.add_param_group({"params": [*self.model.model.layers.parameters()]})  # type: ignore[union-attr]

    class HasSomeAway(AddsLate):
        def configure_optimizers(self) -> Any:
            layers = self.model.model.layers
            return torch.optim.SGD([*layers[2].parameters()], lr=0.1)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                optimizer = self.optimizers(use_pl_optimizer=False)
                optimizer.add_param_group({"params": [*self.model.lm_head.parameters()]})  # type: ignore[union-attr]

    for module in (AddsLate(NUM_LAYERS), HasSomeAway(NUM_LAYERS)):
        with pytest.raises(ModelError, match="add_param_group"):
            trainer(over(workers, "step"), max_epochs=1).fit(module, loader(12, 6))


class FreezesBeforeTheBackward(TinyModule):
    """Freezes a parameter when its gradient is on the way: one device drops it then."""

    def __init__(self, name: str) -> None:
        super().__init__(NUM_LAYERS)
        self.name = name

    def on_before_backward(self, loss: Any) -> None:
        self.get_parameter(self.name).requires_grad_(self.global_step == 0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.get_parameter(self.name).requires_grad_(True)


AWAY = "model.model.layers.2.mlp.up_proj.weight"
HERE = "model.model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "micro_batching"), [(AWAY, "step"), (AWAY, "boundary"), (HERE, "step")]
)
def test_a_freeze_between_forward_and_backward_is_refused(
    name: str, micro_batching: str, workers: list[str]
) -> None:
    strategy = over(workers, micro_batching)
    inside = name if micro_batching == "step" else name.removeprefix("model.model.layers.")
    with pytest.raises(ModelError, match=f"{inside} was set to False after the forward"):
        trainer(strategy, max_epochs=1).fit(FreezesBeforeTheBackward(name), loader(12, 6))


@pytest.mark.follows(
    "keep the layer with the coordinator and use the safe mode, `micro_batching='boundary'`",
)
def test_a_layer_with_the_coordinator_may_freeze_before_the_backward(workers: list[str]) -> None:
    found, expected = FreezesBeforeTheBackward(HERE), FreezesBeforeTheBackward(HERE)
    trainer(over(workers, "boundary"), max_epochs=1).fit(found, loader(12, 6))
    trainer(max_epochs=1).fit(expected, loader(12, 6))
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    weight, other = (each.get_parameter(HERE) for each in (found, expected))
    assert (weight - other).norm() <= 1e-5 * other.norm()
