"""PlanChoice: the plan of each run, as the user gave it, or as measurements say.

given, "even", read from a file ──────────────────────────────▶ plan
"auto":  connect ─▶ profile = measure(…) ─▶ solve(profile) ───▶ plan
"replicated":  likewise, and solve_replicated(profile)
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import math
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from msgspec import structs
from rich.console import Console
from typing_extensions import override

from .._lightning import TrainerFn, pl
from ..coordinator.connections import Connections
from ..coordinator.dry_run import NoSample
from ..errors import PlanError
from ..model.layers import DecoderLayer
from ..plan import NAMED_PLANS, GivenPlan, Plan, with_micro_batches
from ..planner.feasibility import as_measured, check_plan, with_shares
from ..planner.profile import Measured, Profile
from ..planner.solver import Solution, Wishes, even_plan, replicated_plan, solve, solve_replicated
from ..planner.verdict import judge, render, show
from ..recovery import Recovery
from .membership import Replanner, Terms
from .watch import most_accumulated

if TYPE_CHECKING:
    from ..profiler.measure import ProfilingOptions
    from ..profiler.profiling_run import Newcomers, ProfilingRun
    from ..strategy.deploy import Move, Site
    from ..strategy.training_run import TrainingRun

logger = logging.getLogger(__name__)


class PlanChoice:
    """Chooses the plan of each run of a strategy.

    Args:
        plan: ``"auto"``, ``"even"``, ``"replicated"``, a path or a Plan.
        micro_batches: Pieces of a batch; by default, the plan's number.

    Raises:
        PlanError: If the plan's file is there already and cannot be read.

    Attributes:
        plan: As the user gave it.
        measured: The latest measured or read profile, if there is one.
    """

    def __init__(self, plan: str | Path | Plan, micro_batches: int | None) -> None:
        self.plan = plan
        self.measured: Measured | None = None
        self._newcomers: Newcomers | None = None
        self._micro_batches = micro_batches
        self._solved: dict[tuple[int, tuple[str, ...]], Plan] = {}
        self._given = None if plan in NAMED_PLANS else GivenPlan(plan, micro_batches)

    @property
    def profile(self) -> Profile | None:
        """The latest measured or read profile, if there is one."""
        return None if self.measured is None else self.measured.profile

    @property
    def is_of_strategy(self) -> bool:
        """Whether the strategy makes the plan by its measurements."""
        return self.plan in ("auto", "replicated")

    def measures(self, trainer: pl.Trainer) -> bool:
        """Whether the present run measures its devices; see `PlanSource`."""
        chosen = self.is_of_strategy or chosen_profiling(trainer) is not None
        return chosen and trainer.state.fn == TrainerFn.FITTING

    def plan_for(
        self,
        site: Site,
        layers: Sequence[DecoderLayer],
        workers: Sequence[str],
        connections: Connections | None,
    ) -> Plan:
        """The plan of a run; see `PlanSource`."""
        trainer, self._newcomers = site.module.trainer, None
        if connections is None:
            return self.unmeasured(trainer, len(layers), workers)
        given = self.given(len(layers), workers)
        run = _profiling(site, layers, connections, workers, chosen_profiling(trainer))
        try:
            self.measured = in_window(run.measured(), trainer, site.cuts_step)
        except NoSample as reason:
            return given or self.even(len(layers), workers, str(reason))
        profile = self.measured.profile
        if given is None or self.plan == "replicated":
            # The coordinator is not a replica where a batch's step runs whole.
            plan = self.solve(profile, workers, replicas=site.cuts_step)
        else:
            _warn_of_faults(given, profile)
            plan = _shared_by_speed(given, profile)
        size = math.ceil((profile.batch_size or 1) / plan.micro_batches)
        self._newcomers = run.newcomers(self.measured, size)
        return plan

    def follow(
        self, run: TrainingRun, site: Site, recovery: Recovery | None, move: Move
    ) -> Replanner:
        """The follower of a training's plan, with changes between two steps; see `PlanSource`."""
        newcomers, self._newcomers = self._newcomers, None
        # Nothing measures a newcomer on slices along the tokens.
        may_change = (site.may_move or self.is_of_strategy) and not site.slices_tokens
        joins = may_change and site.module.automatic_optimization
        terms = Terms(joins, recovery, self.measured, newcomers)
        return Replanner(run, site, terms, move)

    def given(self, num_layers: int, workers: Sequence[str]) -> Plan | None:
        """The user's own plan; None under ``"auto"``.

        Raises:
            PlanError: If the plan does not fit.
        """
        if self._given is not None:
            return self._given.fitting(num_layers, workers)
        if self.plan == "auto":
            return None
        make = even_plan if self.plan == "even" else replicated_plan
        plan = with_micro_batches(make(num_layers, workers), self._micro_batches)
        plan.check(num_layers, workers)
        return plan

    def named_workers(self) -> Sequence[str]:
        """The workers in the user's own plan; empty if the strategy makes the plan.

        Raises:
            PlanError: If the plan's file cannot be read.
        """
        return () if self._given is None else self._given.read().workers

    def unmeasured(self, trainer: pl.Trainer, num_layers: int, workers: Sequence[str]) -> Plan:
        """The plan of a run without measurements; under ``"auto"``, the plan of the last training.

        Raises:
            PlanError: If the plan does not fit.
        """
        plan = self.given(num_layers, workers) or self._solved.get((num_layers, tuple(workers)))
        function = trainer.state.fn.value if trainer.state.fn else ""
        return plan or self.even(
            num_layers, workers, f"There is no training in `trainer.{function}`."
        )

    def even(self, num_layers: int, workers: Sequence[str], reason: str) -> Plan:
        """The same number of layers for each process, because a measurement is not possible."""
        rank_zero_info(f"plan='auto' is 'even' here, since nothing can be measured. {reason}")
        return with_micro_batches(even_plan(num_layers, workers), self._micro_batches)

    def solve(self, profile: Profile, workers: Sequence[str], replicas: bool) -> Plan:
        """The fastest plan by a profile; under ``"replicated"`` the fastest of such plans.

        Args:
            profile: The measurements.
            workers: The names of all workers.
            replicas: Whether ``"auto"`` may give a stage to several processes.

        Raises:
            PlanError: If the model does not fit on the devices, or not on each.
        """
        find = solve_replicated if self.plan == "replicated" else solve
        wishes = Wishes(micro_batches=self._micro_batches, replicas=replicas)
        solution = find(profile, wishes)
        _print_verdict(solution)
        self._solved[len(profile.model.layers), tuple(workers)] = solution.plan
        return solution.plan


def in_window(measured: Measured, trainer: pl.Trainer, cuts_step: bool) -> Measured:
    """The measurements with the batches of an accumulation window, if these are one pipeline:
    whole batches run one after the other."""
    count = most_accumulated(trainer) if cuts_step else 1
    return measured._replace(
        profile=structs.replace(measured.profile, accumulate_grad_batches=count)
    )


def chosen_profiling(trainer: pl.Trainer) -> ProfilingOptions | None:
    """The options of the Trainer's `PipelineProfiler`, if it has one."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    found = (getattr(each, "profiling_options", None) for each in callbacks)
    return next((each for each in found if each is not None), None)


def measure(site: Site, layers: Sequence[DecoderLayer], options: ProfilingOptions) -> Profile:
    """Connect to all workers, measure, and disconnect.

    Raises:
        NoSample: Without a training batch to measure with.
        HeteroError: If a worker fails, or a process cannot run a layer.
    """
    workers = site.find_workers()
    with closing(site.connect_all(workers, layers)) as coordinator:
        run = _profiling(site, layers, coordinator.connections, workers, options)
        return run.measured().profile


def _profiling(
    site: Site,
    layers: Sequence[DecoderLayer],
    connections: Connections,
    workers: Sequence[str],
    options: ProfilingOptions | None,
) -> ProfilingRun:
    """The profiler of a run's devices, by default with the default options."""
    from ..profiler.measure import ProfilingOptions
    from ..profiler.profiling_run import ProfilingRun

    options = options or ProfilingOptions()
    whole, batches = not site.cuts_step, site.options.batches
    batches = dataclasses.replace(batches, along_tokens=site.slices_tokens)
    return ProfilingRun(site.module, layers, connections, workers, options, whole, batches)


def _shared_by_speed(plan: Plan, profile: Profile) -> Plan:
    """The plan with shares by measured speed for replicas without any; equal ones if the profile
    does not fit."""
    try:
        found = with_shares(as_measured(plan, profile), profile)
    except PlanError:
        return plan  # `_warn_of_faults` has said why
    return dataclasses.replace(found, micro_batches=plan.micro_batches)


def _warn_of_faults(plan: Plan, profile: Profile) -> None:
    for fault in check_plan(as_measured(plan, profile), profile):
        rank_zero_warn(f"By what was measured, the plan cannot run. {fault}")


class _RunsConsole(Console):
    """Prints during a run. A closed pipe ends a command, but must not end a run."""

    @override
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@rank_zero_only
def _print_verdict(solution: Solution) -> None:
    verdict = render(judge(solution))
    try:
        show(verdict, _RunsConsole)
    except (OSError, ValueError) as error:  # standard output is full or closed
        logger.warning("The plan cannot be printed: %s", error)
