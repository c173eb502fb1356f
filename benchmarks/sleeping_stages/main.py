"""Three and four stages whose compute is exact sleeps: what the pipeline itself loses.

Blocks sleep in their forward and backward, so that two cores are enough for any number of stages.
Measured steps are compared with the bound, below which no schedule can go: the busiest stage's own
work, and the first micro-batch's way to it and the last one's way back.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from lightning_hetero.planner.simulation import Hop, Pipeline, StageTimes, simulate

HIDDEN_SIZE = 64
SEQUENCE_LENGTH = 32

_NUM_TRIED_SLEEPS = 21
_TRIED_SECONDS = 0.005


@dataclass(frozen=True)
class Case:
    """A pipeline: the relative speed and the number of layers of each stage, in their order; the
    first one's are on the coordinator, or else the last one's."""

    speeds: tuple[float, ...]
    layers: tuple[int, ...]
    ends_here: bool = False

    @property
    def name(self) -> str:
        last = ", coordinator last" if self.ends_here else ""
        return f"{_colons(self.speeds)} with {_colons(self.layers)}{last}"


CASES = [
    Case((1, 1, 1), (2, 2, 2)),
    Case((4, 2, 1), (4, 2, 1)),
    Case((1, 1, 1, 1), (2, 2, 2, 2)),
    Case((4, 2, 1, 1), (4, 2, 1, 1)),
    Case((1, 1, 1), (2, 2, 2), ends_here=True),
    Case((1, 2, 4), (1, 2, 4), ends_here=True),
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
    units = [count / speed for count, speed in zip(case.layers, case.speeds, strict=True)]
    return [Times(unit * unit_seconds, 2 * unit * unit_seconds) for unit in units]


def bound_seconds(stages: Sequence[Times], num_microbatches: int) -> float:
    """The least time of a step: a stage does its own work for all micro-batches, after the first
    one has come through the stages before it, and before the last one has gone back through them.
    """
    before = [0.0, *itertools.accumulate(times.both_seconds for times in stages)]
    return max(
        way + num_microbatches * times.both_seconds
        for way, times in zip(before, stages, strict=False)
    )


def predicted_seconds(
    case: Case, stages: Sequence[Times], num_microbatches: int, max_in_flight: int
) -> float:
    """What the planner's simulator says, with links that cost nothing."""
    names = [f"link {number}" for number in range(len(stages))]
    loss_seconds = 0.0
    if case.ends_here:
        *workers, own = stages
        # All that the coordinator does is behind the workers.
        stages, loss_seconds = [Times(0.0, 0.0), *workers], own.both_seconds
    pipeline = Pipeline(
        stages=[StageTimes(t.forward_seconds, t.backward_seconds) for t in stages],
        loss_seconds=loss_seconds,
        forward_hops=[Hop(f"{name} forward", 0.0) for name in names],
        backward_hops=[Hop(f"{name} backward", 0.0) for name in names],
        num_microbatches=num_microbatches,
        max_in_flight=max_in_flight,
        starts_first=case.ends_here,
    )
    return simulate(pipeline).step_seconds


def plan_for(case: Case, num_microbatches: int, in_flight: int | None) -> Plan:
    """Consecutive layers for the coordinator and each local worker."""
    ends = [*itertools.accumulate(case.layers)]
    names = [f"local-{number}" for number in range(1, len(ends))]
    names.insert(len(names) if case.ends_here else 0, "coordinator")
    stages = [
        StagePlan([name], (end - count, end))
        for name, count, end in zip(names, case.layers, ends, strict=True)
    ]
    return Plan(stages, num_microbatches, in_flight)


def measured_seconds(case: Case, plan: Plan, unit_seconds: float, num_steps: int) -> float:
    """The median step, the first left out."""
    seconds = [
        unit_seconds / speed
        for speed, count in zip(case.speeds, case.layers, strict=True)
        for _ in range(count)
    ]
    module = Sleepy([SleepingBlock(each, 2 * each) for each in seconds])
    data = torch.randn(num_steps * plan.micro_batches, SEQUENCE_LENGTH, HIDDEN_SIZE)
    strategy = HeteroPipelineStrategy(workers=len(case.speeds) - 1, plan=plan, layers="blocks")
    fit(module, DataLoader(data, batch_size=plan.micro_batches), strategy)
    return median(end - start for start, end in itertools.pairwise(module.marks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="per run; the first is not timed")
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--in-flight", type=int)
    parser.add_argument(
        "--milliseconds", type=float, default=20, help="a layer's forward at speed 1"
    )
    options = parser.parse_args()

    be_quiet()
    console = wide_console()
    unit_seconds = options.milliseconds / 1e3
    seconds: dict[Case, list[float]] = {case: [] for case in CASES}
    for _ in range(options.rounds):
        for case in CASES:
            plan = plan_for(case, options.micro_batches, options.in_flight)
            seconds[case].append(measured_seconds(case, plan, unit_seconds, options.steps))
    report(seconds, options, console)


def report(seconds: dict[Case, list[float]], options: argparse.Namespace, console: Console) -> None:
    """Print what was reached of the bound, and how far off the simulator was."""
    table = Table(title=f"{options.micro_batches} micro-batches, compute replaced by sleeps")
    columns = ["speeds with layers", "ms", "bound", "achieved / bound", "/ steady", "ms lost"]
    for column in (*columns, "simulated", "/ measured"):
        table.add_column(column, justify="right")
    for case, values in seconds.items():
        stages = stage_times(case, options.milliseconds / 1e3)
        plan = plan_for(case, options.micro_batches, options.in_flight)
        step_seconds = median(values)
        bound = bound_seconds(stages, plan.micro_batches)
        steady = plan.micro_batches * max(times.both_seconds for times in stages)
        in_flight = plan.max_in_flight
        predicted = predicted_seconds(case, stages, plan.micro_batches, in_flight)
        table.add_row(
            case.name,
            f"{step_seconds * 1e3:.0f}",
            f"{bound * 1e3:.0f}",
            f"{bound / step_seconds:.3f}",
            f"{steady / step_seconds:.3f}",
            f"{(step_seconds - bound) * 1e3 / plan.micro_batches:.1f}",
            f"{predicted * 1e3:.0f}",
            f"{predicted / step_seconds:.3f}",
        )
    console.print(table)
    console.print("steady: without fill and drain; lost: of each micro-batch, beyond the bound")
    console.print(machine())


def _colons(numbers: Sequence[float]) -> str:
    return ":".join(f"{number:g}" for number in numbers)


if __name__ == "__main__":
    main()
