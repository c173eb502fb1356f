"""Moving layers: when to move them, and what moves along.

`Watch` follows the stages of a run. It reports when their first steps contradict the measurements,
and when their speed drifts; it asks `planner.balance` when layers move, and whether the move pays.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from .._lightning import GradientAccumulationScheduler, MisconfigurationException, pl
from ..coordinator.deployment import Deployment
from ..errors import ModelError, MoveUndone
from ..model.tensors import named_tensors
from ..pipeline.placement import Placement
from ..pipeline.recorder import Laps, Recorder
from ..plan import COORDINATOR, Plan
from ..planner.balance import Balance, Judged, moves, seen, why_it_rests
from ..planner.drift import Drift, StageSeconds, Watcher, misjudged
from ..planner.profile import Measured, Profile
from ..planner.replan import LEAST_GAIN, Known, MoveCosts, expected_seconds, replan
from ..units import in_duration

logger = logging.getLogger(__name__)


@contextmanager
def staying_if_undone() -> Iterator[None]:
    """Inside, layers move to save time; if a worker is lost meanwhile, they may stay."""
    try:
        yield
    except MoveUndone as error:
        rank_zero_warn(str(error))


SHARE_OF_MEMORY = 0.8
"""The part of a machine's memory for layers without measurements."""

# A trained parameter comes with its gradient, and mostly with two tensors of the optimizer.
_TIMES_TRAINED = 4


def layer_bytes(deployment: Deployment) -> list[int]:
    """The approximate bytes of each layer of the model in training: weights, gradients, state."""
    found = []
    for layer in deployment.layers:
        tensors = [tensor for _, tensor in named_tensors({0: layer.module})]
        found.append(sum(t.nbytes * (_TIMES_TRAINED if t.requires_grad else 1) for t in tensors))
    return found


def room_bytes(deployment: Deployment) -> Mapping[str, float]:
    """The memory for each process without measurements; processes of one machine share it."""
    connections = deployment.coordinator.connections
    equipment = {worker.name: worker.equipment for worker in connections.workers}
    equipment[COORDINATOR] = connections.equipment
    machines = Counter(each.machine for each in equipment.values())
    return {
        name: SHARE_OF_MEMORY * each.memory_bytes / machines[each.machine]
        for name, each in equipment.items()
    }


def costs_of(deployment: Deployment) -> MoveCosts:
    """The cost of a move of layers, by the facts of the deployment."""
    rate = deployment.bytes_per_second
    return MoveCosts(layer_bytes(deployment), room_bytes(deployment), rate)


def steps_left(trainer: pl.Trainer) -> float:
    """The remaining optimizer steps of a training; infinite if the number is not known."""
    try:
        return max(0.0, trainer.estimated_stepping_batches - trainer.global_step)
    except MisconfigurationException:  # the Trainer accumulates more batches in later epochs
        return math.inf


def most_accumulated(trainer: pl.Trainer) -> int:
    """The most batches that a run will accumulate for an optimizer step."""
    found = [trainer.accumulate_grad_batches]
    callbacks: Sequence[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    end = trainer.max_epochs
    for callback in callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            planned = callback.scheduling.items()
            found += [n for epoch, n in planned if end is None or end < 0 or epoch < end]
    return max(found)


@dataclass
class Horizon:
    """The facts of a run, over all its deployments.

    Args:
        num_batches: The batches of an accumulation window run as one pipeline.
        steps_left: Returns the number of remaining optimizer steps.
        costs_of: Returns the costs of a move from a deployment.
    """

    num_batches: int = 1
    steps_left: Callable[[], float] = lambda: math.inf
    costs_of: Callable[[Deployment], MoveCosts] = lambda deployment: costs_of(deployment)
    _said: set[str] = field(default_factory=set)

    def say_once(self, key: str, text: str) -> None:
        """Say something unless it was said in this run."""
        if key not in self._said:
            self._said.add(key)
            rank_zero_info(text)


# Steps that may wait for the report of a stage; later reports are ignored.
_MOST_OPEN = 8


class Watch:
    """Follows one deployment from step to step.

    Args:
        deployment: Its stages report their times.
        measured: The measurements before the run; without them, the first steady steps are the
            reference for drifts.
        recorder: Sums up this process's own work, if it can be told from waiting.
        moves: Whether layers are to move.
        run: The facts of the run; None if a move is free.
        balance: Decides when layers move; None for a new run.

    Attributes:
        profile: The measurements; after a move, with the times of its cause.
    """

    def __init__(
        self,
        deployment: Deployment,
        measured: Measured | None,
        recorder: Recorder | None,
        moves: bool,
        run: Horizon | None = None,
        balance: Balance | None = None,
    ) -> None:
        self._deployment = deployment
        self.profile = None if measured is None else measured.profile
        self._recorder = recorder
        self._moves = moves
        self._run = run or Horizon()
        self._balance = balance or Balance(deployment.plan)
        expected = None
        if self.profile is not None:
            expected = expected_seconds(deployment.plan, self.profile)
        if expected is not None and recorder is None:
            del expected[COORDINATOR]
        # The reference for the first steady steps; None afterwards.
        self._promised: tuple[Measured, dict[str, float]] | None = None
        if measured is not None and measured.path is not None and expected is not None:
            self._promised = measured, expected
        self._watcher = Watcher(expected)
        # Of a step's micro-batches, the part run by each worker; spares are left out.
        parts = parts_of_workers(deployment.plan, self._run.num_batches)
        self._parts = {name: part for name, part in parts.items() if part > 0}
        # The reports so far for incomplete steps.
        self._steps: dict[int, dict[str, StageSeconds]] = {}

    def after_move(self, deployment: Deployment, recorder: Recorder | None) -> Watch:
        """The watch over the next deployment."""
        # Its profile is scaled to real steps, so they cannot contradict it or its file.
        scaled = None if self.profile is None else Measured(self.profile, None)
        balance = self._balance.after_move(deployment.plan)
        return Watch(deployment, scaled, recorder, self._moves, self._run, balance)

    def note_own(self) -> None:
        """Note this process's own times after an optimizer step."""
        if self._recorder is None:
            return
        laps = self._recorder.take_laps()
        pieces = laps.counts["forward"]
        if pieces > 0:
            own = own_seconds(self._deployment.plan, laps, pieces)
            self._note(self._deployment.coordinator.connections.step, COORDINATOR, own)

    @property
    def present_seconds(self) -> dict[str, StageSeconds]:
        """The seconds of each process in the latest steps; empty while these are too few."""
        return self._watcher.present() if self._watcher.is_steady else {}

    def next_plan(self) -> Plan | None:
        """The plan to move to before the next step; None to stay."""
        judged = self._look()
        self._compare()
        return None if judged is None else self._decided(judged)

    def _decided(self, judged: Judged) -> Plan | None:
        """The plan to which the latest windows lead, if its move is possible and pays."""
        plan, found = self._deployment.plan, judged.change
        if not self._moves:
            self._balance.stay()  # it is said once
        what = seen(plan, judged.seconds)
        if found is None:
            if self._moves and (why := why_it_rests(plan, self._known, judged.seconds)):
                self._run.say_once(why, f"{what}. {why}")
            return None
        gained = (
            f"a step should take {in_duration(found.after_seconds)} instead of "
            f"{in_duration(found.before_seconds)}, {found.gain:.0%} less"
        )
        if not self._moves:
            where = f"with `replan=True` {moves(plan, found.plan)}, and {gained}"
            self._run.say_once("without replan", f"{what}; {where}")
            return None
        costs, left = self._run.costs_of(self._deployment), self._run.steps_left()
        moving_seconds = costs.moving_seconds(plan, found.plan)
        if not found.pays(left, moving_seconds):
            why = (
                f"{what}. Layers stay: the move takes about {in_duration(moving_seconds)}, more "
                f"than the {left:.0f} steps that are left would save"
            )
            self._run.say_once("too late", why)
            return None
        if not self._can_move(found.plan):
            self._balance.stay()
            return None
        rank_zero_info(f"{what}; {moves(plan, found.plan)}, and {gained}")
        self._balance.propose(found)
        if self.profile is not None:
            self.profile = found.profile
        return found.plan

    @contextmanager
    def planning_with(self, profile: Profile | None) -> Iterator[None]:
        """Inside, layers move to a plan made with this profile; the profile then stays."""
        before, self.profile = self.profile, profile
        try:
            yield
        except BaseException:
            self.profile = before
            raise

    @property
    def _known(self) -> Known:
        costs = self._run.costs_of(self._deployment) if self._moves else None
        return Known(self.profile or self._balance.profile, self._run.num_batches, costs)

    @property
    def bottleneck(self) -> str:
        """The stages of the slowest process of the latest steps; empty while it is not known."""
        slowest = self._watcher.slowest()
        if slowest in self._parts:
            stages = Placement.of(self._deployment.plan).stages_of(slowest)
            return f"stage {' and '.join(map(str, stages))}"
        return slowest or ""

    def _located(self, drift: Drift) -> Drift:
        """The drift with the addresses of processes in the place of lost workers."""
        connections = self._deployment.coordinator.connections
        where = {each.name: each.where for each in connections.members}
        stage, slowest = (where.get(name, name) for name in (drift.stage, drift.slowest))
        return dataclasses.replace(drift, stage=stage, slowest=slowest)

    def _look(self) -> Judged | None:
        """The conclusion from the steps reported by every stage; drifts are logged."""
        for name, said in self._deployment.coordinator.stages.take_timings():
            if said.num_microbatches > 0:
                seconds = (said.forward_seconds + said.backward_seconds) / said.num_microbatches
                # As if it had run them all: this shows the process that limits the step.
                self._note(said.step, name, StageSeconds(seconds * self._parts.get(name, 1.0)))
        wanted = len(self._parts) + (self._recorder is not None)
        judged = None
        for step in [step for step, told in sorted(self._steps.items()) if len(told) == wanted]:
            told = self._steps.pop(step)
            if drift := self._watcher.note(told):
                self._balance.note_drift()
                logger.warning("%s %s", self._located(drift), self._advice())
            judged = self._balance.note(told, self._known) or judged
        for step in sorted(self._steps)[:-_MOST_OPEN]:
            del self._steps[step]
        return judged

    def _compare(self) -> None:
        """Compare the first steady steps with the measurements, once."""
        if self._promised is None or not self._watcher.is_steady:
            return
        (measured, expected), self._promised = self._promised, None
        now = {name: stage.total for name, stage in self._watcher.present().items()}
        found = misjudged(now, expected)
        if found is not None:
            # A run with measurements has the profiler.
            from ..profiler.cache import mark_wrong

            logger.warning("%s %s", found, mark_wrong(measured, found))

    def _note(self, step: int, name: str, seconds: StageSeconds) -> None:
        if seconds.total > 0:
            self._steps.setdefault(step, {})[name] = seconds

    def _can_move(self, plan: Plan) -> bool:
        try:
            self._deployment.check_can_move(plan)
        except ModelError as error:
            logger.warning("The layers cannot move. %s", error)
            return False
        return True

    def _advice(self) -> str:
        found = replan(self._deployment.plan, self._known, self._watcher.present())
        if found is None or not found.is_worth_it:
            return (
                f"Moving layers would not save {LEAST_GAIN:.0%} of the step; check what else "
                "runs on the machine."
            )
        saved = f"about {found.gain:.0%} of the step"
        if self._moves:
            return f"Moving layers should save {saved}."
        return f"With `replan=True`, moving layers would save {saved}."


def own_seconds(plan: Plan, laps: Laps, num_pieces: int) -> StageSeconds:
    """The coordinator's seconds for a micro-batch, by its sums over so many of them."""
    total = laps.seconds.total() / num_pieces
    ends = laps.seconds["loss"] / num_pieces
    if plan.own_counts[0] == 0 and not plan.stages[0].is_hosted:
        # Layers after the workers run in one action with the head and the loss.
        ends = total
    return StageSeconds(total - ends, ends)


def parts_of_workers(plan: Plan, num_batches: int) -> dict[str, float]:
    """The part of the micro-batches of a window that each worker runs in its first stage."""
    placement, count = Placement.of(plan), plan.micro_batches * num_batches
    first = {name: placement.stages_of(name)[0] for name in plan.workers}
    return {
        name: sum(placement.process(stage, k) == name for k in range(count)) / count
        for name, stage in first.items()
    }
