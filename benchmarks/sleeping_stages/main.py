"""Stages whose compute is exact sleeps: what the pipeline itself loses, in plans of every shape.

Blocks sleep in their forward and backward, so that two cores are enough for any number of stages.
Measured steps are compared with the bound, below which no schedule can go: the busiest process's
own work, and the first micro-batch's way to it and the last one's way back.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.processes import be_quiet, machine, wide_console
from benchmarks.training import fit
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.pipeline.rule import starts_first_with
from lightning_hetero.planner.simulation import simulate
from lightning_hetero.planner.step_model import Hop, Pipeline, StageTimes

HIDDEN_SIZE = 64
SEQUENCE_LENGTH = 32

_NUM_TRIED_SLEEPS = 21
_TRIED_SECONDS = 0.005


@dataclass(frozen=True)
class Case:
    """A pipeline.

    Args:
        speeds: The relative speed of each process: of C, the coordinator, and of the workers a, b
            and c.
        stages: The process and the number of layers of each stage, in their order.
        num_microbatches: The micro-batches of a step.
    """

    speeds: tuple[float, ...]
    stages: tuple[tuple[str, int], ...]
    num_microbatches: int = 32

    @classmethod
    def of(cls, speeds: tuple[float, ...], stages: str, num_microbatches: int = 32) -> Case:
        """The case whose stages are written as ``"C2 a4"``."""
        pairs = tuple((word[0], int(word[1:])) for word in stages.split())
        return cls(speeds, pairs, num_microbatches)

    @property
    def name(self) -> str:
        speeds = ":".join(f"{speed:g}" for speed in self.speeds)
        stages = " ".join(f"{process}{count}" for process, count in self.stages)
        return f"{speeds}, {stages}"

    @property
    def processes(self) -> list[int]:
        """The number of each stage's process; the coordinator is 0."""
        return [PROCESSES.index(process) for process, _ in self.stages]

    @property
    def num_workers(self) -> int:
        return len(self.speeds) - 1


PROCESSES = "Cabcde"
CASES = [
    Case.of((1, 1, 1), "C2 a2 b2"),
    Case.of((4, 2, 1), "C4 a2 b1"),
    Case.of((1, 1, 1, 1), "C2 a2 b2 c2"),
    Case.of((4, 2, 1, 1), "C4 a2 b1 c1"),
    Case.of((1, 1, 1), "a2 b2 C2"),
    Case.of((4, 1, 2), "a1 b2 C4"),
    # The coordinator at both ends, beside a line whose whole layers balance as well.
    Case.of((1, 1, 1), "C1 a2 b2 C1"),
    Case.of((4, 2, 1), "C2 a2 b1 C2"),
    # A worker in two stages.
    Case.of((1, 2, 1), "C2 a2 b2 a2"),
    # Halves of layers in turns and in a line; the coordinator has none.
    Case.of((1, 1, 1), "a1 b1 a1 b1 a1 b1 a1 b1", 16),
    Case.of((1, 1, 1), "a4 b4", 16),
]


@dataclass(frozen=True)
class Times:
    """What a stage sleeps for one micro-batch."""

    forward_seconds: float
    backward_seconds: float

    @property
    def both_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@functools.cache
def lateness_seconds() -> float:
    """How much later than asked for a thread wakes up here when nothing else goes on."""
    late = []
    for _ in range(_NUM_TRIED_SLEEPS):
        start = time.perf_counter()
        time.sleep(_TRIED_SECONDS)
        late.append(time.perf_counter() - start - _TRIED_SECONDS)
    return median(late)


def sleep_exactly(seconds: float) -> None:
    """Sleep as long as a computation would take, without what the timer adds."""
    time.sleep(max(0.0, seconds - lateness_seconds()))


class Sleep(torch.autograd.Function):
    """Hands its input on after a while, and its gradient after another."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, forward_seconds: float, backward_seconds: float
    ) -> Tensor:
        ctx.backward_seconds = backward_seconds
        sleep_exactly(forward_seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        sleep_exactly(ctx.backward_seconds)
        return gradient, None, None


class SleepingBlock(nn.Module):
    """A layer that takes a given time and computes next to nothing."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.forward_seconds = forward_seconds
        self.backward_seconds = backward_seconds
        self.scale = nn.Parameter(torch.ones(HIDDEN_SIZE))

    def forward(self, hidden: Tensor) -> Tensor:
        slept: Tensor = Sleep.apply(hidden, self.forward_seconds, self.backward_seconds)
        return slept * self.scale


class Sleepy(pl.LightningModule):
    """Sleeping blocks between an embedding and a loss that take no time worth the name."""

    def __init__(self, blocks: Sequence[SleepingBlock]) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.ones(HIDDEN_SIZE))
        self.blocks = nn.ModuleList(blocks)
        self.marks: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch * self.embedding
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.marks.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def stage_times(case: Case, unit_seconds: float) -> list[Times]:
    """A layer at speed 1 sleeps one unit forward and two backward."""
    pairs = zip(case.stages, case.processes, strict=True)
    units = [count / case.speeds[process] for (_, count), process in pairs]
    return [Times(unit * unit_seconds, 2 * unit * unit_seconds) for unit in units]


def bound_seconds(case: Case, stages: Sequence[Times]) -> float:
    """The least time of a step: from any stage on, a process does its work for all micro-batches
    after the first one has come through the stages before, and before the last one has gone back
    through them.
    """
    before = itertools.accumulate((times.both_seconds for times in stages), initial=0.0)
    return max(
        way + case.num_microbatches * own_seconds(case, stages, process, first)
        for first, (way, process) in enumerate(zip(before, case.processes, strict=False))
    )


def own_seconds(case: Case, stages: Sequence[Times], process: int, first: int = 0) -> float:
    """What a process does for one micro-batch, from a stage on."""
    pairs = zip(stages[first:], case.processes[first:], strict=True)
    return sum(times.both_seconds for times, other in pairs if other == process)


def predicted_seconds(case: Case, stages: Sequence[Times], max_in_flight: int) -> float:
    """What the planner's simulator says, with links that cost nothing."""
    processes, played = case.processes, [*stages]
    loss_seconds = played.pop().both_seconds if processes[-1] == 0 else 0.0
    starts_here = processes[0] == 0
    if not starts_here:
        played.insert(0, Times(0.0, 0.0))
    names = [f"link {number}" for number in range(len(played))]
    pipeline = Pipeline(
        stages=[StageTimes(t.forward_seconds, t.backward_seconds) for t in played],
        loss_seconds=loss_seconds,
        forward_hops=[Hop(f"{name} forward", 0.0) for name in names],
        backward_hops=[Hop(f"{name} backward", 0.0) for name in names],
        num_microbatches=case.num_microbatches,
        max_in_flight=max_in_flight,
        starts_first=starts_first_with(*plan_for(case, max_in_flight).own_counts),
        processes=[0, *(process for process in processes if process > 0)],
    )
    return simulate(pipeline).step_seconds


def plan_for(case: Case, in_flight: int | None) -> Plan:
    """Consecutive layers for each stage; the workers are local ones."""
    names = ["coordinator", *(f"local-{number}" for number in range(1, len(case.speeds)))]
    ends = itertools.accumulate(count for _, count in case.stages)
    stages = [
        StagePlan([names[process]], (end - count, end))
        for (_, count), process, end in zip(case.stages, case.processes, ends, strict=True)
    ]
    return Plan(stages, case.num_microbatches, in_flight)


def measured_seconds(case: Case, plan: Plan, unit_seconds: float, num_steps: int) -> float:
    """The median step, the first left out."""
    seconds = [
        unit_seconds / case.speeds[process]
        for (_, count), process in zip(case.stages, case.processes, strict=True)
        for _ in range(count)
    ]
    module = Sleepy([SleepingBlock(each, 2 * each) for each in seconds])
    data = torch.randn(num_steps * plan.micro_batches, SEQUENCE_LENGTH, HIDDEN_SIZE)
    strategy = HeteroPipelineStrategy(workers=case.num_workers, plan=plan, layers="blocks")
    fit(module, DataLoader(data, batch_size=plan.micro_batches), strategy)
    return median(end - start for start, end in itertools.pairwise(module.marks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="per run; the first is not timed")
    parser.add_argument("--micro-batches", type=int, help="by default those of each case")
    parser.add_argument("--in-flight", type=int)
    parser.add_argument("--cases", default="", help="only those whose name has this in it")
    parser.add_argument(
        "--milliseconds", type=float, default=20, help="a layer's forward at speed 1"
    )
    options = parser.parse_args()

    be_quiet()
    console = wide_console()
    unit_seconds = options.milliseconds / 1e3
    cases = [case for case in CASES if options.cases in case.name]
    if options.micro_batches:
        cases = [replace(case, num_microbatches=options.micro_batches) for case in cases]
    seconds: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            plan = plan_for(case, options.in_flight)
            seconds[case].append(measured_seconds(case, plan, unit_seconds, options.steps))
    report(seconds, options, console)


def report(seconds: dict[Case, list[float]], options: argparse.Namespace, console: Console) -> None:
    """Print what was reached of the bound, and how far off the simulator was."""
    table = Table(title="compute replaced by sleeps")
    columns = ["speeds, stages", "micro-batches", "ms", "bound", "achieved / bound", "/ steady"]
    for column in (*columns, "ms lost", "simulated", "/ measured"):
        table.add_column(column, justify="right")
    for case, values in seconds.items():
        stages = stage_times(case, options.milliseconds / 1e3)
        count, step_seconds = case.num_microbatches, median(values)
        bound = bound_seconds(case, stages)
        busiest = max(own_seconds(case, stages, process) for process in case.processes)
        predicted = predicted_seconds(case, stages, plan_for(case, options.in_flight).max_in_flight)
        table.add_row(
            case.name,
            str(count),
            f"{step_seconds * 1e3:.0f}",
            f"{bound * 1e3:.0f}",
            f"{bound / step_seconds:.3f}",
            f"{count * busiest / step_seconds:.3f}",
            f"{(step_seconds - bound) * 1e3 / count:.1f}",
            f"{predicted * 1e3:.0f}",
            f"{predicted / step_seconds:.3f}",
        )
    console.print(table)
    console.print("C: coordinator; steady: without fill and drain; lost: of each micro-batch")
    console.print(machine())


if __name__ == "__main__":
    main()
