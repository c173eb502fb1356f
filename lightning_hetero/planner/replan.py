"""Replanning: which layers or shares suit the present speeds of a run's stages.

`replan` keeps the devices and their order. Where stages have replicas, it first tries other shares,
which move no weight; otherwise it moves layers. Whether to replan at all, `drift` says.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from msgspec.structs import replace

from ..errors import PlanError
from ..plan import COORDINATOR, Plan, StagePlan
from .candidates import Candidate, spans_of
from .drift import StageSeconds
from .feasibility import candidate_of, shortages
from .layer_split import best_splits, nowhere_but, only
from .profile import DeviceProfile, Profile
from .replica_search import LEAST_GAIN_OF_CHANGE, moved_layers, with_moved_shares
from .replicas import shares_of
from .search import EXCHANGES_UP_TO, MOST_NEAR_PLAYED

LEAST_GAIN = 0.05
"""Share of the step that a move must save."""


@dataclass(frozen=True)
class Replanned:
    """A plan for the present speeds of the devices.

    Args:
        plan: The plan with other layers or other shares.
        gain: The predicted share of the step that it saves.
        profile: The measurements scaled to the present speeds; None without measurements.
    """

    plan: Plan
    gain: float
    profile: Profile | None

    @property
    def is_worth_it(self) -> bool:
        """Whether the plan saves enough to move layers or change shares."""
        return self.gain >= LEAST_GAIN


def expected_seconds(plan: Plan, profile: Profile) -> dict[str, float] | None:
    """The profile's seconds of each process for a micro-batch, as in `StageSeconds`; None if they
    are not known."""
    try:
        candidate = candidate_of(plan, profile)
    except PlanError:
        return None
    found = candidate.process_seconds
    return found if all(0 < seconds < math.inf for seconds in found.values()) else None


def replan(
    plan: Plan, profile: Profile | None, seconds: Mapping[str, StageSeconds]
) -> Replanned | None:
    """Find the best layers for the plan's stages.

    With a profile, the function scales its times to the present ones, respects the memory, and
    simulates steps. Without one, it takes all layers of a process for equal and minimizes the time
    of the slowest process. Then a coordinator without layers gets none, and a coordinator with the
    last layers keeps them, because their time is not known apart from the head's. A coordinator
    that is missing from ``seconds`` keeps its layers.

    Where a stage has replicas, other shares come first: if they save enough, no layer moves.
    Without a profile nothing but shares changes there, and a coordinator that is a replica keeps
    its share, because its time in the stage is not known apart from its other work.

    Returns:
        None if the layers do not fit the profile.
    """
    if profile is not None:
        expected = expected_seconds(plan, profile)
        if expected is not None:
            profile = scaled(profile, expected, seconds)
            found = best_shares(plan, profile) if plan.has_replicas else None
            if found is not None and found.is_worth_it:
                return found
            return _by_profile(plan, profile, seconds)
    return _shares_by_seconds(plan, seconds) if plan.has_replicas else _by_seconds(plan, seconds)


def best_shares(plan: Plan, profile: Profile) -> Replanned | None:
    """Other shares by the speeds of the profile, changed by one or two micro-batches while the
    simulated step gets shorter; None if they do not fit.

    Raises:
        PlanError: If the profile is not for the plan.
    """
    before = candidate_of(plan, profile)
    anew = [dataclasses.replace(stage, shares=None) for stage in plan.stages]
    best = candidate_of(dataclasses.replace(plan, stages=anew), profile)
    tried = [each for each in (before, best) if not shortages(each)]
    if not tried:
        return None
    best = min(tried, key=_step)
    while True:
        near = sorted(with_moved_shares(best), key=_least)[:MOST_NEAR_PLAYED]
        found = next((other for other in near if _is_better(other, best)), None)
        if found is None:
            break
        best = found
    shares = {stage.layers: stage.shares for stage in best.plan().stages}
    stages = [
        stage if len(stage.workers) < 2 else dataclasses.replace(stage, shares=shares[stage.layers])
        for stage in plan.stages
    ]
    gain = 1 - best.step_seconds / before.step_seconds
    return Replanned(dataclasses.replace(plan, stages=stages), gain, profile)


def _shares_by_seconds(plan: Plan, seconds: Mapping[str, StageSeconds]) -> Replanned:
    """The shares with which the slowest replica of each stage is as fast as possible."""
    numbers = Counter(name for stage in plan.remote_stages for name in stage.workers)
    before = {name: each.total for name, each in seconds.items()}
    after, stages = dict(before), []
    for stage in plan.stages:
        # The time of a worker in one of several stages is not known.
        free = [n for n in stage.remote_workers if n in seconds and numbers[n] == 1]
        known = dict(zip(stage.workers, stage.present_shares, strict=True))
        free = [name for name in free if known[name] > 0]
        if len(free) > 1:
            each = {name: before[name] / known[name] for name in free}
            scale = _finer(plan, sum(known.values()))
            count = scale * sum(known[name] for name in free)
            shares = shares_of(list(each.values()), count, [0.0] * len(free))
            known = {name: scale * share for name, share in known.items()}
            known |= dict(zip(free, shares, strict=True))
            after |= {name: each[name] * known[name] / scale for name in free}
        new = [known[name] for name in stage.workers]
        stages.append(dataclasses.replace(stage, shares=new) if len(free) > 1 else stage)
    gain = 1 - max(after.values()) / max(before.values())
    return Replanned(dataclasses.replace(plan, stages=stages), gain, None)


def _finer(plan: Plan, total: int) -> int:
    """By how much to multiply shares so that a round has about as many micro-batches as a step."""
    return max(1, plan.micro_batches // total)


def _by_profile(
    plan: Plan, profile: Profile, seconds: Mapping[str, StageSeconds]
) -> Replanned | None:
    before = candidate_of(plan, profile)
    best = best_split(before, keeps_own=COORDINATOR not in seconds)
    if best is None:
        return None
    gain = 1 - best.step_seconds / before.step_seconds
    return Replanned(with_ranges(plan, best.ranges_of_teams), gain, profile)


def best_split(before: Candidate, keeps_own: bool) -> Candidate | None:
    """The candidate with the shortest simulated step among splits of the same seats.

    The first ones are exact: those with the fastest slowest stage for each number of the
    coordinator's layers in front. Then layers move between seats while the step gets shorter.

    Args:
        before: The seats, with any layers.
        keeps_own: Whether the coordinator keeps its layers.

    Returns:
        None if the layers fit no split.
    """
    tried = [*_splits(before, keeps_own)]
    if not shortages(before):
        tried.insert(0, before)
    if not tried:
        return None
    best = min(sorted(tried, key=_least)[:MOST_NEAR_PLAYED], key=_step)
    if len(best.workers) <= EXCHANGES_UP_TO:
        best = _descended(best, keeps_own)
    return best


def _descended(best: Candidate, keeps_own: bool) -> Candidate:
    """The candidate to which moves of layers between seats lead while the step gets shorter."""
    while True:
        near = sorted(_with_moved_layers(best, keeps_own), key=_least)[:MOST_NEAR_PLAYED]
        found = next((other for other in near if _is_better(other, best)), None)
        if found is None:
            return best
        best = found


def _least(candidate: Candidate) -> float:
    return candidate.least_seconds


def _step(candidate: Candidate) -> float:
    return candidate.step_seconds


def _is_better(other: Candidate, best: Candidate) -> bool:
    limit = best.step_seconds * (1 - LEAST_GAIN_OF_CHANGE)
    return other.least_seconds < limit and other.is_below(limit) and not shortages(other)


def _splits(before: Candidate, keeps_own: bool) -> Iterator[Candidate]:
    """The exact splits; none if a worker has several seats."""
    if not before.has_lone_seats:
        return
    num_layers, in_flight = before.costs.num_layers, before.in_flight
    own, *workers, behind = before.seats
    ends = before.costs.both_ends(before.size, before.embedding_left)
    seconds = ends.matrix_of((own.option, behind.option), in_flight)
    if keeps_own:
        seconds = only(seconds, (own.layers[1], behind.layers[0]))
    stages = [before.holder(seat).matrix_of(seat.option, in_flight)[None] for seat in workers]
    floor_seconds = max(before.busy_seconds_of_media.values(), default=0.0)
    for front in range(num_layers + 1):
        alone = nowhere_but(front, num_layers + 1)
        splits = best_splits(stages, alone, seconds[front], floor_seconds)
        if math.isfinite(splits.own_seconds[0]):
            bounds = [0, *splits.cuts[0].tolist(), num_layers]
            yield _with_layers(before, list(pairwise(bounds)))


def _with_moved_layers(before: Candidate, keeps_own: bool) -> Iterator[Candidate]:
    """Candidates in which one seat has some layers less and another one more."""
    last = len(before.ranges_of_teams) - 1
    places = range(1, last) if keeps_own else range(int(before.embedding_left), last + 1)
    teams = [[before.seats[0]], *before.teams, [before.seats[-1]]]
    stages = [StagePlan([seat.name for seat in team], team[0].layers) for team in teams]
    for ranges in _moved(stages, before.ranges_of_teams, places):
        yield _with_layers(before, ranges)


def _with_layers(before: Candidate, ranges: Sequence[tuple[int, int]]) -> Candidate:
    """The candidate with the layers of each stage, all replicas alike."""
    teams = [[before.seats[0]], *before.teams, [before.seats[-1]]]
    seats = [
        dataclasses.replace(seat, layers=layers)
        for team, layers in zip(teams, ranges, strict=True)
        for seat in team
    ]
    return dataclasses.replace(before, seats=seats)


def _by_seconds(plan: Plan, seconds: Mapping[str, StageSeconds]) -> Replanned | None:
    """The split with the fastest slowest process, where all layers of a process count as equal."""
    stages = with_both_ends(plan)
    load = Load.of(stages, seconds)
    before = [stage.layers for stage in stages]
    after = load.climbed(before)
    gain = 1 - load.of_processes(after)[0] / load.of_processes(before)[0]
    return Replanned(with_ranges(plan, after), gain, None)


@dataclass(frozen=True)
class Load:
    """The present seconds of the processes of a plan, without a profile.

    Args:
        stages: The plan's stages, with those of the coordinator at both ends.
        layer_seconds: One layer of each process; None for a process that keeps its layers.
        fixed_seconds: What each process has besides layers that may move.
    """

    stages: Sequence[StagePlan]
    layer_seconds: Mapping[str, float | None]
    fixed_seconds: Mapping[str, float]

    @classmethod
    def of(cls, stages: Sequence[StagePlan], seconds: Mapping[str, StageSeconds]) -> Load:
        """The load by the present seconds."""
        # The coordinator's layers behind the workers' run in one action with the head.
        counts: Counter[str] = Counter()
        for stage in stages[:-1]:
            counts[stage.worker] += len(stage.layer_indices)
        each = {
            name: seconds[name].layers / count
            if count and name in seconds and (name != COORDINATOR or seconds[name].layers)
            else None
            for name, count in counts.items()
        }
        fixed = {name: seconds[name].ends if name in seconds else 0.0 for name in counts}
        return cls(stages, each, fixed)

    def of_processes(self, ranges: Sequence[tuple[int, int]]) -> list[float]:
        """The seconds of the processes for a micro-batch, the slowest one first."""
        total = dict(self.fixed_seconds)
        for stage, (first, end) in zip(self.stages[:-1], ranges, strict=False):
            total[stage.worker] += (self.layer_seconds[stage.worker] or 0.0) * (end - first)
        return sorted(total.values(), reverse=True)

    def climbed(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Move layers between stages while the slowest process becomes faster, or as fast processes
        as it become fewer. Where layers are equal this ends at the best split."""
        places = [
            index
            for index, stage in enumerate(self.stages[:-1])
            if self.layer_seconds[stage.worker] is not None
        ]
        best = list(ranges)
        while True:
            found = min(_moved(self.stages, best, places), key=self.of_processes, default=best)
            if self.of_processes(found) >= self.of_processes(best):
                return best
            best = found


def _moved(
    stages: Sequence[StagePlan], ranges: Sequence[tuple[int, int]], places: Sequence[int]
) -> Iterator[list[tuple[int, int]]]:
    """The ranges in which one stage has some layers less and another one more."""
    counts = [end - first for first, end in ranges]
    least = [0 if stage.is_local else 1 for stage in stages]
    return map(spans_of, moved_layers(counts, places, least))


def with_both_ends(plan: Plan) -> list[StagePlan]:
    """The stages with those of the coordinator at both ends, which may be without layers."""
    num_layers = max((stage.layers[1] for stage in plan.stages), default=0)
    own = next((stage for stage in plan.stages if stage.is_local), StagePlan([COORDINATOR], (0, 0)))
    front, behind = (dataclasses.replace(own, layers=(n, n)) for n in (0, num_layers))
    stages = list(plan.stages)
    if not stages or not stages[0].is_local:
        stages.insert(0, front)
    if len(stages) < 2 or not stages[-1].is_local:
        stages.append(behind)
    return stages


def scaled(
    profile: Profile,
    expected: Mapping[str, float],
    seconds: Mapping[str, StageSeconds],
    factor_of_others: float = 1.0,
) -> Profile:
    """The profile with the times of each device as they are at present.

    Args:
        profile: The measurements.
        expected: Their seconds of each process for a micro-batch.
        seconds: The present ones.
        factor_of_others: The factor for devices without present seconds.
    """
    factors = {name: stage.total / expected[name] for name, stage in seconds.items()}
    devices = [
        _slowed(device, factors.get(device.name, factor_of_others)) for device in profile.devices
    ]
    return replace(profile, devices=devices)


def _slowed(device: DeviceProfile, factor: float) -> DeviceProfile:
    timings = [
        replace(
            timing,
            forward_seconds=timing.forward_seconds * factor,
            backward_seconds=timing.backward_seconds * factor,
        )
        for timing in device.timings
    ]
    steps = {part: seconds * factor for part, seconds in device.optimizer_seconds.items()}
    return replace(device, timings=timings, optimizer_seconds=steps)


def with_ranges(plan: Plan, ranges: Sequence[tuple[int, int]]) -> Plan:
    """The plan with the layers of each stage; ``ranges`` has the coordinator's at both ends."""
    own = [bool(plan.stages) and plan.stages[index].is_local for index in (0, -1)]
    was_there = [own[0], *(True for _ in plan.remote_stages), own[1] and len(plan.stages) > 1]
    stages = [
        dataclasses.replace(stage, layers=layers)
        for stage, layers, is_old in zip(with_both_ends(plan), ranges, was_there, strict=True)
        if is_old or layers[0] < layers[1]
    ]
    return dataclasses.replace(plan, stages=stages)
