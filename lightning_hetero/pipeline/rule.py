"""The rule: which action a stage takes next.

Every stage keeps the actions that could run now and asks `choose`. No schedule is written down
anywhere; 1F1B follows from the rule. The coordinator and two workers, five micro-batches, at most
four in flight, every action one tick long (`2` a forward, `²` a backward, `L` head and loss):

    stage 0   0 1 2 L L 3 L ⁰ L 4 ¹ ² L ³   ⁴
    stage 1     0 1 2   ⁰ 3 ¹   ² 4 ³     ⁴
    stage 2       0 1 ⁰ 2 ¹ 3 ² ³   4   ⁴
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from ..protocol.fields import Key as Key


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
    """The next action: the most urgent kind, and of that the oldest micro-batch.

    A worker takes backwards before forwards, but with nothing left downstream a forward first, so
    that those behind it have work meanwhile. The coordinator first takes what the stages wait for:
    what a returned micro-batch goes on with, up to its loss and that one's backward; then new
    micro-batches; and last the backwards that end one, for which nobody waits. So there are some
    left when the stages are still at the last micro-batches.

    Simulated over 3000 random pipelines of one to three workers, what workers do is 0.8 % faster on
    average than backwards first, and up to 31 %; what the coordinator does 1.8 %, up to 27 %, and
    in one of forty slower by more than 2 %.

    Args:
        ready: Actions of one stage whose inputs are there.
        in_flight: Micro-batches whose forward has begun and whose backward is not done.
        max_in_flight: A forward of one more micro-batch than this has to wait.
        starts_first: A micro-batch's first forward goes before all else, and what ends one next,
            which makes room for it. Where the coordinator has no layers before the workers' both
            are next to nothing to do, and the workers have work.
    """
    ready = list(ready)
    here = {action.key.microbatch for action in ready}
    feeds_first = here.issuperset(in_flight)
    start, end, go_on = (0, 1, 2) if starts_first else (1, 2, 0)

    def rank(action: Action) -> int:
        """Lower goes first."""
        is_forward = action.kind == "F"
        if action.stage_index > 0:
            return int(is_forward != feeds_first)
        if is_forward:
            return go_on if action.key.microbatch in in_flight else start
        return end if action.key.visit == 0 else go_on

    def urgency(action: Action) -> tuple[int, int, int]:
        """Of one micro-batch's backwards the latest visit goes first."""
        visit = action.key.visit if action.kind == "F" else -action.key.visit
        return rank(action), action.key.microbatch, visit

    may_run = [
        action
        for action in ready
        if action.kind == "B"
        or action.key.microbatch in in_flight
        or len(in_flight) < max_in_flight
    ]
    return min(may_run, key=urgency, default=None)
