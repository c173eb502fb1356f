"""One call of a decoder layer as a value, and the hidden states that the layer returns."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from transformers import Cache

from ..errors import ModelError
from .attributes import unchanged
from .placeholders import tensors_in
from .tensors import narrowed

logger = logging.getLogger(__name__)

# An argument's position, or its name.
Place = int | str


@dataclass(frozen=True)
class CacheUse:
    """A key-value cache that a stage keeps, in one call of a layer.

    Args:
        number: The number of the cache.
        place: The argument in which the layer gets the cache.
        length: Positions that the cache holds before the call.
        window: The number of positions that a layer with a sliding window sees; None for all.
        rows: The samples to select from the cache first, in this order; None for all.
    """

    number: int
    place: Place
    length: int
    window: int | None = None
    rows: Tensor | None = None


@dataclass(frozen=True)
class LayerCall:
    """One call of one layer, without its hidden states.

    Args:
        layer_index: The number of the layer.
        training: The mode of the layer.
        args: The positional arguments, without the hidden states and the cache.
        kwargs: The named arguments, likewise.
        tuple_length: The length of the tuple that the model expects, with the hidden states first;
            0 for the hidden states alone.
        cache: The key-value cache among the arguments, if the stage keeps it.
        other_mode: Names of the modules inside the layer that are in the other mode, such as a
            frozen BatchNorm.
    """

    layer_index: int
    training: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tuple_length: int = 0
    cache: CacheUse | None = None
    other_mode: tuple[str, ...] = ()

    def set_modes(self, layer: nn.Module) -> None:
        """Put a layer and the modules inside it into the modes that they had when it was called."""
        others = {layer.get_submodule(name) for name in self.other_mode}
        for module in layer.modules():
            mode = self.training != (module in others)
            # Setting an attribute of a module takes ten times as long as reading it.
            if module.training != mode:
                module.training = mode

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor among the arguments, with the position or name of its argument."""
        for place, value in _by_place(self.args, self.kwargs):
            yield from ((str(place), tensor) for tensor in tensors_in(value))

    def in_dtype(self, old: torch.dtype, new: torch.dtype) -> LayerCall:
        """This call with its tensors of one dtype converted to another."""

        def convert(tensor: Tensor) -> Tensor:
            return narrowed(tensor, new) if tensor.dtype == old else tensor

        args, kwargs = apply_to_collection((self.args, self.kwargs), Tensor, convert)
        return replace(self, args=args, kwargs=kwargs)


def take_hidden(
    number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Split the arguments of a call into the hidden states and the rest.

    Raises:
        ModelError: If there are no hidden states.
    """
    if args and isinstance(args[0], Tensor):
        return args[0], args[1:], kwargs
    hidden = kwargs.get("hidden_states")
    if not args and isinstance(hidden, Tensor):
        return hidden, args, {k: v for k, v in kwargs.items() if k != "hidden_states"}
    raise ModelError(
        f"Layer {number} was called without hidden states: they must be the first argument or "
        "`hidden_states`."
    )


def caches_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Place, Cache]]:
    """Every key-value cache among the arguments, with its position or name."""
    return [(place, value) for place, value in _by_place(args, kwargs) if isinstance(value, Cache)]


def _by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Place, Any]]:
    return [*enumerate(args), *kwargs.items()]


def without_cache(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with None in the place of each key-value cache."""
    kept = {k: None if isinstance(v, Cache) else v for k, v in kwargs.items()}
    if "use_cache" in kept:
        kept["use_cache"] = False
    return tuple(None if isinstance(value, Cache) else value for value in args), kept


def hidden_of(result: Any, layer: nn.Module, call: LayerCall) -> Tensor:
    """Take the hidden states out of a layer's result.

    Raises:
        ModelError: If the result has more than them, or not the form that the model expects.
    """
    length = _tuple_length(result, layer, call.layer_index)
    if length != call.tuple_length:
        raise ModelError(
            f"Layer {call.layer_index} ({type(layer).__name__}) returned {_form(length)} on the "
            f"worker, and the model was given {_form(call.tuple_length)} in its place. Keep the "
            "layer with the coordinator."
        )
    hidden: Tensor = result[0] if length else result
    return hidden


def expected_result(
    layer: nn.Module, layer_index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: Any
) -> tuple[int, Tensor]:
    """The tuple length and the form of the hidden states that a layer returns, on ``meta``.

    If the layer cannot be tried, it is assumed to return a tensor like its input.

    Raises:
        ModelError: If the layer returns more than hidden states.
    """
    found = result_on_meta(layer, layer_index, hidden, args, kwargs)
    return found or (0, _to_meta(hidden))


def result_on_meta(
    layer: nn.Module, layer_index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: Any
) -> tuple[int, Tensor] | None:
    """Run a layer whose parameters are on ``meta``; its attributes are restored afterwards.

    Returns:
        The tuple length and the hidden states of the result; None if the layer cannot be tried.

    Raises:
        ModelError: If the layer returns more than hidden states.
    """
    on_meta = apply_to_collection((hidden, args, dict(kwargs)), Tensor, _to_meta)
    try:
        # Parameters that are away refuse every computation but this one.
        untouched = torch._C.DisableTorchFunctionSubclass()
        with torch.no_grad(), unchanged(layer.modules()), untouched:
            result = type(layer).forward(layer, on_meta[0], *on_meta[1], **on_meta[2])
    except Exception as error:
        # A forward that depends on data, such as the choice of experts, cannot run on `meta`. If
        # such a layer returns something else than a tensor, the worker raises.
        logger.debug("layer %d cannot be tried on meta: %s", layer_index, error)
        return None
    length = _tuple_length(result, layer, layer_index)
    return length, result[0] if length else result


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta")


def _tuple_length(result: Any, layer: nn.Module, layer_index: int) -> int:
    if isinstance(result, Tensor):
        return 0
    what = f"Layer {layer_index} ({type(layer).__name__})"
    if not isinstance(result, tuple) or not result or not isinstance(result[0], Tensor):
        raise ModelError(
            f"{what} returns a {type(result).__name__}; a layer on a worker must return its hidden "
            "states, alone or first in a tuple. Keep it with the coordinator."
        )
    more = [type(value).__name__ for value in result[1:] if value is not None]
    if more:
        raise ModelError(
            f"{what} returns {', '.join(more)} besides its hidden states, which cannot come back "
            "from a worker; call the model without asking for it (such as output_attentions), or "
            "keep the layer with the coordinator."
        )
    return len(result)


def _form(tuple_length: int) -> str:
    return f"a tuple of {tuple_length}" if tuple_length else "a tensor"
