"""A worker is slowed in mid-run, and the run goes on with other shares of the micro-batches."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import lightning.pytorch as pl
from rich.console import Console

from benchmarks.peers.arena import Arena, Outcome, Setting
from benchmarks.peers.main import SHORT
from benchmarks.peers.report import ONE_CORE
from benchmarks.peers.splits import Costs
from benchmarks.peers.throttle import How, slowed
from benchmarks.peers.workload import NUM_LAYERS, WORKLOADS
from benchmarks.plan_quality.main import Worker
from benchmarks.processes import on_core, worker_process
from benchmarks.replicas.two_cores import SLOW_IN_FLIGHT
from benchmarks.training import fit
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.plan import COORDINATOR

MICRO_BATCHES, OWN_BEFORE = 16, 7
SLOWED_AT, NUM_SLOW_STEPS, NUM_STEPS_AFTER = 4, 2, 10
GOAL, GOAL_STEPS = 0.90, 8


@dataclass(frozen=True)
class Shift:
    """One run.

    Args:
        own_after: Micro-batches of the coordinator with which it goes on.
        step_seconds: Of every step but the first.
        moved_bytes: What the change of shares sent and received, signs of life included.
        new_bound: The sum of the two cores' own speeds after the slowing, in steps per second.
        allowed: By the measured layers and head, what shares allow of it.
    """

    own_after: int
    step_seconds: Sequence[float]
    moved_bytes: int
    new_bound: float
    allowed: float

    @property
    def before(self) -> float:
        """The median step before."""
        return median(self.step_seconds[: SLOWED_AT - 1])

    @property
    def slow(self) -> float:
        """The median step with the slowed worker and the shares of before."""
        return median(self.step_seconds[SLOWED_AT - 1 : SLOWED_AT - 1 + NUM_SLOW_STEPS])

    @property
    def after(self) -> float:
        """The median step with the new shares."""
        return median(self.step_seconds[SLOWED_AT - 1 + NUM_SLOW_STEPS :])

    @property
    def num_steps_to_goal(self) -> int | None:
        """How many steps after the slowing the first one reaches the goal; None if none does."""
        goal_seconds = 1 / (GOAL * self.new_bound)
        steps = enumerate(self.step_seconds[SLOWED_AT - 1 :], start=1)
        return next((number for number, seconds in steps if seconds <= goal_seconds), None)

    @property
    def reached(self) -> float:
        """The share of the bound at the end."""
        return 1 / self.after / self.new_bound


def plan_for(worker: str, own: int) -> Plan:
    """The coordinator and the worker hold all layers."""
    shares = [MICRO_BATCHES - own, own]
    stage = StagePlan([worker, COORDINATOR], (0, NUM_LAYERS), shares=shares)
    return Plan([stage], MICRO_BATCHES, SLOW_IN_FLIGHT)


class SlowsAndShares(pl.Callback):
    """Slows the worker in front of a step, and gives it another share some steps later."""

    def __init__(self, worker: Worker, share: float, how: How, own_after: int) -> None:
        self._slowing = slowed(worker.pid, share, how, worker.core)
        self._plan = plan_for(worker.address, own_after)
        self._stack = ExitStack()
        self.moved_bytes = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == SLOWED_AT:
            self._stack.enter_context(self._slowing)
        if trainer.global_step == SLOWED_AT + NUM_SLOW_STEPS:
            strategy = HeteroPipelineStrategy.of(trainer)
            before = traffic_bytes(strategy)
            strategy.move_layers(self._plan)
            self.moved_bytes = traffic_bytes(strategy) - before

    def teardown(self, *_: object, **__: object) -> None:
        self._stack.close()


def traffic_bytes(strategy: HeteroPipelineStrategy) -> int:
    """What the coordinator has sent and received so far."""
    assert strategy.deployment is not None
    members = strategy.deployment.coordinator.connections.members
    channels = [member.channel.traffic for member in members]
    return sum(each.sent_bytes + each.received_bytes for each in channels)


def measured_shift(
    cores: tuple[int, int], share: float, how: How, options: argparse.Namespace
) -> Shift:
    """One run beside the two cores alone; this process must be on the first one."""
    setting = Setting("slowed in mid-run", share)
    arena = Arena(cores, setting, how, options.steps, MICRO_BATCHES, trains=options.model)
    single, second = arena.alone(ONE_CORE, 0), arena.alone(ONE_CORE, 1)
    short = arena.alone(ONE_CORE, 0, SHORT)
    costs = Costs.from_two_models(seconds_of(single), seconds_of(short), NUM_LAYERS, SHORT)
    speed = seconds_of(single) / seconds_of(second)
    own = costs.balanced_share(MICRO_BATCHES, speed)
    module = WORKLOADS[options.model].module()
    data = WORKLOADS[options.model].loader(
        SLOWED_AT + NUM_SLOW_STEPS + NUM_STEPS_AFTER, MICRO_BATCHES
    )
    with worker_process(on_core(cores[1])) as listening:
        worker = Worker(listening.address, listening.worker_pid, cores[1])
        shares = SlowsAndShares(worker, share, how, own)
        plan = plan_for(worker.address, OWN_BEFORE)
        strategy: Any = HeteroPipelineStrategy([worker.address], plan)
        fit(module, data, strategy, callbacks=[shares])
    allowed = costs.replicas_bound(own, MICRO_BATCHES, speed) / (1 + speed)
    new_bound = (1 + speed) / seconds_of(single)
    return Shift(own, module.step_seconds, shares.moved_bytes, new_bound, allowed)


def seconds_of(outcome: Outcome) -> float:
    return median(outcome.step_seconds)


def run(
    cores: tuple[int, int], how: How, options: argparse.Namespace, console: Console, share: float
) -> None:
    """All rounds, and what they show."""
    shifts = []
    for _ in range(options.rounds):
        shift = measured_shift(cores, share, how, options)
        shifts.append(shift)
        console.print(
            f"slowed to {share:.0%}: shares {MICRO_BATCHES - OWN_BEFORE}:{OWN_BEFORE} become "
            f"{MICRO_BATCHES - shift.own_after}:{shift.own_after} after {NUM_SLOW_STEPS} slow "
            f"steps; a step takes {shift.before:.3f} s before, {shift.slow:.3f} s when slowed, "
            f"{shift.after:.3f} s at the end: {shift.reached:.0%} of the sum of both cores' "
            f"speeds, of which shares allow {shift.allowed:.0%}. {GOAL:.0%} came with step "
            f"{shift.num_steps_to_goal} (goal: {GOAL_STEPS}). The move sent and received "
            f"{shift.moved_bytes} bytes."
        )
    reached = median(shift.reached for shift in shifts)
    console.print(f"slowed in mid-run: {reached:.3f} of the sum of speeds; goal {GOAL}")
