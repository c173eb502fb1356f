"""What messages describe: tensors, stages, other workers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..plan import Dtype, WireDtype
from .fields import Count, Name, Text
from .tensors import TensorSpec


class ParameterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter or buffer of a stage, named ``<layer index>.<name inside the layer>``."""

    name: Name
    tensor: TensorSpec
    requires_grad: bool


class StageSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage to build.

    Args:
        number: The stage's number, from 1 on.
        recipe: What the layers are built from, as JSON.
        parameters: The tensors of the layers.
        recompute: Whether its forwards run again in the backward.
        dtype: The dtype in which the stage computes; None for its input's.
        activation_dtype: The dtype to which the stage rounds the activations that it sends.
        gradient_dtype: The dtype to which the stage rounds the gradients that it sends.
        compile: Whether to compile the layers.
        holders: The numbers of the processes that hold the stage, in the plan's order; none if one
            worker alone does.
        owners: For each of ``parameters`` the number of the process that answers for it; none if
            one worker alone holds the stage.
        is_split: Whether only owners step an optimizer.
    """

    number: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    recipe: Text
    parameters: list[ParameterSpec]
    recompute: bool
    dtype: Dtype | None = None
    activation_dtype: WireDtype | None = None
    gradient_dtype: WireDtype | None = None
    compile: bool = False
    holders: list[Count] = []
    owners: list[Count] = []
    is_split: bool = False


class PeerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another worker: its number, where the coordinator reaches it, and the name of its session,
    which only the right worker knows."""

    member: Count
    address: Name
    session: Name
