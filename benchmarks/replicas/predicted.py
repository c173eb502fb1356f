"""What the planner predicts for plans, from a profile of the same minutes, and what is measured."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers import throttle
from benchmarks.peers.throttle import How
from benchmarks.peers.workload import NUM_LAYERS, WORKLOADS
from benchmarks.processes import on_core, worker_process
from benchmarks.replicas import slowed
from benchmarks.replicas.slowed import MICRO_BATCHES
from benchmarks.training import fit
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.callbacks import PipelineProfiler
from lightning_hetero.plan import COORDINATOR
from lightning_hetero.planner.profile import Profile
from lightning_hetero.planner.solver import Wishes, predict_given

GOAL = 0.08

# The worker's share of its core, and the coordinator's micro-batches; None for a line of layers.
CASES: list[tuple[float, int | None]] = [(1, 7), (0.5, 10), (0.25, 13), (1, None)]


def plan_for(worker: str, own: int | None) -> Plan:
    """Replicas of all layers, or a line with its last four layers here."""
    if own is None:
        cut = NUM_LAYERS // 2
        line = [StagePlan([worker], (0, cut)), StagePlan([COORDINATOR], (cut, NUM_LAYERS))]
        return Plan(line, MICRO_BATCHES)
    return slowed.plan_for(worker, own)


def named(own: int | None) -> str:
    """The plan in words."""
    return "line, 4 layers here" if own is None else f"replicas {MICRO_BATCHES - own}:{own}"


def predicted_seconds(plan: Plan, profile: Profile) -> float:
    """The planner's step.

    Raises:
        RuntimeError: If the planner has judged another plan than this one.
    """
    judged = predict_given(plan, profile, Wishes())
    if [stage.workers for stage in judged.plan.remote_stages] != [
        stage.workers for stage in plan.remote_stages
    ]:
        raise RuntimeError(
            f"The planner knows no replicas: it judged the stages {judged.plan.stages} instead of "
            f"{plan.stages}."
        )
    return judged.chosen.step_seconds


def compare(
    core: int, share: float, own: int | None, how: How, options: argparse.Namespace
) -> tuple[float, float]:
    """The predicted and the median measured step of one run, which measures its profile first."""
    workload = WORKLOADS[options.model]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        worker = stack.enter_context(worker_process(on_core(core)))
        stack.enter_context(throttle.slowed(worker.worker_pid, share, how, core))
        plan = plan_for(worker.address, own)
        profiler = PipelineProfiler(
            options.budget_seconds, path=folder / "profile.yaml", force=True
        )
        strategy: Any = HeteroPipelineStrategy([worker.address], plan)
        module = workload.module()
        data = workload.loader(options.steps, MICRO_BATCHES)
        fit(module, data, strategy, callbacks=[profiler])
        profile = strategy.plan_choice.profile
    return predicted_seconds(plan, profile), median(module.step_seconds)


def run(core: int, how: How, options: argparse.Namespace, console: Console) -> None:
    """All rounds, and their table; this process must be on the first core."""
    found: dict[tuple[float, int | None], list[tuple[float, float]]] = {c: [] for c in CASES}
    for number in range(options.rounds):
        for (share, own), pairs in found.items():
            predicted, measured = compare(core, share, own, how, options)
            pairs.append((predicted, measured))
            console.print(
                f"round {number + 1}: {named(own)}, worker's core at {share:g}: "
                f"{predicted:.3f} s predicted, {measured:.3f} s measured"
            )
    table = Table(title=f"steps of {MICRO_BATCHES} micro-batches; goal: within {GOAL:.0%}")
    columns = ("worker's core", "plan", "predicted, s", "measured, s", "error", "of the rounds")
    for column in columns:
        table.add_column(column, justify="right")
    for (share, own), pairs in found.items():
        errors = [predicted / measured - 1 for predicted, measured in pairs]
        table.add_row(
            f"{share:g}",
            named(own),
            f"{median(predicted for predicted, _ in pairs):.3f}",
            f"{median(measured for _, measured in pairs):.3f}",
            f"{median(errors):+.1%}",
            f"{min(errors):+.0%} to {max(errors):+.0%}",
        )
    console.print(table)
