"""Cuts a hand-over of a whole batch into pieces that the stages work on one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..errors import BatchError
from .handover import Request
from .microbatch import spans


def cut_request(request: Request, num_pieces: int) -> list[Request]:
    """Pieces of a request along the samples. Tensors that hold no samples go into every piece.

    Raises:
        BatchError: If one argument could be read both ways.
    """
    size = request.hidden.shape[0]
    if size == 1 or num_pieces == 1:
        return [request]
    for call in request.surroundings.calls:
        for name, tensor in call.named_tensors():
            _check_clear(name, tensor, request.hidden)
    return [_piece(request, start, end, size) for start, end in spans(size, num_pieces)]


def first_of_request(request: Request, count: int) -> Request:
    """The piece of the first samples.

    Raises:
        BatchError: As `cut_request`.
    """
    size = request.hidden.shape[0]
    if count < size:
        cut_request(request, 2)  # whether it can be cut
    return _piece(request, 0, count, size)


def _piece(request: Request, start: int, end: int, size: int) -> Request:
    # Layers share tensors such as masks; each is cut once, so that it is sent once.
    cuts: dict[int, Tensor] = {}

    def cut(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or tensor.shape[0] != size:
            return tensor
        return cuts.setdefault(id(tensor), tensor[start:end])

    calls = [
        replace(call, args=_map_tensors(call.args, cut), kwargs=_map_tensors(call.kwargs, cut))
        for call in request.surroundings.calls
    ]
    return Request(request.hidden[start:end], replace(request.surroundings, calls=calls))


def _check_clear(name: str, tensor: Tensor, hidden: Tensor) -> None:
    """With as many samples as positions, one row per sample looks like one row per position."""
    size, length = hidden.shape[0], hidden.shape[1] if hidden.ndim > 1 else 0
    if size == length and 1 <= tensor.ndim <= 2 and tensor.shape[0] == size:
        raise BatchError(
            f"A layer's argument {name} of shape {tuple(tensor.shape)} may be one row per sample "
            f"or one per position: the batch has {size} samples of length {length}."
        )


def _map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map_tensors(item, function) for item in tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(item, function) for key, item in tree.items()}
    return tree
