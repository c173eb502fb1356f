"""The giving of layers to a stage: their description, their tensors, the start."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...plan import Dtype, WireDtype
from ..tensors import TensorSpec
from .base import BaseMessage, Count, Name, Text


class ParameterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter or buffer of a stage, ``<layer index>.<name inside the layer>``."""

    name: Name
    tensor: TensorSpec
    requires_grad: bool


class Deploy(BaseMessage, frozen=True, tag=True):
    """Build a stage's layers, in the place of those that it has; their tensors follow. The
    neighbors stay who they are. ``recipe`` is JSON for the model folder,
    ``dtype`` what the stage computes in, if not in what it is given, and the two others what it
    rounds the activations and gradients to that it sends. With ``compile`` layers are compiled."""

    stage_index: Count
    recipe: Text
    parameters: list[ParameterSpec]
    recompute: bool
    seed: int
    downstream_address: Name
    dtype: Dtype | None = None
    activation_dtype: WireDtype | None = None
    gradient_dtype: WireDtype | None = None
    compile: bool = False


class Built(BaseMessage, frozen=True, tag=True):
    """The layers of a `Deploy` are built. Of the ``held`` tensors the worker still has some content
    from before, which may be the one that it is to get: they are worth an `OfferTensor`."""

    held: list[Name] = []


class LoadTensor(BaseMessage, frozen=True, tag=True):
    """One parameter's or buffer's content; the tensors after it are its ``state``, if it is stored
    in 4 bits.

    What is to be stored in 4 bits and comes without state is packed by the worker. The worker says
    `Loaded` when it has the tensor in its place: a coordinator that waits for it does not flood it.
    """

    is_kept = True

    name: Name
    state: list[Name] = []


class Loaded(BaseMessage, frozen=True, tag=True):
    """A tensor is in its place."""

    name: Name


class OfferTensor(BaseMessage, frozen=True, tag=True):
    """Take the content that you hold for this tensor, if its fingerprint is this one."""

    name: Name
    fingerprint: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class OfferAnswered(BaseMessage, frozen=True, tag=True):
    """Whether the tensor is in its place now; if not, its content has to be sent."""

    name: Name
    is_taken: bool


class Launch(BaseMessage, frozen=True, tag=True):
    """All tensors are there: connect to the downstream neighbor and get ready for steps."""
