"""What changes hands when layers move from one placement to another. Plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import COORDINATOR
from .placement import Placement


@dataclass(frozen=True)
class Transfer:
    """A layer that goes from a process that has it to one that does not.

    Args:
        layer: The layer's number.
        source: The name of the process that has it.
        target: The name of the process that gets it.
    """

    layer: int
    source: str
    target: str


def transfers(before: Placement, after: Placement) -> tuple[Transfer, ...]:
    """Every layer that a process gets, in the order of the layers; what stays is left out.

    A layer comes from the process whose result of an optimizer step counted. The coordinator is
    the source of what no worker has, and gets what no worker has any more.
    """
    stages = (*before.stages, *after.stages)
    layers = sorted({layer for stage in stages for layer in stage.layers})
    return tuple(
        Transfer(layer, before.owner(layer), target)
        for layer in layers
        for target in after.holders(layer)
        if target not in before.holders(layer)
    )


def coming_home(before: Placement, after: Placement) -> set[int]:
    """The layers that the coordinator gets."""
    return {each.layer for each in transfers(before, after) if each.target == COORDINATOR}


def leaving_home(before: Placement, after: Placement) -> set[int]:
    """The layers that the coordinator has, and only workers have afterwards."""
    layers = {layer for stage in after.stages for layer in stage.layers}
    return {
        layer
        for layer in layers
        if COORDINATOR in before.holders(layer) and COORDINATOR not in after.holders(layer)
    }
