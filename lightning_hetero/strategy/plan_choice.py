"""The plan of a run: given, even, or the best one for what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from rich.console import Console

from ..callbacks.profiler import PipelineProfiler
from ..errors import ProfileError
from ..plan import Plan
from ..planner.feasibility import check_plan
from ..planner.profile import Profile
from ..planner.solver import Solution, Wishes, even_plan, solve
from ..planner.verdict import judge, render
from ..profiler.dry_run import NoSample
from ..profiler.measure import ProfilingOptions
from ..profiler.run import ProfilingRun


class PlanChoice:
    """Chooses the plan of each run of a strategy.

    Args:
        plan: ``"auto"``, ``"even"``, a path or a Plan.
        micro_batches: Pieces of a batch; None takes the plan's number.

    Attributes:
        plan: As it was given.
        profile: What was measured, or read, for the last run that was to be measured.
    """

    def __init__(self, plan: str | Path | Plan, micro_batches: int | None) -> None:
        self.plan = plan
        self._micro_batches = micro_batches
        self._solved: dict[tuple[int, tuple[str, ...]], Plan] = {}
        self.profile: Profile | None = None
        self._only_measures = False
        self._force = False

    def profiling_options(self, trainer: pl.Trainer) -> ProfilingOptions | None:
        """How this run is to be measured before it is deployed; None where it is not."""
        if trainer.state.fn != TrainerFn.FITTING:
            return None
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        found = [one.options for one in callbacks if isinstance(one, PipelineProfiler)]
        chosen = found[0] if found else None
        if chosen is None and (self.plan == "auto" or self._only_measures):
            chosen = ProfilingOptions()
        if chosen is not None and self._force:
            chosen = dataclasses.replace(chosen, force=True)
        return chosen

    @contextmanager
    def only_measuring(self, force: bool) -> Iterator[None]:
        """Inside, `fit` ends when the devices are measured."""
        self.profile, self._only_measures, self._force = None, True, force
        try:
            yield
        finally:
            self._only_measures = self._force = False

    def measured_profile(self, module: pl.LightningModule) -> Profile:
        """What was measured.

        Raises:
            ProfileError: If nothing was.
        """
        if self.profile is None:
            raise ProfileError(
                f"{type(module).__name__} has no decoder layers that could be found, so nothing "
                "was measured; name them with `layers=`."
            )
        return self.profile

    def without_measuring(
        self, trainer: pl.Trainer, num_layers: int, workers: Sequence[str]
    ) -> Plan:
        """The plan of a run that is not measured: under ``"auto"`` that of the training before.

        Raises:
            PlanError: If the plan does not fit.
        """
        plan = self.given(num_layers, workers) or self._solved.get((num_layers, tuple(workers)))
        return plan or self._even(
            num_layers, workers, f"`trainer.{_name_of(trainer.state.fn)}` does not train"
        )

    def given(self, num_layers: int, workers: Sequence[str]) -> Plan | None:
        """The plan as the user has it; None under ``"auto"``.

        Raises:
            PlanError: If the plan does not fit.
        """
        plan = self.plan
        if plan == "auto" or self._only_measures:
            return None
        if plan == "even":
            plan = even_plan(num_layers, workers)
        elif not isinstance(plan, Plan):
            plan = Plan.from_yaml(plan)
        plan = self._with_micro_batches(plan)
        plan.check(num_layers, workers)
        return plan

    def measured(self, run: ProfilingRun, given: Plan | None) -> Plan:
        """Measure, or read what was measured; take the best plan, or check the given one.

        Raises:
            PlanError: If the model fits on no devices.
            WorkerError: If a worker is lost, or somebody cannot run a layer.
        """
        try:
            self.profile = run.profile()
        except NoSample as reason:
            if self._only_measures:
                raise ProfileError(f"The devices cannot be measured: {reason}.") from reason
            return given or self._even(len(run.layers), run.workers, str(reason))
        if self._only_measures:
            # What Lightning itself ends a run with that was only to try something.
            raise _TunerExitException
        if given is not None:
            self._check(given, self.profile)
            return given
        solution = solve(self.profile, Wishes(micro_batches=self._micro_batches))
        _show(solution)
        self._solved[len(run.layers), tuple(run.workers)] = solution.plan
        return solution.plan

    def _check(self, plan: Plan, profile: Profile) -> None:
        """Say what is wrong with a plan, by what was measured."""
        # A batch of fewer samples than pieces gives fewer pieces.
        pieces = min(plan.micro_batches, profile.batch_size or plan.micro_batches)
        for fault in check_plan(dataclasses.replace(plan, micro_batches=pieces), profile):
            rank_zero_warn(f"By what was measured, the plan cannot run. {fault}")

    def _even(self, num_layers: int, workers: Sequence[str], reason: str) -> Plan:
        rank_zero_info(f"plan='auto' is 'even' here, since nothing can be measured: {reason}")
        return self._with_micro_batches(even_plan(num_layers, workers))

    def _with_micro_batches(self, plan: Plan) -> Plan:
        if self._micro_batches is None:
            return plan
        return dataclasses.replace(plan, micro_batches=self._micro_batches)


def _name_of(function: TrainerFn | None) -> str:
    return "" if function is None else function.value


@rank_zero_only
def _show(solution: Solution) -> None:
    """The verdict, before anything is deployed."""
    Console().print(render(judge(solution)))
