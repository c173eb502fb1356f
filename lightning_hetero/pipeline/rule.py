"""The rule: which action a stage takes next.

Every stage keeps its ready actions and asks `choose` for the next one. There is no list of actions
anywhere: 1F1B follows from the rule. Here are the coordinator and two workers, with five
micro-batches, at most four in flight, and actions of one tick (`2` forward, `²` backward, `L` head
and loss):

    stage 0   0 1 2 L L 3 L ⁰ L 4 ¹ ² L ³   ⁴
    stage 1     0 1 2   ⁰ 3 ¹   ² 4 ³     ⁴
    stage 2       0 1 ⁰ 2 ¹ 3 ² ³   4   ⁴
"""

from __future__ import annotations

from collections.abc import Collection
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
    ready: Collection[Action],
    in_flight: Collection[int],
    max_in_flight: int,
    starts_first: bool = False,
) -> Action | None:
    """The next action: of the most urgent kind, and within it of the oldest micro-batch.

    A worker runs backwards before forwards. With no micro-batch downstream it runs a forward first,
    so that the stages behind it get work.

    The coordinator first runs what the stages wait for: it continues a returned micro-batch, up to
    its loss and the loss's backward. Then it starts new micro-batches. Last it runs the backwards
    that end a micro-batch, because no stage waits for these; they fill the time in which the stages
    finish the last micro-batches.

    Simulated over 3000 random pipelines of one to three workers: the workers' order is 0.8 % faster
    on average than backwards first, and at most 31 %. The coordinator's order is 1.8 % faster on
    average, at most 27 %, and more than 2 % slower in one pipeline of forty.

    Args:
        ready: Actions of one stage whose inputs are there.
        in_flight: Micro-batches between the begin of their forward and the end of their backward.
        max_in_flight: The most micro-batches in flight; a further one has to wait.
        starts_first: Start new micro-batches before all else, then end old ones, which makes room.
            This is right where the coordinator has no layers before the workers' layers: to start
            and to end a micro-batch is little work for it then, and feeds the workers.
    """
    may_run = [
        action
        for action in ready
        if action.kind == "B"
        or action.key.microbatch in in_flight
        or len(in_flight) < max_in_flight
    ]
    if len(may_run) < 2:
        return may_run[0] if may_run else None
    here = {action.key.microbatch for action in ready}
    feeds_first = here.issuperset(in_flight)
    start, end, go_on = (0, 1, 2) if starts_first else (1, 2, 0)

    def rank(action: Action) -> int:
        """Lower ranks go first."""
        is_forward = action.kind == "F"
        if action.stage_index > 0:
            return int(is_forward != feeds_first)
        if is_forward:
            return go_on if action.key.microbatch in in_flight else start
        return end if action.key.visit == 0 else go_on

    def urgency(action: Action) -> tuple[int, int, int]:
        """Sorts by rank and age; among backwards of a micro-batch the latest visit goes first."""
        visit = action.key.visit if action.kind == "F" else -action.key.visit
        return rank(action), action.key.microbatch, visit

    return min(may_run, key=urgency)
