"""What user code does between `training_step` and the backward of its loss: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import ModelError

from ..equality import differing
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import covering, keeping

NUM_LAYERS = 5
PLANS = ["a line", "the coordinator owns all", "the coordinator owns a part"]


def plan_of(kind: str, worker: str) -> Plan:
    if kind == "a line":
        stages = [StagePlan(["coordinator"], (0, 2)), StagePlan([worker], (2, NUM_LAYERS))]
        return Plan(stages, micro_batches=2)
    optimizer: Any = "split" if kind == "the coordinator owns a part" else None
    hosted = StagePlan([worker, "coordinator"], (0, NUM_LAYERS), optimizer=optimizer)
    return Plan([hosted], micro_batches=2)


class Calling(pl.Callback):
    """Calls a function of the module in one of Lightning's hooks."""

    def __init__(self, hook: str, function: Callable[[Any], Any]) -> None:
        self.found: list[Any] = []

        def call(_trainer: pl.Trainer, module: pl.LightningModule, *_arguments: Any) -> None:
            self.found.append(function(module))

        setattr(self, hook, call)


def run(worker: str, kind: str, *callbacks: pl.Callback) -> TinyModule:
    strategy = HeteroPipelineStrategy([worker], plan_of(kind, worker))
    return fit(TinyModule(), strategy, loader(12, 4), callbacks=[*callbacks])


def run_alone(*callbacks: pl.Callback) -> TinyModule:
    data = loader(12, 2)
    return fit(TinyModule(), data=data, accumulate_grad_batches=2, callbacks=[*callbacks])


undisturbed_alone = cache(run_alone)


def forward(with_gradient: bool) -> Callable[[Any], Tensor]:
    def call(module: Any) -> Tensor:
        with torch.set_grad_enabled(with_gradient):
            logits: Tensor = module.model(torch.arange(5)[None]).logits
        return logits.detach().clone()

    return call


@pytest.mark.parametrize(
    ("kind", "hook", "with_gradient"),
    covering(
        (*place, with_gradient)
        for place in (
            ("a line", "on_before_zero_grad"),
            ("the coordinator owns all", "on_before_zero_grad"),
            # Behind the backward nobody waits any more.
            ("the coordinator owns a part", "on_before_optimizer_step"),
        )
        for with_gradient in (False, True)
    ),
)
def test_a_forward_of_ones_own_has_the_result_of_one_device(
    kind: str, hook: str, with_gradient: bool, workers: list[str]
) -> None:
    found, expected = (Calling(hook, forward(with_gradient)) for _ in range(2))
    assert differing(run(workers[0], kind, found), run_alone(expected)) == []
    assert len(found.found) == 3
    for its, logits in zip(found.found, expected.found, strict=True):
        assert torch.equal(its, logits)


@pytest.mark.follows(
    "Call the model within `training_step` or behind the backward (`on_after_backward`), or "
    "take `optimizer: split` from the plan.",
)
@pytest.mark.parametrize(
    ("hook", "with_gradient"),
    covering(product(["on_before_zero_grad", "on_before_backward"], [False, True])),
)
def test_a_forward_of_ones_own_is_refused_where_workers_wait_for_gradients(
    hook: str, with_gradient: bool, workers: list[str]
) -> None:
    with pytest.raises(ModelError, match="before the backward of its loss, where the workers"):
        run(workers[0], "the coordinator owns a part", Calling(hook, forward(with_gradient)))
    assert differing(run(workers[0], "the coordinator owns a part"), undisturbed_alone()) == []
    behind = Calling("on_after_backward", forward(with_gradient=False))
    assert (
        differing(run(workers[0], "the coordinator owns a part", behind), undisturbed_alone()) == []
    )


@pytest.mark.parametrize(
    ("kind", "hook"), covering(product(PLANS, ["on_before_zero_grad", "on_before_backward"]))
)
def test_gradients_that_are_published_in_part_are_not_told(
    kind: str, hook: str, workers: list[str]
) -> None:
    """The coordinator's are those of the batch before, or none; to add them up loses some."""
    asking = Calling(hook, lambda module: module.trainer.strategy.grad_norms())
    with pytest.raises(ModelError, match="Look at gradients in `on_after_backward` or later"):
        run(workers[0], kind, asking)


class Leaving(TinyModule):
    """Leaves a backward out."""

    def backward(self, loss: Tensor, *_args: Any, **_kwargs: Any) -> None:
        if self.trainer.global_step != 1:
            loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("kind", "window"), covering(product(PLANS, [1, 2])))
def test_a_backward_that_is_left_out_is_refused(kind: str, window: int, workers: list[str]) -> None:
    strategy = HeteroPipelineStrategy(workers[:1], plan_of(kind, workers[0]))
    with pytest.raises(ModelError, match="to leave a batch out, return None from `training_step`"):
        fit(Leaving(), strategy, loader(24, 4), accumulate_grad_batches=window)


@pytest.mark.parametrize("kind", keeping(PLANS[-1:], PLANS))
def test_an_error_before_the_backward_is_the_users_own(kind: str, workers: list[str]) -> None:
    def fail(_module: Any) -> None:
        raise KeyError("the user's own")

    module, strategy = TinyModule(), HeteroPipelineStrategy(workers[:1], plan_of(kind, workers[0]))
    failing = trainer(strategy, callbacks=[Calling("on_before_backward", fail)])
    with pytest.raises(KeyError, match="the user's own"):
        failing.fit(module, loader(12, 4))
    assert not any(parameter.is_meta for parameter in module.parameters())
    assert differing(run(workers[0], kind), undisturbed_alone()) == []
