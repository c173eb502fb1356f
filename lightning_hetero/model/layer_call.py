"""How a model calls a decoder layer, as a value, and what the layer answers."""

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
from .tensors import narrowed

logger = logging.getLogger(__name__)

# An argument's position, or its name.
Place = int | str


@dataclass(frozen=True)
class CacheUse:
    """A key-value cache that a stage keeps, in one call of a layer.

    Args:
        number: Which cache.
        place: Where the layer gets it.
        length: Positions that it holds before the call.
        window: The most that the layer looks back on, if there is an end to it.
        rows: Which of its samples are wanted, in this order; None for all as they are.
    """

    number: int
    place: Place
    length: int
    window: int | None = None
    rows: Tensor | None = None


@dataclass(frozen=True)
class LayerCall:
    """One call of one layer, its hidden states left out.

    ``tuple_length`` says what the model takes the layer to return: a tuple of that many entries
    with the hidden states first, or, at 0, just them. ``cache`` is missing among the arguments.
    ``other_mode`` names the modules inside the layer whose mode is not ``training``, such as a
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
        """Put a layer and all modules inside into the modes that they have where it was called."""
        for module in layer.modules():
            if module.training != self.training:  # to set an attribute of a module costs more
                module.training = self.training
        for name in self.other_mode:
            layer.get_submodule(name).training = not self.training

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor among the arguments, with the position or the name of its argument."""
        for position, value in enumerate(self.args):
            yield from ((str(position), tensor) for tensor in _tensors(value))
        for name, value in self.kwargs.items():
            yield from ((name, tensor) for tensor in _tensors(value))

    def in_dtype(self, old: torch.dtype, new: torch.dtype) -> LayerCall:
        """The same call with the arguments of one dtype in another."""

        def convert(tensor: Tensor) -> Tensor:
            return narrowed(tensor, new) if tensor.dtype == old else tensor

        args, kwargs = apply_to_collection((self.args, self.kwargs), Tensor, convert)
        return replace(self, args=args, kwargs=kwargs)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def take_hidden(
    number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The hidden states of a call, and the other arguments.

    Raises:
        ModelError: If there are none.
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
    """Every key-value cache among the arguments, with its place."""
    named: list[tuple[Place, Any]] = [*enumerate(args), *kwargs.items()]
    return [(place, value) for place, value in named if isinstance(value, Cache)]


def without_cache(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every key-value cache left out."""
    kept = {k: None if isinstance(v, Cache) else v for k, v in kwargs.items()}
    if "use_cache" in kept:
        kept["use_cache"] = False
    return tuple(None if isinstance(value, Cache) else value for value in args), kept


def hidden_of(result: Any, layer: nn.Module, call: LayerCall) -> Tensor:
    """The hidden states in what a layer returned.

    Raises:
        ModelError: If it returned more than them, or in another form than the model expects.
    """
    length = _tuple_length(result, layer, call.layer_index)
    if length != call.tuple_length:
        raise ModelError(
            f"Layer {call.layer_index} ({type(layer).__name__}) returned {_form(length)} on the "
            f"worker, and the model was given {_form(call.tuple_length)} in its place; keep it "
            "with the coordinator."
        )
    hidden: Tensor = result[0] if length else result
    return hidden


def expected_tuple_length(
    layer: nn.Module, layer_index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: Any
) -> int:
    """The `LayerCall.tuple_length` of a layer whose parameters are on ``meta``, by trying it there.

    Raises:
        ModelError: If the layer returns more than hidden states.
    """
    return expected_result(layer, layer_index, hidden, args, kwargs)[0]


def expected_result(
    layer: nn.Module, layer_index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: Any
) -> tuple[int, Tensor]:
    """The same, with the form of the hidden states that come out, on ``meta``."""
    found = result_on_meta(layer, layer_index, hidden, args, kwargs)
    return found or (0, _to_meta(hidden))


def result_on_meta(
    layer: nn.Module, layer_index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: Any
) -> tuple[int, Tensor] | None:
    """The same; None if the layer cannot be tried. The layer's attributes stay as they are."""
    on_meta = apply_to_collection((hidden, args, dict(kwargs)), Tensor, _to_meta)
    try:
        # Parameters that are away let nobody compute with them but here.
        untouched = torch._C.DisableTorchFunctionSubclass()
        with torch.no_grad(), unchanged(layer.modules()), untouched:
            result = type(layer).forward(layer, on_meta[0], *on_meta[1], **on_meta[2])
    except Exception as error:
        # What depends on data, such as the choice of experts, cannot be tried without data. The
        # worker finds out if the layer returns something else than a tensor, and says so.
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
