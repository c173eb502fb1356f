"""FixedPlan: the user's own plan, as it is for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._lightning import pl
from ..errors import PlanError
from ..model.layers import DecoderLayer
from ..plan import NAMED_PLANS, GivenPlan, Plan
from .deploy import Move, Site
from .training_run import PlanFollower, TrainingRun

if TYPE_CHECKING:
    from ..coordinator.connections import Connections


class FixedPlan:
    """A `PlanSource` with only the user's plan.

    Args:
        plan: A Plan, or the path of its file.
        micro_batches: Pieces of a batch; None takes the plan's number.

    Raises:
        PlanError: If the plan is to be made, or its file is there already and cannot be read.
    """

    profile = None

    def __init__(self, plan: str | Path | Plan, micro_batches: int | None) -> None:
        if plan in NAMED_PLANS:
            raise PlanError(
                f"plan={plan!r} needs `lightning_hetero.replan` and `lightning_hetero.planner`; "
                "this installation lacks them: install the whole package, or give a Plan."
            )
        self._given = GivenPlan(plan, micro_batches)

    def named_workers(self) -> Sequence[str]:
        """The workers in the plan."""
        return self._given.read().workers

    def given(self, num_layers: int, workers: Sequence[str]) -> Plan:
        """The plan; see `PlanSource`."""
        return self._given.fitting(num_layers, workers)

    def measures(self, trainer: pl.Trainer) -> bool:
        """Always False."""
        return False

    def plan_for(
        self,
        site: Site,
        layers: Sequence[DecoderLayer],
        workers: Sequence[str],
        connections: Connections | None,
    ) -> Plan:
        """The plan; see `PlanSource`."""
        return self.given(len(layers), workers)

    def follow(self, run: TrainingRun, site: Site, recovery: Any, move: Move) -> PlanFollower:
        """Leave the plan as it is.

        Raises:
            PlanError: If layers are to move.
        """
        if site.may_move:
            raise PlanError(
                "`replan=True` needs `lightning_hetero.replan` and `lightning_hetero.planner`; "
                "this installation lacks them: install the whole package, or leave `replan` out."
            )
        return Unfollowed(run)


class Unfollowed:
    """A `PlanFollower` without effect: workers neither join nor leave.

    Args:
        run: The training.
    """

    profile = None
    bottleneck = ""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def note_batch(self, count: Callable[[], int | None]) -> None:
        """Do not look at the batch."""

    def note_step(self) -> None:
        """Do not compare times."""

    def after_move(self) -> None:
        """Do not react to the user's own moves."""

    def between_steps(self) -> None:
        """Drop the stages' reports of their speed."""
        self._run.deployment.coordinator.stages.take_timings()
