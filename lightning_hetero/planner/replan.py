"""Replanning: layers or shares for the present speeds of a run's stages.

`replan` keeps the devices and their order. For stages with replicas it first tries other shares,
because they do not move weights; otherwise it moves layers. `balance` decides when.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from msgspec.structs import replace

from ..errors import PlanError
from ..pipeline.placement import turns
from ..plan import COORDINATOR, Dtype, Plan
from .candidates import Candidate, spans_of
from .changes import (
    MOST_NEAR_PLAYED,
    descended,
    least_of,
    moved_layers,
    step_of,
    with_moved_shares,
)
from .costs import KEPT_FREE
from .drift import StageSeconds
from .feasibility import candidate_of, shortages, with_both_ends
from .layer_split import best_splits, nowhere_but, only
from .profile import (
    EMBEDDING,
    ENDS,
    HEAD,
    VERSION,
    DeviceProfile,
    LinkSpeed,
    ModelProfile,
    Part,
    Profile,
    Timing,
)

LEAST_GAIN = 0.05
"""Share of the step that a move must save."""

MOST_DESCENDED = 10
"""Workers up to which layers move between seats after the exact splits."""

# The fingerprint of times without measurements.
_SEEN = "timed in the run"
# Unknown links.
_INSTANT = LinkSpeed(latency_seconds=0.0, bytes_per_second=1e18)
# The memory of an unknown process.
_ANY_BYTES = 2**60


@dataclass(frozen=True)
class PlanChange:
    """Another plan.

    Args:
        plan: The plan.
        before_seconds: The predicted step at present.
        after_seconds: The predicted step under the plan.
    """

    plan: Plan
    before_seconds: float
    after_seconds: float

    @property
    def gain(self) -> float:
        """The saved share of the step; negative if the step gets longer."""
        return 1 - self.after_seconds / self.before_seconds

    @property
    def is_worth_it(self) -> bool:
        """Whether the plan saves enough to move layers or change shares."""
        return self.gain >= LEAST_GAIN

    def pays(self, steps_left: float, moving_seconds: float) -> bool:
        """Whether the remaining steps save more seconds than the move takes."""
        return (self.before_seconds - self.after_seconds) * steps_left > moving_seconds


@dataclass(frozen=True)
class Replanned(PlanChange):
    """A plan with other layers or other shares for the present speeds of the devices.

    Args:
        profile: The times of the devices at present.
    """

    profile: Profile


@dataclass(frozen=True)
class MoveCosts:
    """The costs of a move, known without measurements.

    Args:
        layer_bytes: About how many bytes each layer takes in training.
        room_bytes: The bytes for layers on each process.
        bytes_per_second: The rate at which layers come to a process.
    """

    layer_bytes: Sequence[int]
    room_bytes: Mapping[str, float]
    bytes_per_second: float

    def memory_bytes(self, name: str, held: int) -> int:
        """The memory of a process for the planner; its present layers fit in any case."""
        return math.ceil(max(self.room_bytes.get(name, _ANY_BYTES), held, 1) / (1 - KEPT_FREE))

    def moving_seconds(self, before: Plan, after: Plan) -> float:
        """The seconds until every process has its new layers."""
        if before.differs_in_shares_only(after):
            return 0.0
        holders = {n: {*stage.workers} for stage in before.stages for n in stage.layer_indices}
        coming: Counter[str] = Counter()
        for stage in after.stages:
            for number, name in product(stage.layer_indices, stage.workers):
                if name not in holders[number]:
                    coming[name] += self.layer_bytes[number]
        return max(coming.values(), default=0) / self.bytes_per_second


def held_bytes(plan: Plan, layer_bytes: Sequence[int]) -> Counter[str]:
    """The bytes of the layers of each process."""
    held: Counter[str] = Counter()
    for stage in plan.stages:
        for name in stage.workers:
            held[name] += sum(layer_bytes[number] for number in stage.layer_indices)
    return held


@dataclass(frozen=True)
class Known:
    """Knowledge of a run besides the seconds of its processes.

    Args:
        profile: Measurements, or the times with which layers moved before, if any.
        num_batches: The batches of an accumulation window, played as one pipeline.
        costs: The bytes of layers; None counts them as 0.
    """

    profile: Profile | None = None
    num_batches: int = 1
    costs: MoveCosts | None = None

    def at_present(self, plan: Plan, seconds: Mapping[str, StageSeconds]) -> Present:
        """The present times of the plan's devices."""
        expected = None if self.profile is None else expected_seconds(plan, self.profile)
        if self.profile is not None and expected is not None:
            profile = scaled(self.profile, expected, seconds)
            # Times without measurements do not tell its last layers from the head.
            is_seen = profile.model.fingerprint == _SEEN
            return Present(profile, COORDINATOR not in seconds, keeps_last=is_seen)
        return Present.by_seconds(plan, self, seconds)


def expected_seconds(plan: Plan, profile: Profile) -> dict[str, float] | None:
    """The profile's seconds of each process for a micro-batch, as in `StageSeconds`; None if one is
    unknown."""
    try:
        candidate = candidate_of(plan, profile.without_software)
    except PlanError:
        return None
    found = candidate.process_seconds
    return found if all(0 < seconds < math.inf for seconds in found.values()) else None


def replan(plan: Plan, known: Known, seconds: Mapping[str, StageSeconds]) -> Replanned | None:
    """Find the best layers for the plan's stages.

    Times come from the profile, scaled to the present seconds, or from the present seconds alone;
    see `Present`. The function respects the memory and simulates steps. With replicas it tries
    other shares first: if they save enough, all layers stay.

    Returns:
        None if the layers do not fit.
    """
    present = known.at_present(plan, seconds)
    found = best_shares(plan, present.profile) if plan.has_replicas else None
    if found is None or not found.is_worth_it:
        before = candidate_of(plan, present.profile)
        best = best_split(before, present.keeps_own, present.keeps_last)
        if best is not None:
            plan = with_ranges(plan, best.ranges_of_teams)
            found = Replanned(plan, before.step_seconds, best.step_seconds, present.profile)
    return found


def share_saved(
    other: Plan, plan: Plan, known: Known, seconds: Mapping[str, StageSeconds]
) -> float:
    """The share that another plan saves: of the step or of the slowest process, the lesser one.

    A step may also get shorter because the pipeline fills sooner; this alone is too little to move
    layers of equally slow stages.
    """
    profile = known.at_present(plan, seconds).profile
    before, after = (candidate_of(each, profile) for each in (plan, other))
    slowest = after.bottleneck_seconds / before.bottleneck_seconds
    return 1 - max(after.step_seconds / before.step_seconds, slowest)


def best_shares(plan: Plan, profile: Profile) -> Replanned | None:
    """The plan with shares by the speeds of the profile, changed by one or two micro-batches while
    the simulated step gets shorter; None if old and new shares do not fit.

    Raises:
        PlanError: If the profile is not for the plan.
    """
    before = candidate_of(plan, profile)
    anew = [dataclasses.replace(stage, shares=None) for stage in plan.stages]
    best = candidate_of(dataclasses.replace(plan, stages=anew), profile)
    tried = [each for each in (before, best) if not shortages(each)]
    if not tried:
        return None
    best = descended(min(tried, key=step_of), with_moved_shares)
    shares = {stage.layers: stage.shares for stage in best.plan().stages}
    stages = [
        stage if len(stage.workers) < 2 else dataclasses.replace(stage, shares=shares[stage.layers])
        for stage in plan.stages
    ]
    plan = dataclasses.replace(plan, stages=stages)
    return Replanned(plan, before.step_seconds, best.step_seconds, profile)


def best_split(before: Candidate, keeps_own: bool, keeps_last: bool = False) -> Candidate | None:
    """The candidate with the shortest simulated step among splits of the same seats.

    The first splits are exact: they have the fastest slowest stage for each number of the
    coordinator's layers in front. Then layers move between seats while the step gets shorter.

    Args:
        before: The seats, with any layers.
        keeps_own: Whether the coordinator keeps its layers.
        keeps_last: Whether the number of its layers after the workers' stays, also if it is 0.

    Returns:
        None without a split that fits.
    """
    tried = [*_splits(before, keeps_own, keeps_last)]
    if not shortages(before):
        tried.insert(0, before)
    if not tried:
        return None
    best = min(sorted(tried, key=least_of)[:MOST_NEAR_PLAYED], key=step_of)
    if len(best.workers) > MOST_DESCENDED:
        return best
    return descended(best, lambda each: _with_moved_layers(each, keeps_own, keeps_last))


def _splits(before: Candidate, keeps_own: bool, keeps_last: bool) -> Iterator[Candidate]:
    """The exact splits; empty if a worker has several seats or a stage has replicas."""
    if not before.has_lone_seats:
        return
    num_layers, in_flight = before.costs.num_layers, before.in_flight
    own, *workers, behind = before.seats
    ends = before.costs.both_ends(before.size, before.left)
    seconds = ends.matrix_of((own.option, behind.option), in_flight)
    if keeps_own:
        seconds = only(seconds, (own.layers[1], behind.layers[0]))
    elif keeps_last:
        is_kept = np.arange(seconds.shape[1]) == behind.layers[0]
        seconds = np.where(is_kept, seconds, np.inf)
    stages = [before.holder(seat).matrix_of(seat.option, in_flight)[None] for seat in workers]
    floor_seconds = max(before.busy_seconds_of_media.values(), default=0.0)
    for front in range(num_layers + 1):
        alone = nowhere_but(front, num_layers + 1)
        splits = best_splits(stages, alone, seconds[front], floor_seconds)
        if math.isfinite(splits.own_seconds[0]):
            bounds = [0, *splits.cuts[0].tolist(), num_layers]
            yield _with_layers(before, list(pairwise(bounds)))


def _with_moved_layers(before: Candidate, keeps_own: bool, keeps_last: bool) -> Iterator[Candidate]:
    """Candidates with some layers less in one stage and more in another."""
    last = len(before.ranges_of_teams) - 1
    first = 1 if keeps_own else int(before.left.embedding)
    places = range(first, last + (not keeps_own and not keeps_last and not before.left.head))
    counts = [end - start for start, end in before.ranges_of_teams]
    for moved in moved_layers(counts, places, places):
        if min(moved[1:-1], default=1) > 0:
            other = _with_layers(before, spans_of(moved))
            if other.least_seconds < before.step_seconds and not shortages(other):
                yield other


def _with_layers(before: Candidate, ranges: Sequence[tuple[int, int]]) -> Candidate:
    """The candidate with the layers of each stage, all replicas alike."""
    teams = [[before.seats[0]], *before.teams, [before.seats[-1]]]
    seats = [
        dataclasses.replace(seat, layers=layers)
        for team, layers in zip(teams, ranges, strict=True)
        for seat in team
    ]
    return dataclasses.replace(before, seats=seats)


# The seconds of a layer on a spare replica, so large that it gets no share.
_SPARE_SECONDS = 1e6
# The part of the forward in a layer's seconds; the backward takes twice as long as a forward.
_FORWARD, _FORWARD_OF_RECOMPUTED = 1 / 3, 1 / 4


@dataclass(frozen=True)
class Present:
    """The present times of a plan's devices.

    Args:
        profile: The times.
        keeps_own: Whether the coordinator keeps its layers, because their time is not known.
        keeps_last: Whether it keeps its layers after the workers'.
    """

    profile: Profile
    keeps_own: bool
    keeps_last: bool

    @classmethod
    def by_seconds(cls, plan: Plan, known: Known, seconds: Mapping[str, StageSeconds]) -> Present:
        """The times without measurements.

        All layers of a process count as equal. Links take 0 seconds, so new stages are not added.
        The time of layers is unknown for a coordinator without timings, without layers, or with
        only the last layers, because these run in one action with the head.
        """
        run = _layers_run(plan, plan.micro_batches * known.num_batches)
        each = {n: s.layers / run[n] for n, s in seconds.items() if run[n] and s.layers}
        own, num_own = seconds.get(COORDINATOR, StageSeconds(0.0)), run[COORDINATOR]
        if len(plan.stages) > 1 and plan.stages[-1].is_local:
            num_own += len(plan.stages[-1].layer_indices)
        head_seconds = own.total - num_own * each.get(COORDINATOR, 0.0)
        if head_seconds < 0:  # its last layers take less than the first ones
            each[COORDINATOR], head_seconds = own.total / num_own, 0.0
        costs = known.costs or MoveCosts([0] * plan.stages[-1].layers[1], {}, math.inf)
        kinds = {f"layer of {size} bytes": size for size in costs.layer_bytes}
        parts = [Part(name, size) for name, size in (kinds | dict.fromkeys(ENDS, 0)).items()]
        layers, held = (
            [f"layer of {n} bytes" for n in costs.layer_bytes],
            held_bytes(plan, costs.layer_bytes),
        )
        devices = []
        for name in (COORDINATOR, *plan.workers):
            ends = [Timing(EMBEDDING, 1, 0.0, 0.0)]
            if name == COORDINATOR:
                ends.append(_timing(HEAD, head_seconds))
            layer_seconds = each.get(name, 0.0 if name == COORDINATOR else _SPARE_SECONDS)
            ways = _ways(plan, name)
            timings = [_timing(kind, layer_seconds, *way) for kind in kinds for way in ways]
            memory_bytes = costs.memory_bytes(name, held[name])
            devices.append(DeviceProfile(name, _SEEN, memory_bytes, timings=[*ends, *timings]))
        profile = Profile(
            VERSION,
            ModelProfile(_SEEN, layers, parts, 1, 0, 0),
            devices,
            default_link=_INSTANT,
            batch_size=plan.micro_batches,
            accumulate_grad_batches=known.num_batches,
        )
        return cls(profile, COORDINATOR not in each, keeps_last=True)


def _ways(plan: Plan, name: str) -> set[tuple[Dtype, bool]]:
    """The dtype and the recomputation of each stage of a process."""
    stages = [stage for stage in plan.stages if name in stage.workers]
    return {(stage.dtype or "float32", bool(stage.recompute)) for stage in stages}


def _timing(part: str, seconds: float, dtype: Dtype = "float32", recompute: bool = False) -> Timing:
    """A timing of this many seconds for forward and backward."""
    forward = seconds * (_FORWARD_OF_RECOMPUTED if recompute else _FORWARD)
    return Timing(part, 1, forward, seconds - forward, dtype=dtype, recompute=recompute)


def _layers_run(plan: Plan, num_microbatches: int) -> Counter[str]:
    """The layers that each process runs of a micro-batch, on average over all micro-batches.

    This leaves out the coordinator's layers after the workers', because they run in one action with
    the head.
    """
    found: Counter[str] = Counter()
    for stage in with_both_ends(plan)[:-1]:
        last = stage.workers.index(COORDINATOR) if stage.is_hosted else None
        taken = turns(stage.present_shares, num_microbatches, last)
        for index, name in enumerate(stage.workers):
            part = taken.count(index) / num_microbatches
            found[name] += len(stage.layer_indices) * part  # type: ignore[assignment]
    return found


def scaled(
    profile: Profile,
    expected: Mapping[str, float],
    seconds: Mapping[str, StageSeconds],
    factor_of_others: float = 1.0,
) -> Profile:
    """The profile with the present times of each device.

    Args:
        profile: The measurements.
        expected: The measured seconds of each process for a micro-batch.
        seconds: The present seconds.
        factor_of_others: The factor for devices without present seconds.
    """
    factors = {name: stage.total / expected[name] for name, stage in seconds.items()}
    devices = [
        _slowed(device, factors.get(device.name, factor_of_others)) for device in profile.devices
    ]
    return replace(profile, devices=devices)


def _slowed(device: DeviceProfile, factor: float) -> DeviceProfile:
    timings = [timing.slowed(factor) for timing in device.timings]
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
