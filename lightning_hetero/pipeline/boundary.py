"""The boundary between stages: hidden states and collected outputs cross it, gradients return.

A model may ask its layers for more than hidden states, such as the router logits of a mixture of
experts. Each stage adds its own outputs to those of earlier stages. All of them carry gradients:

    stage 1 ── hidden, logits 0-3 ──▶ stage 2 ── hidden, logits 0-3, logits 4-7 ──▶ coordinator

`Surroundings`, the arguments of the layers, go from the coordinator to each stage directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..devices.copies import Land, already_here
from ..model.layer_call import LayerCall
from ..protocol.fields import Numerics


class Collected(NamedTuple):
    """One output besides the hidden states, under transformers' name for its kind."""

    kind: str
    tensor: Tensor


@dataclass(frozen=True)
class Activation:
    """Hidden states and collected outputs, in the order of their layers.

    Call ``land`` before you compute with them.
    """

    hidden: Tensor
    collected: tuple[Collected, ...] = ()
    land: Land = field(default=already_here, compare=False, repr=False)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, the hidden states first."""
        return (self.hidden, *(tensor for _, tensor in self.collected))

    @property
    def requires_grad(self) -> bool:
        """Whether a backward will want a gradient of any tensor."""
        return any(tensor.requires_grad for tensor in self.tensors)

    def map(self, function: Callable[[Tensor], Tensor]) -> Activation:
        """An activation with a function applied to every tensor."""
        collected = (Collected(kind, function(tensor)) for kind, tensor in self.collected)
        return Activation(function(self.hidden), tuple(collected))


@dataclass(frozen=True)
class Gradients:
    """One gradient, or None, for each tensor of an activation, in its order.

    With ``keeps_graph`` another backward of the same activation may follow. ``places`` has a number
    for the stage that takes the gradients, and for each one before it: the backwards that its
    process runs in it before this one; nothing means those that have come. Call ``land`` before you
    compute with the gradients.
    """

    tensors: tuple[Tensor | None, ...]
    keeps_graph: bool = False
    land: Land = field(default=already_here, compare=False, repr=False)
    places: tuple[int, ...] = ()


def join_activations(pieces: list[Activation], dim: int = 0) -> Activation:
    """Join the activations of a batch's pieces, which are in the order of their samples.

    ``dim`` counts the samples of the hidden states; it must be 0 if outputs are collected.
    """
    first = pieces[0]
    return Activation(
        torch.cat([piece.hidden for piece in pieces], dim),
        tuple(
            Collected(kind, torch.cat([piece.collected[place].tensor for piece in pieces]))
            for place, (kind, _) in enumerate(first.collected)
        ),
    )


def leaf_of(tensor: Tensor) -> Tensor:
    """The tensor without its graph, as a leaf that requires a gradient if the tensor did."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class Surroundings:
    """The settings and arguments of a forward.

    Args:
        grad_enabled: torch's grad mode.
        autocast_dtype: The dtype of autocast; None without autocast.
        calls: The arguments of each layer.
        collect: The kinds of outputs that the model collects besides the hidden states.
        land: Call this before you compute with the tensors.
        is_trial: Whether the forward leaves nothing behind; see `on_trial`.
        place: How many forwards of the same visit the stage's process runs in it before this one;
            None for those whose arguments have come.
        numerics: The settings that change numbers.
    """

    grad_enabled: bool
    autocast_dtype: torch.dtype | None
    calls: Sequence[LayerCall]
    collect: Sequence[str] = ()
    land: Land = field(default=already_here, compare=False, repr=False)
    is_trial: bool = False
    place: int | None = None
    numerics: Numerics = Numerics()

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors among the layers' arguments."""
        return [tensor for call in self.calls for _, tensor in call.named_tensors()]

    @property
    def has_cache(self) -> bool:
        """Whether the forward reads and extends a key-value cache."""
        return any(call.cache is not None for call in self.calls)
