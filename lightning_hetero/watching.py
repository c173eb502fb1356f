"""Watches a run's stages, says when they drift, and finds the plan that would do better."""

from __future__ import annotations

import logging

from .coordinator.deployment import Deployment
from .errors import ModelError
from .pipeline.recorder import Stopwatch
from .plan import COORDINATOR, Plan
from .planner.profile import Profile
from .planner.replan import (
    LEAST_GAIN,
    Drift,
    Replanned,
    StageSeconds,
    Watcher,
    expected_seconds,
    replan,
)

logger = logging.getLogger(__name__)

STEPS_BETWEEN_MOVES = 20
"""Steps that are noted after a move before layers move again."""


# Steps of which somebody has yet to tell; those who have fallen further behind say nothing more.
_MOST_OPEN = 8


class Watch:
    """Follows one deployment from step to step.

    Args:
        deployment: Whose stages say what they take.
        profile: What was measured before the run; None takes the first steady steps for the rule.
        stopwatch: Measures what this process does for a step; None where that cannot be told from
            waiting.
        moves: Whether layers are to move.
        least_steps: So many steps are noted before they do.
    """

    def __init__(
        self,
        deployment: Deployment,
        profile: Profile | None,
        stopwatch: Stopwatch | None,
        moves: bool,
        least_steps: int = 0,
    ) -> None:
        self._deployment = deployment
        self._profile = profile
        self._stopwatch = stopwatch
        self._moves = moves
        self._least_steps = least_steps
        expected = None if profile is None else expected_seconds(deployment.plan, profile)
        if expected is not None and stopwatch is None:
            del expected[COORDINATOR]
        self._watcher = Watcher(expected)
        self._names = {
            number: stage.worker
            for number, stage in enumerate(deployment.plan.remote_stages, start=1)
        }
        # Those behind the workers' run in one action with the head and the loss.
        self._has_first_layers = not deployment.plan.starts_on_worker
        # What is known of steps of which somebody has yet to tell.
        self._steps: dict[int, dict[str, StageSeconds]] = {}
        self._has_drifted = False

    def after_move(self, deployment: Deployment, stopwatch: Stopwatch | None) -> Watch:
        """The watch over the deployment that takes the place of this one."""
        return Watch(deployment, self._profile, stopwatch, self._moves, STEPS_BETWEEN_MOVES)

    def note_own(self) -> None:
        """An optimizer step has ended on this process."""
        if self._stopwatch is None:
            return
        laps = self._stopwatch.take()
        pieces = laps.count("forward")
        if pieces > 0:
            through = (laps.seconds("forward") + laps.seconds("backward")) / pieces
            ends = laps.seconds("loss") / pieces
            own = StageSeconds(through, ends)
            if not self._has_first_layers:
                own = StageSeconds(0, through + ends)
            self._note(self._deployment.coordinator.step, COORDINATOR, own)

    def next_plan(self) -> Plan | None:
        """Between two steps: the plan that is to take the place of the present one, if any."""
        for drift in self._look():
            self._has_drifted = True
            logger.warning("%s %s", drift, self._advice())
        if not (self._has_drifted and self._moves):
            return None
        if self._watcher.num_steps < self._least_steps:
            return None
        self._has_drifted = False
        found = self._better()
        if found is None or not self._can_move(found.plan):
            return None
        self._profile = found.profile or self._profile
        return found.plan

    @property
    def profile(self) -> Profile | None:
        """What was measured, at the present times if layers have moved for these."""
        return self._profile

    @property
    def bottleneck(self) -> str:
        """The slowest stage of the latest steps; empty while that is not known."""
        slowest = self._watcher.slowest()
        numbers = {worker: f"stage {number}" for number, worker in self._names.items()}
        return "" if slowest is None else numbers.get(slowest, slowest)

    def _look(self) -> list[Drift]:
        """What those steps say that everybody has told of."""
        for number, said in self._deployment.coordinator.take_timings():
            if said.num_microbatches > 0:
                seconds = (said.forward_seconds + said.backward_seconds) / said.num_microbatches
                self._note(said.step, self._names[number], StageSeconds(seconds))
        wanted = len(self._names) + (self._stopwatch is not None)
        complete = [step for step, told in sorted(self._steps.items()) if len(told) == wanted]
        drifts = [self._watcher.note(self._steps.pop(step)) for step in complete]
        for step in sorted(self._steps)[:-_MOST_OPEN]:
            del self._steps[step]
        return [drift for drift in drifts if drift is not None]

    def _note(self, step: int, name: str, seconds: StageSeconds) -> None:
        if seconds.total > 0:
            self._steps.setdefault(step, {})[name] = seconds

    def _better(self) -> Replanned | None:
        """A plan that is worth a move, if there is one."""
        found = replan(self._deployment.plan, self._profile, self._watcher.present())
        return found if found is not None and found.is_worth_it else None

    def _can_move(self, plan: Plan) -> bool:
        try:
            self._deployment.check_can_move(plan)
        except ModelError as error:
            logger.warning("Layers cannot move. %s", error)
            return False
        return True

    def _advice(self) -> str:
        found = self._better()
        if found is None:
            return (
                f"Moving layers would not save {LEAST_GAIN:.0%} of the step; see what else runs on "
                "the machine."
            )
        saved = f"about {found.gain:.0%} of the step"
        if self._moves:
            return f"Moving layers is to save {saved}."
        return f"With `replan=True`, moving layers would save {saved}."
