"""Replicas whose compute is exact sleeps: what the pipeline itself loses, with four processes.

A replica sleeps by the speed of its process. Measured steps are compared with the bound: the
busiest process's own work, and the first micro-batch's way to it and the last one's way back.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.processes import worker_process
from benchmarks.sleeping_stages.main import (
    HIDDEN_SIZE,
    SEQUENCE_LENGTH,
    Sleep,
    SleepingBlock,
    Sleepy,
)
from benchmarks.training import fit
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.pipeline.placement import Placement
from lightning_hetero.plan import COORDINATOR

SPEED = "SLEEPING_SPEED"
"""The environment variable with the speed of a process."""

FORWARD_AND_BACKWARD = 3
"""Units that a layer sleeps for a micro-batch at speed 1: one forward and two backward."""


@dataclass(frozen=True)
class Case:
    """A pipeline of sleeping layers.

    Args:
        speeds: Of each process: of C, the coordinator, and of the workers a, b and c.
        stages: The processes of each stage and its number of layers, such as ``"C1 ab3"``. The
            shares of replicas are like their speeds.
        num_microbatches: The micro-batches of a step.
        in_flight: The bound on micro-batches in flight; None for the plan's default.
    """

    speeds: tuple[int, ...]
    stages: str
    num_microbatches: int
    in_flight: int | None = None

    @property
    def name(self) -> str:
        return f"{':'.join(map(str, self.speeds))}, {self.stages}"

    @property
    def letters(self) -> str:
        return "Cabc"[: len(self.speeds)]

    def plan(self, workers: Sequence[str]) -> Plan:
        """The plan for these workers' addresses."""
        names = dict(zip(self.letters, (COORDINATOR, *workers), strict=True))
        speeds = dict(zip(self.letters, self.speeds, strict=True))
        stages, end = [], 0
        for word in self.stages.split():
            letters, first = word.rstrip("0123456789"), end
            end += int(word[len(letters) :])
            shares = [speeds[letter] for letter in letters] if len(letters) > 1 else None
            held = [names[letter] for letter in letters]
            stages.append(StagePlan(held, (first, end), shares=shares))
        return Plan(stages, self.num_microbatches, self.in_flight)


LINE_OF_FOUR = {count: Case((1, 1, 1, 1), "C1 a1 b1 c1", count) for count in (4, 8)}
FOUR_REPLICAS = {count: Case((1, 1, 1, 1), "abcC4", count) for count in (4, 8)}
CASES = [
    Case((1, 2, 1, 1), "C1 ab3 c1", 30),
    # The slowest replica runs one micro-batch while the others run seven: more are in flight.
    Case((4, 2, 1, 1), "abcC4", 32, 12),
    *itertools.chain(*zip(LINE_OF_FOUR.values(), FOUR_REPLICAS.values(), strict=True)),
]
GAIN_GOALS = {4: 1.5, 8: 1.25}
GOAL = 0.95


def seconds_of(case: Case, unit_seconds: float) -> dict[str, float]:
    """Forward and backward of a layer for a micro-batch, by the letter of the process."""
    pairs = zip(case.letters, case.speeds, strict=True)
    return {letter: FORWARD_AND_BACKWARD * unit_seconds / speed for letter, speed in pairs}


def bound_seconds(case: Case, unit_seconds: float) -> float:
    """The least time of a step: a process does its own work after its first micro-batch has come
    through the stages before, and before its last one has gone back through them."""
    workers = case.letters[1:]
    plan = case.plan(list(workers))
    layer_seconds = {COORDINATOR: 0.0} | seconds_of(case, unit_seconds)
    layer_seconds[COORDINATOR] = layer_seconds["C"]
    work = dict.fromkeys((COORDINATOR, *workers), 0.0)
    way: dict[str, float] = {}
    for microbatch in range(case.num_microbatches):
        before = 0.0
        for name, layers in route(plan, microbatch):
            seconds = len(layers) * layer_seconds[name]
            way[name] = min(way.get(name, before), before)
            work[name] += seconds
            before += seconds
    return max(way[name] + work[name] for name in way)


def route(plan: Plan, microbatch: int) -> list[tuple[str, range]]:
    """The processes that a micro-batch comes through, each with its layers."""
    placement, number, found = Placement.of(plan), 0, []
    for stage in plan.stages:
        name = COORDINATOR
        if not stage.is_local:
            number += 1
            name = placement.process(number, microbatch)
        found.append((name, stage.layer_indices))
    return found


class Block(SleepingBlock):
    """A layer that sleeps by the speed of the process in which it runs."""

    def forward(self, hidden: Tensor) -> Tensor:
        speed = float(os.environ[SPEED])
        times = (self.forward_seconds / speed, self.backward_seconds / speed)
        slept: Tensor = Sleep.apply(hidden, *times)
        return slept * self.scale


def workers_of(stack: ExitStack, speeds: Sequence[int]) -> list[str]:
    """Where workers of these speeds listen until the stack is closed."""
    before = [["env", f"{SPEED}={speed}"] for speed in speeds]
    return [
        stack.enter_context(worker_process(each, allow="benchmarks")).address for each in before
    ]


def measured_seconds(
    case: Case, workers: Sequence[str], unit_seconds: float, num_steps: int
) -> float:
    """The median step, the first left out."""
    os.environ[SPEED] = str(case.speeds[0])
    plan = case.plan(workers)
    num_layers = plan.stages[-1].layers[1]
    module = Sleepy([Block(unit_seconds, 2 * unit_seconds) for _ in range(num_layers)])
    data = torch.randn(num_steps * case.num_microbatches, SEQUENCE_LENGTH, HIDDEN_SIZE)
    strategy = HeteroPipelineStrategy(plan.workers, plan, layers="blocks")
    batches: DataLoader[Any] = DataLoader(data, batch_size=case.num_microbatches)
    fit(module, batches, strategy)
    return median(end - start for start, end in itertools.pairwise(module.marks))


def run(num_rounds: int, num_steps: int, unit_seconds: float, console: Console) -> None:
    """All cases in each round, and their tables."""
    seconds: dict[Case, list[float]] = {case: [] for case in CASES}
    with ExitStack() as stack:
        workers = {s: workers_of(stack, s[1:]) for s in {case.speeds for case in CASES}}
        for number in range(num_rounds):
            for case, values in seconds.items():
                listening = workers[case.speeds]
                values.append(measured_seconds(case, listening, unit_seconds, num_steps))
            console.print(f"sleeping: round {number + 1} of {num_rounds} done")
    report(seconds, unit_seconds, console)


def report(seconds: dict[Case, list[float]], unit_seconds: float, console: Console) -> None:
    """Print what was reached of the bound, and what replicas gain over a line."""
    table = Table(title="compute replaced by sleeps")
    for column in ("speeds, stages", "micro-batches", "ms", "bound, ms", "bound / ms", "goal"):
        table.add_column(column, justify="right")
    for case, values in seconds.items():
        bound, step_seconds = bound_seconds(case, unit_seconds), median(values)
        cells = [case.name, str(case.num_microbatches), f"{1e3 * step_seconds:.0f}"]
        cells += [f"{1e3 * bound:.0f}", f"{bound / step_seconds:.3f}"]
        table.add_row(*cells, f"{GOAL}" if case.num_microbatches > 8 else "")
    console.print(table)
    for count, goal in GAIN_GOALS.items():
        line, replicas = LINE_OF_FOUR[count], FOUR_REPLICAS[count]
        gains = [a / b for a, b in zip(seconds[line], seconds[replicas], strict=True)]
        bound = bound_seconds(line, unit_seconds) / bound_seconds(replicas, unit_seconds)
        console.print(
            f"{count} micro-batches: four replicas are {median(gains):.3f} × a line of four; "
            f"goal {goal}, bound {bound:.3f}"
        )
