"""What goes through the stages in a step."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ..values import Value
from .base import BaseMessage, Count, LayerNumber, Name, Slot, Text


class Narrowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that was rounded for its way: what it is to become again, and how many of the
    frame's tensors it is in."""

    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    num_parts: Literal[1, 2]


class BeginStep(BaseMessage, frozen=True, tag=True):
    """A new step; without ``accumulate`` the gradients of the steps before are dropped. Dropout
    masks are drawn for ``dropout_step``, which no trial counts in."""

    step: Count
    in_flight: Annotated[int, msgspec.Meta(ge=1)]
    accumulate: bool
    dropout_step: Count = 0


class SetAttributes(BaseMessage, frozen=True, tag=True):
    """Plain attributes of a module of a layer that have changed on the coordinator, as text, and
    the names of those that are gone there."""

    layer_index: LayerNumber
    path: Name
    values: Text
    gone: list[Name] = []


class BuffersUpdated(BaseMessage, frozen=True, tag=True):
    """These buffers of a stage were updated by each micro-batch of a step or, with ``is_again``, by
    a forward that ran again."""

    names: list[Name]
    is_again: bool


class CacheArgument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key-value cache that a layer is called with: its number, the argument's position or name,
    the positions and the window that the coordinator counts for the layer, and the tensor of the
    samples that are wanted of it, if not all."""

    number: Count
    place: Count | Name
    length: Count
    window: Count | None
    rows: Value


class LayerArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the model called one layer, its hidden states and its key-value cache left out, and the
    length of the tuple that it takes the layer to return; 0 stands for a tensor. ``other_mode``
    names the modules inside the layer whose mode is not ``training``."""

    layer_index: LayerNumber
    training: bool
    args: Value
    kwargs: Value
    tuple_length: Count
    cache: CacheArgument | None = None
    other_mode: list[Name] = []


class Arguments(BaseMessage, frozen=True, tag=True):
    """What a stage's layers are called with for one micro-batch. ``kept`` says which of the
    frame's tensors the stage keeps for later ones, and in which slot. A trial leaves nothing
    behind in the layers."""

    step: Count
    microbatch: Count
    visit: Count
    grad_enabled: bool
    autocast_dtype: str | None
    collect: list[Name]
    calls: list[LayerArguments]
    kept: dict[Count, Slot] = {}
    is_trial: bool = False


class Activation(BaseMessage, frozen=True, tag=True):
    """Hidden states on their way downstream, and the outputs of each kind that are collected so
    far; ``requires_grad`` is for each tensor, ``narrowed`` for those that were rounded."""

    step: Count
    microbatch: Count
    visit: Count
    requires_grad: list[bool]
    collected: list[Name]
    narrowed: list[Narrowed | None] = []


class Gradient(BaseMessage, frozen=True, tag=True):
    """The gradients of an activation on their way upstream; ``is_present`` says for each of its
    tensors whether one is needed and comes. With ``keeps_graph`` others may follow them."""

    step: Count
    microbatch: Count
    visit: Count
    is_present: list[bool]
    keeps_graph: bool = False
    narrowed: list[Narrowed | None] = []


class DropCaches(BaseMessage, frozen=True, tag=True):
    """Forget these key-value caches: nobody holds them any more."""

    numbers: list[Count]


class AbortStep(BaseMessage, frozen=True, tag=True):
    """Forget the step: saved activations, gradients, pending actions, and all key-value caches."""

    step: Count
