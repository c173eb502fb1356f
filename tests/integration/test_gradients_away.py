"""Gradients on workers: code that looks at them or drops them is followed, or told that it cannot.

What a hook does with ``parameter.grad`` reaches the gradients of all layers on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.tensorboard.summary import histogram

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import ModelError

from ..models import TinyModule, fit, loader, scaled_precision
from ..pairwise import each_value, keeping
from .refusals import try_all

NUM_LAYERS = 5
BATCH_SIZE = 6
# A layer on the second worker.
AWAY = 3

Act = Callable[[Any], object]
Batch = dict[str, Tensor]


def line(workers: list[str]) -> Plan:
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan([workers[0]], (1, 3)),
        StagePlan([workers[1]], (3, NUM_LAYERS)),
    ]
    return Plan(stages, micro_batches=3)


def replicas(workers: list[str]) -> Plan:
    return Plan([StagePlan([*workers[:2]], (0, NUM_LAYERS), shares=[1, 2])], micro_batches=3)


def train(
    module: TinyModule, workers: list[str] | None, make: Any = line, **options: Any
) -> TinyModule:
    """Four batches; by Lightning alone where there are no workers."""
    strategy: Any = "auto"
    if workers is not None:
        settings = {key: options.pop(key) for key in ("micro_batching",) if key in options}
        strategy = HeteroPipelineStrategy(workers[:2], make(workers), **settings)
    options.pop("micro_batching", None)
    return fit(module, strategy, loader(4 * BATCH_SIZE, BATCH_SIZE), **options)


class FrozenEnds(TinyModule):
    """All that trains may be on workers, as adapters are."""

    def __init__(self) -> None:
        super().__init__(NUM_LAYERS)
        self.model.model.embed_tokens.requires_grad_(False)
        self.model.model.norm.requires_grad_(False)
        self.model.lm_head.requires_grad_(False)


class AfterBackward(TinyModule):
    def __init__(self, act: Act) -> None:
        super().__init__(NUM_LAYERS)
        self.act = act

    def on_after_backward(self) -> None:
        self.act(self)


class BeforeStep(AfterBackward):
    def on_after_backward(self) -> None:
        """Nothing."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.act(self)


class InBackward(AfterBackward):
    def on_after_backward(self) -> None:
        """Nothing."""

    def backward(self, loss: Tensor, *_args: Any, **_kwargs: Any) -> None:
        loss.backward()
        self.act(self)


class InStep(AfterBackward):
    def on_after_backward(self) -> None:
        """Nothing."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        self.act(self)
        optimizer.step()


PLACES = (AfterBackward, BeforeStep, InBackward, InStep)


def all_gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def away(module: Any) -> Iterable[nn.Parameter]:
    """Some parameters of a layer on a worker."""
    parameters: Iterable[nn.Parameter] = module.model.model.layers[AWAY].mlp.parameters()
    return parameters


LOOKS: dict[str, Act] = {
    "clip by norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01),
    "clip by value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "norm of all": lambda m: nn.utils.get_total_norm(all_gradients(m)),
    "norm of each": lambda m: sum(float(g.norm()) for g in all_gradients(m)),
    "Lightning's norms": lambda m: grad_norm(m, 2),
    "are they finite": lambda m: all(bool(g.isfinite().all()) for g in all_gradients(m)),
    "noise": lambda m: [g.add_(0.1) for g in all_gradients(m)],
    "histogram": lambda m: [histogram("g", g, "auto") for g in all_gradients(m)],
    "scale": lambda m: [p.grad.mul_(0.5) for p in away(m)],  # type: ignore[union-attr]
    "foreach": lambda m: torch._foreach_mul_(all_gradients(m), 0.5),
    "another one": lambda m: [setattr(p, "grad", torch.ones_like(p)) for p in away(m)],
}


def test_looking_into_gradients_on_workers_is_refused(workers: list[str]) -> None:
    look_in_all_ways = try_all(LOOKS, r"wants the gradient of a parameter.*grad_norms\(\)")
    with pytest.raises(ModelError, match="wants the gradient of a parameter"):
        train(AfterBackward(look_in_all_ways), workers)


@pytest.mark.parametrize("place", keeping([BeforeStep], PLACES))
def test_clipping_by_hand_is_refused_wherever_it_is(place: type, workers: list[str]) -> None:
    with pytest.raises(ModelError, match=r"clip them with `self\.clip_gradients"):
        train(place(LOOKS["clip by norm"]), workers)


@pytest.mark.parametrize("is_scaled", keeping([True], [False, True]), ids=["32", "16-mixed"])
def test_clipping_by_hand_is_refused_where_nothing_trains_here(
    is_scaled: bool, workers: list[str]
) -> None:
    class Clipping(FrozenEnds):
        def configure_gradient_clipping(self, *_args: Any, **_kwargs: Any) -> None:
            nn.utils.clip_grad_norm_(self.parameters(), 0.01)

    def without_coordinator(workers: list[str]) -> Plan:
        return Plan([StagePlan([workers[0]], (0, NUM_LAYERS))], micro_batches=3)

    plugins = [scaled_precision()] if is_scaled else []
    with pytest.raises(ModelError, match="grad_norms"):
        train(Clipping(), workers, without_coordinator, plugins=plugins)


def drop_of_a_layer(module: Any) -> None:
    for parameter in away(module):
        parameter.grad = None


def drop_if_large(module: Any) -> None:
    """A batch with a bad gradient is left out."""
    if float(module.model.lm_head.weight.grad.norm()) > 0.43:
        module.zero_grad()


def scale_here(module: Any) -> None:
    module.model.lm_head.weight.grad.mul_(0.5)


def drop_in_third_batch(module: Any) -> None:
    if module.trainer.fit_loop.batch_idx == 2:
        module.trainer.optimizers[0].zero_grad()


DROPS = (drop_of_a_layer, drop_if_large, scale_here, drop_in_third_batch)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.05},
    "boundary": {"micro_batching": "boundary", "accumulate_grad_batches": 2},
}


DROPPED = each_value(DROPS, [*OPTIONS])


def assert_same(found: TinyModule, expected: TinyModule) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("drop", "options"),
    keeping([(drop_if_large, "accumulated"), (drop_in_third_batch, "boundary")], DROPPED),
)
def test_dropped_gradients_are_dropped_on_workers(
    drop: Act, options: str, workers: list[str]
) -> None:
    place = BeforeStep if drop is drop_of_a_layer else AfterBackward
    expected = train(place(drop), None, **OPTIONS[options])
    assert_same(train(place(drop), workers, **OPTIONS[options]), expected)


def test_replicas_drop_gradients_alike(workers: list[str]) -> None:
    expected = train(BeforeStep(drop_of_a_layer), None)
    assert_same(train(BeforeStep(drop_of_a_layer), workers, replicas), expected)


def test_dropped_gradients_of_scaled_losses_are_dropped(workers: list[str]) -> None:
    expected = train(AfterBackward(drop_of_a_layer), None, plugins=[scaled_precision()])
    found = train(AfterBackward(drop_of_a_layer), workers, plugins=[scaled_precision()])
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-2, atol=1e-3)


class KeepsGradients(TinyModule):
    def optimizer_zero_grad(self, *_args: Any) -> None:
        """Never."""


class DropsEachBatch(TinyModule):
    def on_before_backward(self, loss: Tensor) -> None:
        self.zero_grad()


@pytest.mark.follows(
    "by the rule of Lightning's own `optimizer_zero_grad`. Accumulate with the Trainer's "
    "`accumulate_grad_batches`",
)
@pytest.mark.parametrize(("kind", "what"), [(KeepsGradients, "kept"), (DropsEachBatch, "dropped")])
def test_another_rule_for_zeroing_is_refused(kind: type, what: str, workers: list[str]) -> None:
    with pytest.raises(ModelError, match=rf"was {what} here before a backward.*accumulate_grad"):
        train(kind(NUM_LAYERS), workers, accumulate_grad_batches=1 if what == "kept" else 2)
    expected = train(TinyModule(NUM_LAYERS), None, accumulate_grad_batches=2)
    assert_same(train(TinyModule(NUM_LAYERS), workers, accumulate_grad_batches=2), expected)


class ZeroesInPlace(TinyModule):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def test_gradients_may_be_zeroed_in_place(workers: list[str]) -> None:
    assert_same(train(ZeroesInPlace(NUM_LAYERS), workers), train(ZeroesInPlace(NUM_LAYERS), None))


class ByHand(TinyModule):
    """Zeroes in its own way, and runs a backward without Lightning."""

    def __init__(self, act: Act) -> None:
        super().__init__(NUM_LAYERS)
        self.automatic_optimization = False
        self.act = act

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        for parameter in self.parameters():
            parameter.grad = None
        loss: Tensor = self.model(**batch).loss
        loss.backward()
        self.act(self)
        self.optimizers().step()  # type: ignore[union-attr]
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


@pytest.mark.parametrize("drop", keeping([drop_of_a_layer], [scale_here, drop_of_a_layer]))
def test_gradients_may_be_dropped_by_hand(drop: Act, workers: list[str]) -> None:
    assert_same(train(ByHand(drop), workers), train(ByHand(drop), None))


def test_looking_is_refused_after_a_backward_without_lightning(workers: list[str]) -> None:
    with pytest.raises(ModelError, match="wants the gradient"):
        train(ByHand(LOOKS["clip by norm"]), workers)


class HooksLate(TinyModule):
    def on_train_start(self) -> None:
        for parameter in away(self):
            parameter.register_hook(lambda gradient: 0.1 * gradient)


def test_a_hook_that_comes_when_its_layer_is_away_is_refused(workers: list[str]) -> None:
    with pytest.raises(ModelError, match=r"`register_hook` adds a hook .* would not fire"):
        train(HooksLate(NUM_LAYERS), workers)
