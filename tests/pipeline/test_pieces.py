"""Cutting a whole batch's hand-over along its samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hetero.errors import BatchError
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.handover import Request
from lightning_hetero.pipeline.pieces import (
    SampleDimension,
    cut_request,
    first_of_request,
    takes_sequence_first,
)
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


def sequence_first(length: int, size: int, **kwargs: Any) -> Request:
    request = request_with(length, length=size, **kwargs)
    assert request.hidden.shape == (length, size, 3)
    return request


def test_samples_in_the_second_dimension_are_cut_there() -> None:
    mask, padding = torch.zeros(7, 7), torch.arange(4 * 7).view(4, 7)
    memory, position = torch.rand(9, 4, 3), torch.rand(7, 1, 3)
    request = sequence_first(7, 4, mask=mask, padding=padding, memory=memory, position=position)
    pieces = cut_request(request, 2, dim=1)
    assert torch.equal(torch.cat([piece.hidden for piece in pieces], 1), request.hidden)
    assert torch.equal(torch.cat(arguments(pieces, "padding")), padding)
    assert torch.equal(torch.cat(arguments(pieces, "memory"), 1), memory)
    assert all(found is mask for found in arguments(pieces, "mask"))
    assert all(found is position for found in arguments(pieces, "position"))


def test_the_first_samples_are_taken_where_they_are() -> None:
    request = sequence_first(7, 4)
    assert torch.equal(first_of_request(request, 3, dim=1).hidden, request.hidden[:, :3])


def test_collected_outputs_keep_samples_of_the_second_dimension_together() -> None:
    request = sequence_first(7, 4)
    asking = Request(request.hidden, Surroundings(False, None, [], ["router_logits"]))
    with pytest.raises(BatchError, match="router_logits"):
        cut_request(asking, 2, dim=1)


def found_dim(shape: tuple[int, ...], count: int | None, **options: Any) -> int | None:
    options = {"choice": None, "is_sequence_first": False, **options}
    return SampleDimension(**options).find(torch.zeros(shape), count)


@pytest.mark.parametrize(
    ("shape", "count", "options", "expected"),
    [
        ((4, 7, 3), 4, {}, 0),
        ((4, 3), 4, {}, 0),
        ((4, 4, 3), 4, {}, 0),
        ((4, 7, 3), None, {}, None),
        ((7, 4, 3), 4, {"is_sequence_first": True}, 1),
        ((4, 7, 3), 4, {"is_sequence_first": True}, 0),
        ((7, 4, 3), 4, {"choice": 1}, 1),
        ((8, 7, 3), 4, {"choice": 0}, 0),
        ((8, 7, 3), None, {"choice": 0}, 0),
    ],
)
def test_the_samples_are_found(
    shape: tuple[int, ...], count: int | None, options: Any, expected: int | None
) -> None:
    assert found_dim(shape, count, **options) == expected


@pytest.mark.parametrize(
    ("shape", "count", "options"),
    [
        ((7, 4, 3), 4, {}),
        ((8, 7, 3), 4, {}),
        ((4, 4, 3), 4, {"is_sequence_first": True}),
        ((4,), 4, {}),
        ((4,), 4, {"choice": 0}),
    ],
)
def test_where_they_cannot_be_found_the_batch_stays_whole(
    shape: tuple[int, ...], count: int, options: Any
) -> None:
    with pytest.raises(BatchError, match=r"batch_dim=1|no dimension"):
        found_dim(shape, count, **options)


def test_what_one_batch_has_shown_holds_for_those_that_show_nothing() -> None:
    dimension = SampleDimension(None, is_sequence_first=True)
    assert dimension.find(torch.zeros(7, 4, 3), None) is None
    assert dimension.find(torch.zeros(7, 4, 3), 4) == 1
    assert dimension.find(torch.zeros(4, 4, 3), 4) == 1
    assert dimension.find(torch.zeros(9, 2, 3), None) == 1


def test_a_square_batch_is_not_cut_after_one_that_fitted_no_dimension() -> None:
    dimension = SampleDimension(None, is_sequence_first=False)
    for shape in ((7, 4, 3), (4, 4, 3)):
        with pytest.raises(BatchError):
            dimension.find(torch.zeros(shape), 4)
    assert dimension.find(torch.zeros(7, 4, 3), None) is None


def test_layers_say_that_they_take_the_sequence_first() -> None:
    assert takes_sequence_first(nn.TransformerEncoderLayer(4, 1, 4))
    assert not takes_sequence_first(nn.TransformerEncoderLayer(4, 1, 4, batch_first=True))
    assert not takes_sequence_first(nn.Linear(2, 2))
