"""Sleeping layers on devices that are unlike, or become so: what `replan=True` makes of a plan.

A layer sleeps by the speed of its process. The steps that a run ends with are compared with those
that the planner's simulator plays for the best plan with as many stages.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from benchmarks.processes import be_quiet, machine, wide_console, worker_process
from benchmarks.replan.layers import SPEEDS, Block
from benchmarks.sleeping_stages.main import HIDDEN_SIZE, SEQUENCE_LENGTH, Sleepy
from benchmarks.training import fit
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.plan import COORDINATOR
from lightning_hetero.planner.drift import StageSeconds
from lightning_hetero.planner.feasibility import candidate_of
from lightning_hetero.planner.replan import Known, Present

MICRO_BATCHES = 8


@dataclass(frozen=True)
class Case:
    """A run.

    Args:
        name: What it shows.
        counts: The layers of the coordinator, of a and of b; of a and b as replicas if there is one
            number.
        speeds: Of the coordinator, of a and of b.
        slow_from: The step at which b gets its speed; before, it has speed 1.
        is_even: Whether the plan is given as ``"even"``.
        noise: The standard deviation of a sleep, as a share of it.
    """

    name: str
    counts: tuple[int, ...]
    speeds: tuple[float, float, float]
    slow_from: int = 0
    is_even: bool = False
    noise: float = 0.0


CASES = [
    Case("even, b at a half", (2, 2, 2), (1, 1, 0.5), is_even=True),
    Case("by hand, b at a half", (2, 2, 2), (1, 1, 0.5)),
    Case("b falls to a half at step 4", (2, 2, 2), (1, 1, 0.5), slow_from=4),
    Case("replica b falls to a third at step 4", (4,), (1, 1, 1 / 3), slow_from=4),
    Case("balanced, 10 % noise", (3, 2, 1), (1, 1, 0.5), noise=0.1),
]


class Follows(pl.Callback):
    """Slows b, and notes the plan of each step."""

    def __init__(self, file: Path, case: Case) -> None:
        self._file, self._case = file, case
        self.plans: list[Plan] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        deployment = HeteroPipelineStrategy.of(trainer).deployment
        assert deployment is not None
        self.plans.append(deployment.plan)
        if trainer.global_step == self._case.slow_from:
            self._file.write_text(str(self._case.speeds[2]))


@dataclass(frozen=True)
class Outcome:
    """What a run did.

    Args:
        moves: The steps before which layers or shares moved.
        seconds: Of each step but the first.
        plan: The plan at the end.
        best_seconds: The step of the best plan, by the simulator.
    """

    moves: Sequence[int]
    seconds: Sequence[float]
    plan: Plan
    best_seconds: float


def plan_of(case: Case, names: Sequence[str]) -> Plan:
    """The plan with which a run begins."""
    if len(case.counts) == 1:
        stage = StagePlan([*names], (0, case.counts[0]), shares=[1, 1])
        return Plan([stage], micro_batches=12)
    return line(case.counts, [COORDINATOR, *names])


def line(counts: Sequence[int], names: Sequence[str]) -> Plan:
    spans = itertools.pairwise(itertools.accumulate(counts, initial=0))
    stages = [StagePlan([n], span) for n, span in zip(names, spans, strict=True)]
    return Plan(stages, MICRO_BATCHES)


def best_seconds(plan: Plan, seconds: Mapping[str, float]) -> float:
    """The shortest step of all places of the layers in these stages, or of all shares."""
    return min(candidate_of(other, _times(plan, seconds)).step_seconds for other in _others(plan))


def _others(plan: Plan) -> Iterator[Plan]:
    num_layers = plan.stages[-1].layers[1]
    if plan.has_replicas:
        for share in range(1, plan.micro_batches):
            shares = [share, plan.micro_batches - share]
            stage = StagePlan(plan.stages[0].workers, (0, num_layers), shares=shares)
            yield Plan([stage], plan.micro_batches)
        return
    names = [stage.worker for stage in plan.stages]
    for cuts in itertools.combinations(range(1, num_layers), len(names) - 1):
        yield line([b - a for a, b in itertools.pairwise((0, *cuts, num_layers))], names)


def _times(plan: Plan, seconds: Mapping[str, float]) -> Any:
    """The profile of devices that take so many seconds for a layer and a micro-batch."""
    layers: dict[str, float] = dict.fromkeys(seconds, 0.0)
    for stage in plan.stages:
        for name, share in zip(stage.workers, stage.present_shares, strict=True):
            layers[name] += len(stage.layer_indices) * share / sum(stage.present_shares)
    present = {name: StageSeconds(layers[name] * each, 1e-4) for name, each in seconds.items()}
    return Present.by_seconds(plan, Known(), present).profile


def outcome_of(case: Case, unit_seconds: float, num_steps: int) -> Outcome:
    """Run a case."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = [folder / name for name in (COORDINATOR, "a", "b")]
        for file, speed in zip(files, case.speeds, strict=True):
            file.write_text(str(speed))
        if case.slow_from:
            files[2].write_text("1")
        os.environ[SPEEDS] = str(files[0])
        names = [
            stack.enter_context(
                worker_process(["env", f"{SPEEDS}={file}"], allow="benchmarks")
            ).address
            for file in files[1:]
        ]
        plan = plan_of(case, names)
        num_layers = plan.stages[-1].layers[1]
        module = Sleepy([Block(unit_seconds, case.noise) for _ in range(num_layers)])
        data = torch.randn(num_steps * plan.micro_batches, SEQUENCE_LENGTH, HIDDEN_SIZE)
        given: Plan | Literal["even"] = "even" if case.is_even else plan
        strategy = HeteroPipelineStrategy(names, given, layers="blocks", replan=True)
        follows = Follows(files[2], case)
        batches: DataLoader[Any] = DataLoader(data, batch_size=plan.micro_batches)
        fit(module, batches, strategy, callbacks=[follows])
    pairs = itertools.pairwise(module.marks)
    seconds = {
        name: 3 * unit_seconds / speed
        for name, speed in zip((COORDINATOR, *names), case.speeds, strict=True)
    }
    changed = enumerate(itertools.pairwise(follows.plans), start=1)
    return Outcome(
        [step for step, (one, other) in changed if one != other],
        [end - start for start, end in pairs],
        follows.plans[-1],
        best_seconds(plan, seconds),
    )


def described(plan: Plan) -> str:
    """The layers of each stage, or the shares of replicas."""
    if plan.has_replicas:
        return ":".join(map(str, plan.stages[0].present_shares))
    return " ".join(str(len(stage.layer_indices)) for stage in plan.stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--cases", default="", help="only those whose name has this in it")
    parser.add_argument(
        "--milliseconds", type=float, default=10, help="a layer's forward at speed 1"
    )
    options = parser.parse_args()

    be_quiet()
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    console = wide_console()
    found = {}
    for case in CASES:
        if options.cases in case.name:
            found[case] = outcome_of(case, options.milliseconds / 1e3, options.steps)
            console.print(f"{case.name}: done")
    report(found, console)


def report(found: Mapping[Case, Outcome], console: Console) -> None:
    """Print where layers are at the end, and what is reached of the best plan."""
    table = Table(title="layers that sleep, replan=True")
    for column in ("case", "plan", "at the end", "moves before step", "s at first", "s at the end"):
        table.add_column(column, justify="right")
    table.add_column("best plan, simulated", justify="right")
    for case, outcome in found.items():
        slow = outcome.seconds[case.slow_from : case.slow_from + 5]
        table.add_row(
            case.name,
            " ".join(map(str, case.counts)) if len(case.counts) > 1 else "1:1",
            described(outcome.plan),
            ", ".join(map(str, outcome.moves)) or "none",
            f"{median(slow):.3f}",
            f"{median(outcome.seconds[-10:]):.3f}",
            f"{outcome.best_seconds:.3f}",
        )
    console.print(table)
    console.print(machine())


if __name__ == "__main__":
    main()
