"""The layers of each process under a plan, by stages, and how pictures and tables name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..pipeline.placement import COORDINATOR_STAGE
from ..plan import COORDINATOR, Plan


@dataclass(frozen=True)
class Range:
    """Consecutive layers of one process.

    Args:
        stage: The number of their stage; 0 for layers of the coordinator.
        layers: Half-open range.
    """

    stage: int
    layers: tuple[int, int]

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.layers[1] - self.layers[0]


Ranges = Sequence[Range]
"""The layers of one process, in the order of the layers."""


def ranges_of(plan: Plan) -> dict[str, tuple[Range, ...]]:
    """The ranges of each process: the coordinator, then the workers as the layers come to them."""
    found: dict[str, tuple[Range, ...]] = {COORDINATOR: ()}
    number = COORDINATOR_STAGE
    for stage in plan.stages:
        number += not stage.is_local
        if stage.layer_indices:
            held = Range(COORDINATOR_STAGE if stage.is_local else number, stage.layers)
            found[stage.worker] = (*found.get(stage.worker, ()), held)
    return found


def layers_as_text(*layers: tuple[int, int]) -> str:
    """Ranges such as ``layers 2–4 and 8``, where layer 4 is the last one of its range."""
    held = [(first, end) for first, end in layers if end > first]
    if not held:
        return "no layers"
    *others, last = [
        f"{first}" if end - first == 1 else f"{first}–{end - 1}" for first, end in held
    ]
    word = "layer" if sum(end - first for first, end in held) == 1 else "layers"
    return f"{word} {', '.join(others)} and {last}" if others else f"{word} {last}"


def stages_as_text(ranges: Ranges) -> str:
    """The layers of a process by its stages: ``stage 1: layers 2–4, stage 3: layer 8``. Those of
    the coordinator have no number."""
    if all(each.stage == COORDINATOR_STAGE for each in ranges):
        return layers_as_text(*(each.layers for each in ranges))
    return ", ".join(f"stage {each.stage}: {layers_as_text(each.layers)}" for each in ranges)
