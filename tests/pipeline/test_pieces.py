"""Cutting a whole batch's hand-over along its samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_hetero.errors import BatchError
from lightning_hetero.model.calls import LayerCall
from lightning_hetero.pipeline.handover import Request
from lightning_hetero.pipeline.pieces import cut_request
from lightning_hetero.pipeline.stage import Surroundings

LENGTH = 7


def request_with(
    size: int, *args: Any, length: int = LENGTH, num_layers: int = 2, **kwargs: Any
) -> Request:
    """Hidden states of a batch, and the same arguments for each layer."""
    calls = [LayerCall(number, True, args, kwargs) for number in range(num_layers)]
    hidden = torch.arange(size * length * 3.0).reshape(size, length, 3)
    return Request(hidden, Surroundings(True, torch.bfloat16, calls))


def arguments(pieces: list[Request], name: str) -> list[Any]:
    return [piece.surroundings.calls[0].kwargs[name] for piece in pieces]


@given(st.integers(1, 9), st.integers(1, 6))
def test_the_pieces_join_to_the_request(size: int, num_pieces: int) -> None:
    mask = torch.arange(size * 4).reshape(size, 1, 4)
    request = request_with(size, mask=mask, length=11)
    pieces = cut_request(request, num_pieces)
    assert len(pieces) == min(size, num_pieces)
    assert torch.equal(torch.cat([piece.hidden for piece in pieces]), request.hidden)
    assert torch.equal(torch.cat(arguments(pieces, "mask")), mask)


def test_everything_but_tensors_stays_as_it_is() -> None:
    request = request_with(4, None, use_cache=False, name="x")
    for piece in cut_request(request, 2):
        assert piece.surroundings == request.surroundings


def test_tensors_that_hold_no_samples_go_into_every_piece() -> None:
    positions, scale = torch.arange(LENGTH).unsqueeze(0), torch.tensor(2.0)
    pieces = cut_request(request_with(4, positions=positions, scale=scale), 4)
    assert all(found is positions for found in arguments(pieces, "positions"))
    assert all(found is scale for found in arguments(pieces, "scale"))


def test_tensors_inside_tuples_and_dicts_are_cut_too() -> None:
    cosine, sine = torch.rand(4, LENGTH, 2), torch.rand(1, LENGTH, 2)
    pieces = cut_request(request_with(4, {"table": [cosine]}, rotary=(cosine, sine)), 2)
    for piece, start in zip(pieces, (0, 2), strict=True):
        [call, _] = piece.surroundings.calls
        assert torch.equal(call.kwargs["rotary"][0], cosine[start : start + 2])
        assert call.kwargs["rotary"][1] is sine
        assert torch.equal(call.args[0]["table"][0], cosine[start : start + 2])


def test_a_tensor_that_layers_share_is_still_shared_in_a_piece() -> None:
    for piece in cut_request(request_with(4, mask=torch.ones(4, 1, LENGTH)), 2):
        first, second = (call.kwargs["mask"] for call in piece.surroundings.calls)
        assert first is second


@pytest.mark.parametrize(("size", "num_pieces"), [(1, 4), (4, 1)])
def test_what_needs_no_cut_is_handed_on_untouched(size: int, num_pieces: int) -> None:
    request = request_with(size, mask=torch.ones(size, size), length=size)
    assert cut_request(request, num_pieces) == [request]


@pytest.mark.parametrize(
    "argument",
    [torch.ones(LENGTH, LENGTH), torch.arange(LENGTH), torch.rand(LENGTH, 2)],
    ids=["mask", "positions", "table of positions"],
)
@pytest.mark.parametrize("wrap", [lambda tensor: tensor, lambda tensor: (tensor, tensor)])
def test_an_argument_that_may_hold_samples_or_positions_is_refused(
    argument: Tensor, wrap: Any
) -> None:
    with pytest.raises(BatchError, match=str(LENGTH)):
        cut_request(request_with(LENGTH, argument=wrap(argument)), 2)


def test_a_clear_mask_of_a_square_batch_is_cut() -> None:
    mask = torch.rand(LENGTH, 1, LENGTH, LENGTH)
    pieces = cut_request(request_with(LENGTH, mask=mask), 3)
    assert torch.equal(torch.cat(arguments(pieces, "mask")), mask)
