"""The rule: which action a stage takes next.

Every stage keeps the actions that could run now and asks `choose`. No schedule is written down
anywhere; 1F1B follows from the rule. Three stages, five micro-batches, two in flight at most
(`2` is a forward, `²` a backward; the coordinator is stage 0 and holds the loss):

    stage 0   0 1     ⁰ 2 ¹ 3 ² 4 ³   ⁴
    stage 1     0 1   ⁰ ¹ 2 ² 3 ³ 4 ⁴
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Key(NamedTuple):
    """Which work: the micro-batch, and the how-manieth visit of it to the stages.

    A model that runs its decoder twice in one ``training_step`` visits twice.
    """

    microbatch: int
    visit: int = 0


@dataclass(frozen=True)
class Action:
    """One forward or backward of one stage on one micro-batch; prints as ``2F0``."""

    stage_index: int
    kind: Literal["F", "B"]
    key: Key

    def __str__(self) -> str:
        visit = f".{self.key.visit}" if self.key.visit else ""
        return f"{self.stage_index}{self.kind}{self.key.microbatch}{visit}"


def choose(
    ready: Iterable[Action], in_flight: Collection[int], max_in_flight: int
) -> Action | None:
    """The next action: backwards first, then the oldest forward.

    Args:
        ready: Actions whose inputs are there.
        in_flight: Micro-batches whose forward has begun and whose backward is not done.
        max_in_flight: A forward of one more micro-batch than this has to wait.
    """
    may_run = [
        action
        for action in ready
        if action.kind == "B"
        or action.key.microbatch in in_flight
        or len(in_flight) < max_in_flight
    ]
    return min(may_run, key=_urgency, default=None)


def _urgency(action: Action) -> tuple[bool, int, int]:
    """Lower goes first. Of one micro-batch's backwards the latest visit goes first."""
    is_forward = action.kind == "F"
    visit = action.key.visit if is_forward else -action.key.visit
    return is_forward, action.key.microbatch, visit
