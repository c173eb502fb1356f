"""Overrides of a module's methods: a stack above what its user has put on it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.model.override import (
    ForwardOverride,
    has_own_forward,
    overrides_of,
    own_forward,
    stand_in,
)


class Added(ForwardOverride):
    def __call__(self, hidden: Tensor) -> Any:
        return self.below(hidden) + 1


class Doubled(ForwardOverride):
    def __call__(self, hidden: Tensor) -> Any:
        return self.below(hidden) * 2


def result(layer: nn.Module) -> float:
    return float(layer(torch.tensor(3.0)))


def test_overrides_run_from_the_top_to_the_method_of_the_class() -> None:
    layer = nn.Identity()
    added, doubled = Added(layer).put_on(), Doubled(layer).put_on()
    assert [*overrides_of(layer)] == [doubled, added]
    assert result(layer) == 8
    assert float(own_forward(layer)(torch.tensor(3.0))) == 3
    assert not has_own_forward(layer)


@pytest.mark.parametrize("first", [0, 1])
def test_overrides_come_off_in_any_order(first: int) -> None:
    layer = nn.Identity()
    overrides = [Added(layer).put_on(), Doubled(layer).put_on()]
    overrides.pop(first).take_off()
    assert result(layer) == (6, 4)[first]
    overrides[0].take_off()
    overrides[0].take_off()
    assert "forward" not in vars(layer)


def test_the_forward_of_the_user_is_called_and_is_still_there_afterwards() -> None:
    layer = nn.Identity()
    own = layer.forward = lambda hidden: hidden * 10  # type: ignore[method-assign]
    overrides = [Added(layer).put_on(), Doubled(layer).put_on()]
    assert result(layer) == 62
    assert has_own_forward(layer)
    for override in overrides:
        override.take_off()
    assert vars(layer)["forward"] is own


def test_a_forward_that_the_user_puts_on_top_stays() -> None:
    layer = nn.Identity()
    override = Added(layer).put_on()
    own = layer.forward = lambda hidden: hidden * 10  # type: ignore[method-assign]
    override.take_off()
    assert vars(layer)["forward"] is own


def test_a_copy_of_a_layer_has_overrides_of_its_own() -> None:
    layer = nn.Linear(1, 1)
    added = Added(layer).put_on()
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert float(other(torch.ones(1))) == 1
    added.take_off()
    assert [type(each) for each in overrides_of(other)] == [Added]


def test_an_attribute_goes_back_to_what_the_object_had() -> None:
    layer = nn.Identity()
    stand_in(layer, "training", False)()
    assert layer.training
    put_back = stand_in(layer, "forward", len)
    assert layer.forward is len
    put_back()
    assert "forward" not in vars(layer)
