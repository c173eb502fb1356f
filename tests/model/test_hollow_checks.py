"""What is put into layers that workers have too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_hetero.errors import ModelError
from lightning_hetero.model.hollow_checks import HeldLayers
from lightning_hetero.model.layers import DecoderLayer


def held_with(module: nn.Module, is_emptied: bool = False) -> HeldLayers:
    layer = DecoderLayer("layers.3", nn.Sequential(module))
    held = HeldLayers({3: layer}, (3,) if is_emptied else ())
    held.begin()
    return held


def test_one_buffer_in_the_place_of_another_is_refused() -> None:
    norm = nn.BatchNorm1d(2)
    held = held_with(norm)
    held.end_forward()
    count = norm.num_batches_tracked
    del norm.num_batches_tracked
    norm.register_buffer("num_seen", torch.zeros(()))
    for ask in (held.take_changes, held.end_forward):
        with pytest.raises(ModelError, match=r"layers\.3\.0\.num_\w+ was added to its layer or re"):
            ask()
    del norm.num_seen
    norm.register_buffer("num_batches_tracked", count)
    held.end_forward()


def test_a_dictionary_in_the_place_of_another_is_looked_into() -> None:
    linear = nn.Linear(2, 2, device="meta")
    held = held_with(linear, is_emptied=True)
    linear._parameters = {**linear._parameters}
    held.end_forward()
    linear._parameters = {**linear._parameters, "weight": nn.Parameter(torch.zeros(2, 2))}
    with pytest.raises(ModelError, match=r"layers\.3\.0\.weight was replaced by another tensor"):
        held.end_forward()


def test_a_tensor_of_a_layer_that_is_here_too_may_be_replaced() -> None:
    linear = nn.Linear(2, 2)
    held = held_with(linear)
    linear.weight = nn.Parameter(torch.zeros(2, 2))
    held.end_forward()
    linear.bias = None
    held.end_forward()
    assert held.unsent == []


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            lambda linear: torch.utils.swap_tensors(linear.weight, nn.Parameter(torch.zeros(2, 2))),
            r"layers\.3\.0\.weight was replaced by another tensor",
        ),
        (
            lambda linear: setattr(linear, "scale", nn.Parameter(torch.zeros(2))),
            r"layers\.3\.0\.scale was added to its layer",
        ),
        (lambda linear: setattr(linear, "inner", nn.ReLU()), r"layers\.3\.0\.inner was added, rem"),
    ],
    ids=["swapped", "added", "child"],
)
def test_what_no_worker_can_follow_stays_refused(
    change: Callable[[nn.Module], None], error: str
) -> None:
    """Changes of attributes beside it wait."""
    linear = nn.Linear(2, 2, device="meta")
    held = held_with(linear, is_emptied=True)
    change(linear)
    linear.in_features = 3  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(ModelError, match=error):
            held.end_forward()
    assert held.unsent == []
