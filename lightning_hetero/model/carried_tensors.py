"""Carried tensors: they go along with the hidden states from layer to layer, with arithmetic.

    @0, @1, …    inputs of the first layer: the hidden states, and others, such as conditioning
    @4.0, @4.1   outputs of layer 4: the hidden states, and others, such as a position bias
    @4+0, @4+1   results of the model's arithmetic with these after layer 4

The process with a layer also does the arithmetic after it:

    y = layer_4(x)        @4.0
    x = x + y             @4+0 = add(@3+0, @4.0)
    y = layer_5(x)        @5.0

Only element-wise functions are known here. A model may use any others before the first layer on a
worker and after the last one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ModelError

# The name of the hidden states before the first layer.
ENTERED = "@0"
_MARK = "@"


class Carried(str):
    """Stands in a call's arguments for a tensor carried with the hidden states."""

    __slots__ = ()


def entering(number: int) -> str:
    """The name of a tensor for the first layer; 0 for the hidden states."""
    return f"{_MARK}{number}"


def returned(layer_index: int, position: int) -> str:
    """The name of a tensor in the result of a layer."""
    return f"{_MARK}{layer_index}.{position}"


def computed(layer_index: int, number: int) -> str:
    """The name of a result of the model's arithmetic after a layer."""
    return f"{_MARK}{layer_index}+{number}"


def is_carried(kind: str) -> bool:
    """Whether a name belongs to a carried tensor, rather than to a kind of collected output."""
    return kind.startswith(_MARK)


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "negate": operator.neg,
    "masked_fill": torch.masked_fill,
}
"""What workers compute between layers, by the names that are sent."""

_NUM_OPERANDS = {"negate": 1, "masked_fill": 3}

# How programs spell the functions: as an operator, on its right side, in place, by name.
_SPELLED = {
    "add": ("__add__", "__radd__", "__iadd__ add_", "add"),
    "subtract": ("__sub__", "__rsub__", "__isub__ sub_ subtract_", "sub subtract"),
    "multiply": ("__mul__", "__rmul__", "__imul__ mul_ multiply_", "mul multiply"),
    "divide": (
        "__truediv__ __div__",
        "__rtruediv__ __rdiv__",
        "__itruediv__ __idiv__ div_ divide_ true_divide_",
        "div divide true_divide",
    ),
    "negate": ("__neg__", "", "neg_ negative_", "neg negative"),
    "masked_fill": ("", "", "masked_fill_", "masked_fill"),
}


class Arithmetic(NamedTuple):
    """One function between two layers.

    Args:
        name: The name of its result as a carried tensor.
        function: The function's name in `FUNCTIONS`.
        operands: Tensors, numbers, and `Carried` for carried tensors.
        is_in_place: Whether the program changed the first operand itself.
    """

    name: str
    function: str
    operands: tuple[Any, ...]
    is_in_place: bool = False

    def run(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Compute the result from the carried tensors, by name.

        Raises:
            ModelError: If the operands differ in their number of dimensions. Then the dimensions of
                samples would not meet, and a piece of a batch would have another result.
        """
        given = [tensors[each] if isinstance(each, Carried) else each for each in self.operands]
        shapes = [tuple(each.shape) for each in given if isinstance(each, Tensor) and each.ndim]
        if len(set(map(len, shapes))) > 1:
            raise ModelError(
                f"The model computes {self.function!r} of tensors of the shapes {shapes} between "
                "two layers on workers, which do that for equal numbers of dimensions only. Use "
                "`unsqueeze`, or keep the layers with the coordinator."
            )
        result = FUNCTIONS[self.function](*given)
        if not self.is_in_place:
            return result
        if result.shape != given[0].shape:
            raise ModelError(
                f"The model changes a tensor of the shape {tuple(given[0].shape)} in place by "
                f"{self.function!r}, and the result has the shape {tuple(result.shape)}."
            )
        return result.to(given[0].dtype)


class Wanted(NamedTuple):
    """Requested arithmetic: a function's name in `FUNCTIONS`, and its operands in order."""

    function: str
    operands: tuple[Any, ...]
    is_in_place: bool


def wanted_arithmetic(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Wanted | None:
    """The arithmetic in a call of one of torch's functions; None if it is not known here."""
    if function not in _KNOWN or kwargs:
        return None
    name, is_turned, is_in_place = _KNOWN[function]
    is_plain = all(isinstance(each, Tensor | int | float) for each in args)
    if not is_plain or len(args) != _NUM_OPERANDS.get(name, 2):
        return None
    return Wanted(name, args[::-1] if is_turned else args, is_in_place)


def is_arithmetic(function: str, operands: tuple[Any, ...]) -> bool:
    """Whether `FUNCTIONS` has a function for these operands, at least one of them carried."""
    are_plain = all(isinstance(each, Tensor | int | float | Carried) for each in operands)
    is_known = function in FUNCTIONS and len(operands) == _NUM_OPERANDS.get(function, 2)
    return is_known and are_plain and any(isinstance(each, Carried) for each in operands)


def _known() -> dict[Callable[..., Any], tuple[str, bool, bool]]:
    """The functions of torch: their names in `FUNCTIONS`, whether the operands are turned around,
    and whether the first one is changed in place."""
    return {
        getattr(place, spelled): (name, way == _TURNED, way == _IN_PLACE)
        for name, ways in _SPELLED.items()
        for way, spellings in enumerate(ways)
        for spelled in spellings.split()
        for place in (Tensor, torch)
        if hasattr(place, spelled)
    }


_TURNED, _IN_PLACE = 1, 2
_KNOWN = _known()
