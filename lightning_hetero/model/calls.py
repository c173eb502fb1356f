"""How a model calls a decoder layer, as a value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache


@dataclass(frozen=True)
class LayerCall:
    """One call of one layer, its hidden states left out."""

    layer_index: int
    training: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor among the arguments, with the position or the name of its argument."""
        for position, value in enumerate(self.args):
            yield from ((str(position), tensor) for tensor in _tensors(value))
        for name, value in self.kwargs.items():
            yield from ((name, tensor) for tensor in _tensors(value))


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def without_cache(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every key-value cache left out."""
    kept = {k: None if isinstance(v, Cache) else v for k, v in kwargs.items()}
    if "use_cache" in kept:
        kept["use_cache"] = False
    return tuple(None if isinstance(value, Cache) else value for value in args), kept
