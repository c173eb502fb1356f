"""Cuts a hand-over of a whole batch into pieces that the stages work on one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..errors import BatchError
from .handover import Request
from .microbatch import spans


class SampleDimension:
    """Finds the dimension of hidden states that counts samples.

    A batch that has as many samples as positions does not show it, so the class remembers what
    other batches have shown.

    Args:
        choice: The dimension that the user named, or None.
        is_sequence_first: Whether the layers have a module that says ``batch_first=False``.
    """

    def __init__(self, choice: int | None, is_sequence_first: bool) -> None:
        self._choice = choice
        self._allowed = {0, 1} if is_sequence_first else {0}
        self._shown: int | None = None

    def find(self, hidden: Tensor, num_samples: int | None) -> int | None:
        """The dimension, or None where nothing is known and the whole must stay in one piece.

        Args:
            hidden: Hidden states, or token ids for an embedding.
            num_samples: How many samples the batch has, if that is known.

        Raises:
            BatchError: If no dimension, or more than one, can be that of the samples.
        """
        dims = range(hidden.ndim - 1 if hidden.is_floating_point() else hidden.ndim)
        if not dims:
            raise BatchError(
                f"Hidden states of shape {tuple(hidden.shape)} have no dimension that counts "
                "samples."
            )
        if self._choice is not None and self._choice in dims:
            return self._choice
        if num_samples is None:
            return self._shown if self._shown in self._allowed else None
        fits = {dim for dim in dims[:2] if hidden.shape[dim] == num_samples}
        if len(fits) == 1:
            (self._shown,) = fits
        elif self._shown is not None:
            fits &= {self._shown}
        return self._only(fits & self._allowed, hidden, num_samples)

    def _only(self, dims: set[int], hidden: Tensor, num_samples: int) -> int:
        if len(dims) != 1:
            raise BatchError(
                f"The batch has {num_samples} samples, and the hidden states have the shape "
                f"{tuple(hidden.shape)}. Name the dimension that counts samples: `batch_dim=0`, or "
                "`batch_dim=1` for layers that take the sequence first."
            )
        return dims.pop()


def takes_sequence_first(layer: nn.Module) -> bool:
    """Whether a module inside a layer says that samples are its second dimension.

    torch's attention, transformer and recurrent modules do so unless they are told otherwise.
    """
    return any(getattr(module, "batch_first", None) is False for module in layer.modules())


def cut_request(request: Request, num_pieces: int, dim: int = 0) -> list[Request]:
    """Pieces of a request along the samples. Tensors that hold no samples go into every piece.

    Args:
        request: Of a whole batch.
        num_pieces: The most that are made.
        dim: The dimension of the hidden states that counts samples.

    Raises:
        BatchError: If an argument can be read in two ways, or an output cannot be joined again.
    """
    size = request.hidden.shape[dim]
    if size == 1 or num_pieces == 1:
        return [request]
    if dim and request.surroundings.collect:
        raise BatchError(
            f"The outputs {list(request.surroundings.collect)} that the model collects have their "
            "samples in a dimension that is not known."
        )
    for call in request.surroundings.calls:
        for name, tensor in call.named_tensors():
            _check_clear(name, tensor, request.hidden)
    return [_piece(request, start, end, dim) for start, end in spans(size, num_pieces)]


def first_of_request(request: Request, count: int, dim: int = 0) -> Request:
    """The piece of the first samples.

    Raises:
        BatchError: As `cut_request`.
    """
    if count < request.hidden.shape[dim]:
        cut_request(request, 2, dim)  # whether it can be cut
    return _piece(request, 0, count, dim)


def _piece(request: Request, start: int, end: int, dim: int) -> Request:
    size = request.hidden.shape[dim]
    # Layers share tensors such as masks; each is cut once, so that it is sent once.
    cuts: dict[int, Tensor] = {}

    def cut(tensor: Tensor) -> Tensor:
        along = _dim_of_samples(tensor, size, dim)
        if along is None:
            return tensor
        return cuts.setdefault(id(tensor), tensor.narrow(along, start, end - start))

    calls = [
        replace(call, args=_map_tensors(call.args, cut), kwargs=_map_tensors(call.kwargs, cut))
        for call in request.surroundings.calls
    ]
    hidden = request.hidden.narrow(dim, start, end - start)
    return Request(hidden, replace(request.surroundings, calls=calls))


def _dim_of_samples(tensor: Tensor, size: int, dim: int) -> int | None:
    """The dimension of an argument that counts samples: that of the hidden states where the
    argument has positions and features too, or else the first one."""
    if dim and tensor.ndim > dim + 1 and tensor.shape[dim] == size:
        return dim
    return 0 if tensor.ndim > 0 and tensor.shape[0] == size else None


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
