"""FixedPlan: the plan that the user has written, which nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .._lightning import pl
from ..coordinator.connections import Connections
from ..errors import PlanError
from ..model.layers import DecoderLayer
from ..plan import NAMED_PLANS, GivenPlan, Plan
from .deploy import Move, Site
from .training_run import PlanFollower, TrainingRun


class FixedPlan:
    """A `PlanSource` that only gives the user's plan.

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
        """The workers that the plan names."""
        return self._given.read().workers

    def given(self, num_layers: int, workers: Sequence[str]) -> Plan:
        """The plan; see `PlanSource`."""
        return self._given.fitting(num_layers, workers)

    def measures(self, trainer: pl.Trainer) -> bool:
        """Nothing is measured."""
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
        """Look after nothing.

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
    """A `PlanFollower` that changes nothing: workers neither join nor leave.

    Args:
        run: The training.
    """

    profile = None
    bottleneck = ""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def note_batch(self, count: Callable[[], int | None]) -> None:
        """Every batch is as good."""

    def note_step(self) -> None:
        """No time is compared."""

    def after_move(self) -> None:
        """The user's own moves need nothing."""

    def between_steps(self) -> None:
        """Drop what the stages report of their speed."""
        self._run.deployment.coordinator.stages.take_timings()
