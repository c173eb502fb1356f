"""The rule: which action a stage takes next.

Every stage keeps the actions that could run now and asks `choose`. No schedule is written down
anywhere; 1F1B follows from the rule. The coordinator and two workers, five micro-batches, at most
four in flight, every action one tick long (`2` a forward, `²` a backward, `L` head and loss):

    stage 0   0 1 2 L L 3 ⁰ L ¹ L ² 4 ³   L     ⁴
    stage 1     0 1 2   ⁰ 3 ¹   ²   ³ 4       ⁴
    stage 2       0 1 ⁰ 2 ¹ 3 ²   ³     4   ⁴
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
    ready: Iterable[Action],
    in_flight: Collection[int],
    max_in_flight: int,
    starts_first: bool = False,
) -> Action | None:
    """The next action: backwards first, then the oldest forward.

    A worker with nothing left downstream takes a forward before its backward, so that those behind
    it have work meanwhile. Simulated over 3000 random pipelines of one to three workers this is
    0.8 % faster on average and up to 31 %. The coordinator always takes backwards first: behind
    its forwards comes the loss, whose backward follows at once.

    Args:
        ready: Actions of one stage whose inputs are there.
        in_flight: Micro-batches whose forward has begun and whose backward is not done.
        max_in_flight: A forward of one more micro-batch than this has to wait.
        starts_first: A micro-batch's first forward goes before all else. Where the coordinator has
            no layers before the workers' it does little but hand over, and they have work.
    """
    ready = list(ready)
    here = {action.key.microbatch for action in ready}
    feeds_first = here.issuperset(in_flight)

    def urgency(action: Action) -> tuple[bool, bool, int, int]:
        """Lower goes first. Of one micro-batch's backwards the latest visit goes first."""
        is_forward = action.kind == "F"
        is_start = is_forward and action.key.microbatch not in in_flight
        waits = is_forward != (feeds_first and action.stage_index > 0)
        visit = action.key.visit if is_forward else -action.key.visit
        return not (starts_first and is_start), waits, action.key.microbatch, visit

    may_run = [
        action
        for action in ready
        if action.kind == "B"
        or action.key.microbatch in in_flight
        or len(in_flight) < max_in_flight
    ]
    return min(may_run, key=urgency, default=None)
