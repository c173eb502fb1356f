"""The layers of each process under a plan, by stages, and how pictures and tables name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..pipeline.placement import COORDINATOR_STAGE
from ..plan import COORDINATOR, Plan
from ..units import in_share


@dataclass(frozen=True)
class Range:
    """Consecutive layers of one process.

    Args:
        stage: The number of their stage; 0 for layers of the coordinator alone.
        layers: Half-open range.
        share: How many micro-batches of a round the process runs, and how many the round has; None
            if the process alone holds the layers.
    """

    stage: int
    layers: tuple[int, int]
    share: tuple[int, int] | None = None

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.layers[1] - self.layers[0]

    @property
    def is_spare(self) -> bool:
        """Whether other processes run all micro-batches."""
        return self.share is not None and self.share[0] == 0

    @property
    def share_as_text(self) -> str:
        """The share, as ``2 of 3``; ``warm spare`` for a share of 0, and empty without replicas."""
        return "" if self.share is None else in_share(*self.share)


Ranges = Sequence[Range]
"""The layers of one process, in the order of the layers."""


def ranges_of(plan: Plan) -> dict[str, tuple[Range, ...]]:
    """The ranges of each process: the coordinator, then the workers as the layers come to them.
    Each replica of a stage has a range of its own, with its share."""
    found: dict[str, tuple[Range, ...]] = {COORDINATOR: ()}
    number = COORDINATOR_STAGE
    for stage in plan.stages:
        number += not stage.is_local
        if not stage.layer_indices:
            continue
        shares = stage.present_shares
        for name, share in zip(stage.workers, shares, strict=True):
            of_round = (share, sum(shares)) if len(shares) > 1 else None
            held = Range(COORDINATOR_STAGE if stage.is_local else number, stage.layers, of_round)
            found[name] = (*found.get(name, ()), held)
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
    """The layers of a process by its stages: ``stage 1: layers 2–4, stage 3: layer 8 (2 of 3)``,
    with its share if others hold the stage too. The coordinator's own layers are without a number.
    """
    own = [each.layers for each in ranges if each.stage == COORDINATOR_STAGE]
    found = [layers_as_text(*own)] if own or not ranges else []
    found += [_stage_as_text(each) for each in ranges if each.stage != COORDINATOR_STAGE]
    return ", ".join(found)


def _stage_as_text(held: Range) -> str:
    said = f"stage {held.stage}: {layers_as_text(held.layers)}"
    return said if held.share is None else f"{said} ({held.share_as_text})"
