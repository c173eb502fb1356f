"""What a fixed order of micro-batches costs a stage with replicas, in the planner's simulator.

In the runtime each replica takes the forwards of its micro-batches in their order, so also the
backwards, and the coordinator takes losses in theirs. So sums have one order. In free order every
process takes the oldest of what is there.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lightning_hetero.pipeline.rule import Action
from lightning_hetero.planner.simulation import SimulatedRun
from lightning_hetero.planner.step_model import Hop, Pipeline, Replicas, StageTimes

ACTION_SECONDS = 0.02
"""A forward at speed 1 of a stage; its backward takes twice as long."""


class Jittered(SimulatedRun):
    """A step in which the duration of each action differs by a normal distribution."""

    def __init__(self, pipeline: Pipeline, jitter: float, seed: int) -> None:
        super().__init__(pipeline)
        self._jitter, self._seed = jitter, seed

    def seconds_of(self, action: Action) -> float:
        # The same factor for an action in either order.
        draw = random.Random(f"{self._seed} {action}")
        return super().seconds_of(action) * max(0.1, draw.gauss(1, self._jitter))


class Free(Jittered):
    """A step in which a process may take any action that is ready."""

    def offered(self, ready: Sequence[Action]) -> Collection[Action]:
        return ready

    def note_begun(self, action: Action) -> None:
        """Nothing is in order here."""


@dataclass(frozen=True)
class Case:
    """A stage with replicas, and how long a transfer takes."""

    name: str
    shares: tuple[int, ...]
    hosted: bool = False
    has_stage_behind: bool = False


CASES = [
    Case(f"{':'.join(map(str, shares))}{text}", shares, hosted, behind)
    for shares in ((1, 1), (2, 1), (5, 3, 1))
    for text, hosted, behind in (
        (", workers", False, False),
        (", the last one is the coordinator", True, False),
        (", workers, and a stage behind", False, True),
    )
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument(
        "--in-flight",
        type=int,
        help="the default is two per process, or half as many again as the time in which the "
        "slowest replica runs one",
    )
    parser.add_argument("--jitter", type=float, default=0.1, help="standard deviation, as a share")
    parser.add_argument("--hop", type=float, default=0.002, help="seconds of a transfer")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    table = Table("shares", "free, ms", "in order, ms", "lost", "bound, ms")
    for case in CASES:
        table.add_row(case.name, *measure(case, options))
    Console().print(table)


def measure(case: Case, options: argparse.Namespace) -> list[str]:
    """A row of the table."""
    pipeline = pipeline_of(case, options.micro_batches, options.in_flight, options.hop)
    free, in_order = mean_steps(pipeline, options.jitter, options.steps)
    calm = SimulatedRun(pipeline).play()
    return [
        f"{1e3 * free:.0f}",
        f"{1e3 * in_order:.0f}",
        f"{in_order / free - 1:.1%}",
        f"{1e3 * max(calm.busy_seconds):.0f}",
    ]


def mean_steps(pipeline: Pipeline, jitter: float, num_steps: int) -> tuple[float, float]:
    """The mean steps in free order and in order, with the same jitter."""
    free, in_order = (
        statistics.mean(kind(pipeline, jitter, n).play().step_seconds for n in range(num_steps))
        for kind in (Free, Jittered)
    )
    return free, in_order


def pipeline_of(case: Case, count: int, in_flight: int | None, hop_seconds: float) -> Pipeline:
    """The coordinator with a head, the replicas with speeds like their shares, and in some cases
    a stage that is as fast as all of them together."""
    num, total = len(case.shares), sum(case.shares)
    seconds = [ACTION_SECONDS / share for share in case.shares]
    stages = [StageTimes(0, 0), *(StageTimes(each, 2 * each) for each in seconds)]
    numbers, shares = [0, *[1] * num], [1, *case.shares]
    processes = [*range(num + 1)]
    if case.hosted:
        processes[num] = 0
    behind = [*range(1, num + 1)]
    there, back = {}, {}
    if case.has_stage_behind:
        stages.append(StageTimes(ACTION_SECONDS / total, 2 * ACTION_SECONDS / total))
        numbers, shares = [*numbers, 2], [*shares, 1]
        processes.append(num + 1)
        there = {(entry, num + 1): Hop(f"{entry} on", hop_seconds) for entry in behind}
        back = {(num + 1, entry): Hop(f"{entry} back", hop_seconds) for entry in behind}
        there[num + 1, 0] = back[0, num + 1] = Hop("last", hop_seconds)
    for entry in behind:
        there[0, entry] = back[0, entry] = Hop(f"to {entry}", hop_seconds)
        there[entry, 0] = back[entry, 0] = Hop(f"from {entry}", hop_seconds)
    return Pipeline(
        stages,
        0.1 * ACTION_SECONDS / total,
        (),
        (),
        count,
        in_flight or max(2 * (max(processes) + 1), math.ceil(1.5 * total / min(case.shares))),
        starts_first=True,
        processes=processes,
        replicas=Replicas(numbers, shares, there, back),
    )


if __name__ == "__main__":
    main()
