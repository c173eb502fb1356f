"""The coordinator's layers are compiled and run again as the plan says."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DynamicCache

from lightning_hetero.coordinator import local_layers
from lightning_hetero.coordinator.local_layers import adjust_own, prepare_hosted
from lightning_hetero.model.layers import DecoderLayer
from lightning_hetero.model.override import overrides_of
from lightning_hetero.pipeline.random_numbers import Draws
from lightning_hetero.plan import Plan, StagePlan


class Cached(nn.Linear):
    """A layer that takes a cache, and tells what it was given."""

    def forward(self, hidden: torch.Tensor, cache: object = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden) + (0 if cache is None else 100)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often what is compiled was called."""
    found: list[str] = []

    def compiled(forward: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            found.append("compiled")
            return forward(*args, **kwargs)  # type: ignore[operator]

        return call

    monkeypatch.setattr(local_layers, "compiled", compiled)
    return found


def adjusted_layer(recompute: bool = False) -> tuple[Cached, list[Callable[[], None]]]:
    torch.manual_seed(0)
    layer = Cached(2, 2)
    plan = Plan([StagePlan(["coordinator"], (0, 1), recompute=recompute, compile=True)])
    return layer, adjust_own([DecoderLayer("layers.0", layer)], plan.stages)


@pytest.mark.parametrize(("recompute", "times"), [(False, 1), (True, 2)])
def test_a_training_step_is_compiled_without_its_cache(
    calls: list[str], recompute: bool, times: int
) -> None:
    layer, adjusted = adjusted_layer(recompute)
    hidden = torch.ones(1, 2, requires_grad=True)
    output = layer(hidden, DynamicCache())
    output.sum().backward()
    assert calls == ["compiled"] * times
    assert torch.equal(output, Cached.forward(layer, hidden))
    for put_back in adjusted:
        put_back()
    assert "forward" not in vars(layer)
    layer(hidden)
    assert len(calls) == times


class Scaling(nn.Linear):
    """A layer that scales by a number that torch does not draw."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # A tensor, since autograd keeps a number of the first forward.
        return super().forward(hidden) * torch.tensor(random.random() * np.random.rand()).float()


def test_a_forward_that_runs_again_draws_the_same_from_random_and_numpy() -> None:
    layer = Scaling(2, 2, bias=False)
    stage = StagePlan(["coordinator"], (0, 1), recompute=True)
    adjust_own([DecoderLayer("layers.0", layer)], [stage])
    outputs = [layer(torch.ones(1, 2, requires_grad=True)).sum() for _ in range(2)]
    (outputs[0] + outputs[1]).backward()
    # Each output is linear in the weight, so the weight times its gradient is their sum.
    assert layer.weight.grad is not None
    torch.testing.assert_close((layer.weight * layer.weight.grad).sum(), outputs[0] + outputs[1])


class Counting(nn.Module):
    """Has an argument with the name of an option of `checkpoint`, and counts its depth."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.depth = nn.Linear(2, 2), 0

    def forward(self, hidden: torch.Tensor, debug: float = 0.0) -> torch.Tensor:
        self.depth += 1
        result = self.linear(hidden).tanh() + debug
        self.depth -= 1
        return result


def test_a_forward_that_runs_again_gets_all_arguments_and_runs_to_its_end() -> None:
    layer = Counting()
    stage = StagePlan(["coordinator"], (0, 1), recompute=True)
    hidden = torch.ones(1, 2, requires_grad=True)
    expected = layer(hidden, debug=3.0)
    adjust_own([DecoderLayer("layers.0", layer)], [stage])
    found = layer(hidden, debug=3.0)
    found.sum().backward()
    assert torch.equal(found, expected)
    assert layer.depth == 0


def test_a_cache_that_is_read_is_not_compiled(calls: list[str]) -> None:
    layer, _ = adjusted_layer()
    with torch.no_grad():
        assert (layer(torch.ones(1, 2), DynamicCache()) > 50).all()
        assert calls == []
        layer(torch.ones(1, 2))
    assert calls == ["compiled"]


def test_a_copy_of_a_layer_computes_with_its_own_weights(calls: list[str]) -> None:
    layer, _ = adjusted_layer()
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        run = partial(other, torch.ones(1, 2))
        assert torch.equal(run(), torch.zeros(1, 2))
    assert calls == ["compiled"]


def test_layers_of_a_replica_are_compiled_run_again_and_seeded(calls: list[str]) -> None:
    torch.manual_seed(0)
    layers = [DecoderLayer(f"layers.{number}", Cached(2, 2)) for number in range(3)]
    stage = StagePlan(["a", "coordinator"], (0, 2), recompute=True, compile=True)
    plan = Plan([stage, StagePlan(["b"], (2, 3))])
    adjusted = prepare_hosted(layers, plan, Draws(1))
    for layer in layers:
        layer.module(torch.ones(1, 2, requires_grad=True), DynamicCache()).sum().backward()
    assert calls == ["compiled"] * 4
    assert [len([*overrides_of(layer.module)]) for layer in layers] == [3, 3, 0]
    for put_back in adjusted:
        put_back()
    assert not any(any(overrides_of(layer.module)) for layer in layers)
