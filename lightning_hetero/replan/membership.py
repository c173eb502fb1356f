"""Workers join a training between two steps, and leave it.

    waits at the door, or is free ─▶ admitted ─▶ known or measured ─▶ gets layers: a member
                                                     └ the step does not get 5 % shorter: a spare
    its owner sends SIGTERM ─▶ others get its layers ─▶ goodbye
    lost, and another machine serves for it too ─▶ all remaining machines share its layers

`planner.membership` decides the next plan. Layers move as for `replan=True`. `Replanner` looks
after all changes of a plan between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_info

from ..coordinator.deployment import Deployment
from ..coordinator.member import Member
from ..errors import HeteroError, PlanError, WorkerUnreachable
from ..events import Departed, Entered
from ..plan import Plan
from ..planner.drift import StageSeconds
from ..planner.membership import (
    at_present,
    fits,
    gathered,
    in_place,
    joined,
    left,
    left_by_bytes,
)
from ..planner.profile import Measured, Profile
from ..planner.replan import LEAST_GAIN, PlanChange
from ..protocol import messages as m
from ..recovery import Recovery, too_few
from ..units import in_bytes
from .watch import (
    SHARE_OF_MEMORY,
    Horizon,
    Watch,
    layer_bytes,
    most_accumulated,
    room_bytes,
    staying_if_undone,
    steps_left,
)
from .window_warning import WindowWarning

if TYPE_CHECKING:
    from ..profiler.profiling_run import Newcomers
    from ..strategy.deploy import Move, Site
    from ..strategy.training_run import TrainingRun


@dataclass(frozen=True)
class Terms:
    """The terms for changes of a plan, and for workers to join and leave.

    Args:
        joins: Whether workers join: the plan is the strategy's own, or may change.
        recovery: How the run gets over lost workers, if it does.
        measured: The profile of the run, and its file, if there are measurements.
        newcomers: The measurements for new workers, if there are measurements.
    """

    joins: bool
    recovery: Recovery | None
    measured: Measured | None
    newcomers: Newcomers | None


@dataclass
class Membership:
    """Lets workers join a training, and leave it.

    Args:
        site: The module and the workers.
        terms: The workers' rights to join and leave.
        run: The plan of the training.
        move: Moves layers to where a plan has them.
    """

    site: Site
    terms: Terms
    run: Replanner
    move: Move
    # The workers looked at under the present plan.
    _looked_at: set[str] = field(default_factory=set)
    _plan: Plan | None = None
    # The workers leaving with the end of the run.
    _staying: set[Member] = field(default_factory=set)
    # The lost workers looked at, each with the worker on the machine that serves for it.
    _served_for: dict[str, str] = field(default_factory=dict)

    def act(self) -> None:
        """Between two steps, let workers go if their owners want that, and take in others.

        Raises:
            WorkerError: If a needed worker is lost.
        """
        if self.run.deployment.coordinator.connections.is_ending():
            return
        for worker in self._leaving:
            with staying_if_undone():
                self._let_go(worker)
        with staying_if_undone():
            self._gather()
        if not self.terms.joins:
            if self.terms.recovery is not None:
                self._waiting()  # says to each spare that it is one
            return
        if self.run.deployment.plan is not self._plan:
            self._plan = self.run.deployment.plan
            self._looked_at.clear()
        for name in self._waiting():
            if name not in self._looked_at:
                self._looked_at.add(name)
                self._look_at(name)

    @property
    def _leaving(self) -> list[Member]:
        """The workers to let go before the next step."""
        members = self.run.deployment.coordinator.connections.members
        return [each for each in members if each.row.is_leaving and each not in self._staying]

    def _waiting(self) -> list[str]:
        """The workers that could get layers: members without any, and free workers."""
        members = self.run.deployment.coordinator.connections.members
        staying = [worker for worker in members if not worker.row.is_leaving]
        idle = [worker.name for worker in staying if not worker.stages]
        used = {name for worker in members for name in (worker.name, worker.row.own_name)}
        return [*idle, *self.site.fleet.waiting(used, len(staying))]

    # joining

    def _look_at(self, name: str) -> None:
        """Take a worker in if the step gets shorter by that."""
        if self.run.profile is None:
            rank_zero_info(
                f"{name} stays a spare: nothing was measured, so nobody knows what it would save; "
                "measure with plan='auto', or with the callback `PipelineProfiler`"
            )
            return
        worker = self._admit(name)
        if worker is None:
            return
        with self._trying(worker):
            profile = self._profile_with(worker, self.run.profile)
            if profile is None:
                rank_zero_info(
                    f"{name} stays a spare: nothing is known of its speed, and the profile of this "
                    "run was read from a file; the next start measures it"
                )
                return
            plan, keeps_own = self.run.deployment.plan, self.run.keeps_own_layers
            profile = at_present(plan, profile, self.run.present_seconds)
            change = joined(plan, profile, name, keeps_own)
            if change is None or not change.is_worth_it:
                rank_zero_info(f"{name} stays a spare: {_why_not(change)}")
                return
            rank_zero_info(
                f"{name} joins the run from step {self._next_step} on: a step should take "
                f"{change.after_seconds:.3g} s instead of {change.before_seconds:.3g} s"
            )
            self._begin_with(worker, change.plan, profile)

    def _admit(self, name: str) -> Member | None:
        """The worker of a name, connected, if it still answers."""
        connections = self.run.deployment.coordinator.connections
        known = next((each for each in connections.members if each.name == name), None)
        try:
            return known or connections.admit(name)
        except WorkerUnreachable as error:
            rank_zero_info(f"{name} stays a spare: {error}")
            return None

    @contextmanager
    def _trying(self, worker: Member) -> Iterator[None]:
        """Inside, a worker may get layers; afterwards it is let go if it has just come in vain.

        An error of this worker alone ends here.
        """
        coordinator = self.run.deployment.coordinator
        try:
            yield
        except HeteroError as error:
            if coordinator.connections.lost is not None or coordinator.layers.is_between_plans:
                raise
            rank_zero_info(f"{worker.name} stays a spare: {error}")
        finally:
            if worker not in coordinator.layers.deployed:
                coordinator.connections.release(worker)

    def _profile_with(self, worker: Member, profile: Profile) -> Profile | None:
        """The profile with a worker, if its speed is known."""
        name, coordinator = worker.name, self.run.deployment.coordinator
        if worker in coordinator.layers.deployed:
            # It can be measured before it gets any layers only.
            return profile if name in profile.workers else None
        newcomers = self.terms.newcomers
        if newcomers is None:
            return None
        return newcomers.profile_with(coordinator.connections, worker, profile)

    def _begin_with(self, worker: Member, plan: Plan, profile: Profile | None) -> None:
        """Move layers to a worker; it is a member from the next step on."""
        connections = self.run.deployment.coordinator.connections
        is_new = worker not in self.run.deployment.coordinator.layers.deployed
        with self.run.planning_with(profile):
            self.move(plan)
        if is_new and connections.step:
            connections.send(worker, m.Replay(connections.step, has_more=False))
        self._note_members()
        self._publish(Entered(worker.name, self._next_step))

    # leaving

    def _let_go(self, worker: Member) -> None:
        """Let others take the layers of a leaving worker, and say goodbye to it."""
        reason = self._why_to_stay()
        if not reason and worker.stages:
            reason = self._hand_over(worker)
        if reason:
            self._staying.add(worker)
            rank_zero_info(f"{worker.name} ends after the run: {reason}")
            return
        rank_zero_info(f"{worker.name} {self._departure}")
        self._say_goodbye(worker)

    @property
    def _departure(self) -> str:
        """The fate of a worker leaving now, after its name."""
        return f"has left the run before step {self._next_step}"

    def _say_goodbye(self, worker: Member) -> None:
        """Let a worker without layers go."""
        connections = self.run.deployment.coordinator.connections
        connections.release(worker, self._departure)
        self._note_members()
        self._publish(Departed(worker.name, self._next_step))

    def _why_to_stay(self) -> str:
        """Why workers cannot leave before the end of the run; empty if they can."""
        if self.terms.recovery is None:
            return "layers are handed over with `recovery=True` only"
        if not self.site.module.automatic_optimization:
            return "layers do not move under manual optimization"
        return ""

    def _hand_over(self, worker: Member) -> str:
        """Move the layers of a worker to others; returns why others cannot take them."""
        for name in self._waiting():
            if self._replace(worker, name):
                return ""
        found = self._plan_without(self.run.deployment.plan, worker)
        if isinstance(found, str):
            return found
        for other in self._leaving:  # so that it does not get layers in order to give them away
            further = self._plan_without(found, other)
            found = found if isinstance(further, str) else further
        self.move(found)
        return ""

    def _plan_without(self, plan: Plan, worker: Member) -> Plan | str:
        """A plan without a worker, or the reason against one."""
        run, recovery, name = self.run, self.terms.recovery, worker.name
        others = {*plan.workers} - {name}
        if recovery is not None and (missing := too_few(others, recovery.least_workers)):
            return missing
        if run.profile is None:
            found = left_by_bytes(
                plan, name, layer_bytes(run.deployment), room_bytes(run.deployment)
            )
        else:
            try:
                profile = at_present(run.deployment.plan, run.profile, run.present_seconds)
                change = left(plan, profile, name, run.keeps_own_layers)
            except PlanError as error:
                return str(error)
            found = None if change is None else change.plan
        return found or "no other worker can take its layers"

    def _replace(self, worker: Member, name: str) -> bool:
        """Give all layers of a worker to an idle one; returns whether that was possible."""
        plan = in_place(self.run.deployment.plan, worker.name, name)
        other = self._admit(name)
        if other is None:
            return False
        with self._trying(other):
            profile = None
            if self.run.profile is not None:
                profile = self._profile_with(other, self.run.profile)
            lack = self._lack_of(other, worker, plan, profile)
            if lack:
                rank_zero_info(f"{name} cannot take the layers of {worker.name}: {lack}")
            else:
                rank_zero_info(f"{name} gets the layers of {worker.name}")
                self._begin_with(other, plan, profile or self.run.profile)
                return True
        return False

    def _lack_of(self, other: Member, worker: Member, plan: Plan, profile: Profile | None) -> str:
        """The memory missing on an idle worker for a worker's layers; empty if it has enough."""
        if profile is not None:
            return "" if fits(plan, profile) else "by what was measured, they do not fit there"
        needed, each = 0, layer_bytes(self.run.deployment)
        for stage in self.run.deployment.plan.remote_stages:
            if worker.name in stage.workers:
                needed += sum(each[number] for number in stage.layer_indices)
        coordinator = self.run.deployment.coordinator
        free = SHARE_OF_MEMORY * other.equipment.memory_bytes
        if other not in coordinator.layers.deployed:
            free = coordinator.connections.requests.describe(other).free_bytes
        if needed <= free:
            return ""
        return f"they need about {in_bytes(needed)}, and it has {in_bytes(free)}"

    # fewer machines

    def _gather(self) -> None:
        """Share the layers of lost workers, served by other machines beside their own layers, over
        all remaining machines, if this shortens the step."""
        connections = self.run.deployment.coordinator.connections
        homes = {each.address: each.name for each in connections.members if not each.row.is_beside}
        beside = [each for each in connections.members if each.row.is_beside]
        hosts = {each.name: homes[each.address] for each in beside if each.address in homes}
        if hosts == self._served_for:
            return
        self._served_for = hosts
        plan = self.run.deployment.plan
        hosts = {name: host for name, host in hosts.items() if name in plan.workers}
        if not hosts or not self.site.module.automatic_optimization:
            return
        lost = " and ".join(hosts)
        try:
            change = self._gathered(hosts)
        except PlanError as error:
            rank_zero_info(f"the layers of {lost} stay where they are: {error}")
            return
        if change is None or not change.is_worth_it:
            rank_zero_info(
                f"the layers of {lost} stay with {' and '.join(hosts.values())}: no plan over the "
                f"machines that are left shortens the step by {LEAST_GAIN:.0%}"
            )
            return
        rank_zero_info(
            f"from step {self._next_step} on the run does without {lost}: a step should take "
            f"{change.after_seconds:.3g} s instead of {change.before_seconds:.3g} s"
        )
        self.move(change.plan)
        for worker in [each for each in connections.members if each.name in hosts]:
            self._say_goodbye(worker)

    def _gathered(self, hosts: Mapping[str, str]) -> PlanChange | None:
        """The plan over the remaining machines.

        Raises:
            PlanError: Without measurements, or if the profile is not for the plan.
        """
        plan, run = self.run.deployment.plan, self.run
        if run.profile is None:
            raise PlanError("Nothing was measured, so nobody knows what another plan would save.")
        # The present seconds are of two processes on one machine, so they do not show each one's
        # speed.
        return gathered(plan, run.profile, hosts, run.keeps_own_layers)

    @property
    def _next_step(self) -> int:
        return self.run.deployment.coordinator.connections.step + 1

    def _note_members(self) -> None:
        members = self.run.deployment.coordinator.connections.members
        self.site.fleet.note_members([worker.name for worker in members])

    def _publish(self, event: Entered | Departed) -> None:
        self.run.deployment.coordinator.observers.publish(event)


def _why_not(change: PlanChange | None) -> str:
    if change is None:
        return "no plan gives it layers that fit"
    return (
        f"with it a step should take {change.after_seconds:.3g} s instead of "
        f"{change.before_seconds:.3g} s, and layers move for {LEAST_GAIN:.0%} of it or more"
    )


class Replanner:
    """Looks after the plan of one training; see `PlanFollower`.

    Args:
        run: The training.
        site: Its module and workers, and how the run gets over faults.
        terms: The measurements, and the workers' rights to join and leave.
        move: Moves layers to where a plan has them.
    """

    def __init__(
        self,
        run: TrainingRun,
        site: Site,
        terms: Terms,
        move: Move,
    ) -> None:
        self._run = run
        self._move = move
        trainer, plan = site.module.trainer, run.deployment.plan
        accumulated = most_accumulated(trainer) if site.cuts_step else 1
        horizon = Horizon(accumulated, partial(steps_left, trainer))
        moves = site.moves_layers()
        self._watch = Watch(run.deployment, terms.measured, run.recorder, moves, horizon)
        # A sequence gives all slices, however few samples a batch has.
        counted = replace(plan, micro_batches=1) if site.slices_tokens else plan
        self._warning = WindowWarning(trainer, counted, site.cuts_step, self.profile)
        self._membership = Membership(site, terms, self, move)

    @property
    def deployment(self) -> Deployment:
        """Where the layers are now."""
        return self._run.deployment

    @property
    def profile(self) -> Profile | None:
        """The measured times of the deployment, if they are known."""
        return self._watch.profile

    @property
    def bottleneck(self) -> str:
        """The stages of the slowest process, in words; empty while it is not known."""
        return self._watch.bottleneck

    @property
    def present_seconds(self) -> dict[str, StageSeconds]:
        """The seconds of each process in the latest steps; empty while these are too few."""
        return self._watch.present_seconds

    @property
    def keeps_own_layers(self) -> bool:
        """Whether the time of this process's own layers is not known; then they stay here."""
        return self._run.recorder is None

    def planning_with(self, profile: Profile | None) -> AbstractContextManager[None]:
        """See `Watch.planning_with`."""
        return self._watch.planning_with(profile)

    def note_batch(self, count: Callable[[], int | None]) -> None:
        """Warn of a first batch that is too small for the pipeline."""
        self._warning.note_batch(count)

    def note_step(self) -> None:
        """Note this process's own times after an optimizer step."""
        self._watch.note_own()

    def after_move(self) -> None:
        """Follow the deployment from here on."""
        self._watch = self._watch.after_move(self._run.deployment, self._run.recorder)

    def between_steps(self) -> None:
        """Move layers if that is worth it, and let workers join and leave.

        Raises:
            WorkerError: If a needed worker is lost.
        """
        plan = self._watch.next_plan()
        if plan is not None:
            with staying_if_undone():
                self._move(plan)
        self._membership.act()
