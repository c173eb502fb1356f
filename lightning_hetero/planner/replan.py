"""Replanning: whether a run's stages have drifted from the plan, and which layers suit them now.

`misjudged` compares the first steps with the measurements on which the plan is based.

A `Watcher` looks at the slowest stage, because that one limits the step. It takes medians over some
steps, because one slow step means nothing. A drift has to last twice as long as the longest one
that has ended by itself, because on some machines other programs come and go all the time. It
ignores changes common to all stages, because longer sequences slow all of them alike. `replan`
keeps the devices and their order. Where stages have replicas, it first tries other shares, which
move no weight; otherwise it moves layers.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from msgspec.structs import replace

from ..errors import PlanError
from ..plan import COORDINATOR, Plan, StagePlan
from .candidates import Candidate, spans_of
from .feasibility import candidate_of, shortages
from .layer_split import best_splits, nowhere_but, only
from .profile import DeviceProfile, Profile
from .replica_search import LEAST_GAIN_OF_CHANGE, moved_layers, with_moved_shares
from .replicas import shares_of
from .search import EXCHANGES_UP_TO, MOST_NEAR_PLAYED

THRESHOLD = 0.2
"""Share by which the slowest stage must become slower or faster to count as drifted."""

WARM_UP = 2
"""Steps at the start that are ignored."""

WINDOW = 5
"""Steps over which the median is taken."""

SUSTAINED = 8
"""Steps for which a drift must last; with the window, the tenth slow step reports it."""

MOST_SUSTAINED = 40
"""The most steps for which a drift must last where earlier ones have ended by themselves."""

SETTLED = 30
"""Steps by the end of which a run without measurements has its usual speed."""

MISJUDGED = 1.5
"""Factor by which a device must differ from its measurements for these to be doubted."""

LEAST_GAIN = 0.05
"""Share of the step that a move must save."""


@dataclass(frozen=True)
class StageSeconds:
    """The seconds for which a stage computes on one micro-batch.

    A replica's seconds are those of a step divided by all micro-batches of the step, also those
    that others run. So the slowest process is the one that limits the step.

    Args:
        layers: Forward and backward of its layers.
        ends: The head and the loss, on the coordinator. A coordinator without the first layers
            counts everything here.
    """

    layers: float
    ends: float = 0.0

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.layers + self.ends


@dataclass(frozen=True)
class Drift:
    """A lasting change.

    Args:
        stage: The stage that changed most.
        seconds: Its present seconds for a micro-batch.
        expected_seconds: Its expected seconds.
        slowest: The slowest stage at present.
    """

    stage: str
    seconds: float
    expected_seconds: float
    slowest: str

    def __str__(self) -> str:
        is_slower = self.seconds > self.expected_seconds
        ratio = self.seconds / self.expected_seconds
        return (
            f"{self.stage} has become {'slower' if is_slower else 'faster'}: a micro-batch takes "
            f"it {_milliseconds(self.seconds)}, {ratio:.2g} times the expected "
            f"{_milliseconds(self.expected_seconds)}. The slowest stage is {self.slowest}."
        )


class Watcher:
    """Decides whether the slowest stage has drifted.

    Args:
        expected: Planned seconds of each stage for a micro-batch; None takes those of the first
            steady steps.
        threshold: Share by which the slowest stage must change.

    Attributes:
        num_steps: Number of steps noted.
    """

    def __init__(
        self, expected: Mapping[str, float] | None = None, threshold: float = THRESHOLD
    ) -> None:
        self._expected = expected
        self._was_promised = expected is not None
        self._threshold = threshold
        self._recent: deque[Mapping[str, StageSeconds]] = deque(maxlen=WINDOW)
        self._num_off = 0
        # The most steps for which a drift has lasted that was not there to stay.
        self._longest_off = 0
        self._told_at = -MOST_SUSTAINED
        self.num_steps = 0

    def note(self, seconds: Mapping[str, StageSeconds]) -> Drift | None:
        """Note the seconds of a step.

        Returns:
            The drift, reported once; afterwards the present seconds are the expected ones.
        """
        self.num_steps += 1
        if self.num_steps <= WARM_UP:
            return None
        self._recent.append(seconds)
        if len(self._recent) < WINDOW:
            return None
        now = {name: stage.total for name, stage in self.present().items()}
        if self._expected is None:
            self._expected = now
        is_off = abs(_drift(now, self._expected)) > self._threshold
        if not is_off:
            self._longest_off = max(self._longest_off, self._num_off)
        self._num_off = self._num_off + 1 if is_off else 0
        if self._num_off < min(max(SUSTAINED, 2 * self._longest_off), MOST_SUSTAINED):
            return None
        drift = _describe(now, self._expected)
        is_faster = drift.seconds < drift.expected_seconds
        self._expected, self._num_off = now, 0
        if is_faster and not self._was_promised and self.num_steps <= SETTLED:
            return None  # the first steps were slow, as they mostly are
        if self.num_steps - self._told_at < MOST_SUSTAINED:
            self._longest_off = max(self._longest_off, self.num_steps - self._told_at)
        self._told_at = self.num_steps
        return drift

    @property
    def is_steady(self) -> bool:
        """Whether the medians are over as many steps as they should be."""
        return len(self._recent) == WINDOW

    def slowest(self) -> str | None:
        """The slowest stage at present; None before the first steady step."""
        if not self._recent:
            return None
        present = self.present()
        return max(present, key=lambda name: present[name].total)

    def present(self) -> dict[str, StageSeconds]:
        """The median seconds of each stage over the latest steps."""
        return {
            name: StageSeconds(
                statistics.median(step[name].layers for step in self._recent),
                statistics.median(step[name].ends for step in self._recent),
            )
            for name in self._recent[-1]
        }


def _drift(now: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """The share by which the slowest stage is slower than expected; negative if faster."""
    common = _common(now, expected)
    return max(now.values()) / common / max(expected[name] for name in now) - 1


def _common(now: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """The factor by which all stages have changed alike."""
    ratios = [seconds / expected[name] for name, seconds in now.items()]
    return min(max(1.0, min(ratios)), max(ratios))


def _describe(now: Mapping[str, float], expected: Mapping[str, float]) -> Drift:
    most_changed = max if _drift(now, expected) > 0 else min
    stage = most_changed(now, key=lambda name: now[name] / expected[name])
    return Drift(stage, now[stage], expected[stage], max(now, key=lambda name: now[name]))


@dataclass(frozen=True)
class Misjudged:
    """Devices that real steps contradict.

    Args:
        seconds: The real seconds of every device for a micro-batch.
        expected_seconds: The seconds that the measurements promised.
        names: The devices whose measurements are wrong.
    """

    seconds: Mapping[str, float]
    expected_seconds: Mapping[str, float]
    names: Sequence[str]

    def __str__(self) -> str:
        each = ", ".join(
            f"{name} {_milliseconds(self.seconds[name])} (measured: "
            f"{_milliseconds(self.expected_seconds[name])})"
            for name in self.seconds
        )
        return (
            "The plan is based on wrong measurements. Real steps take, for a micro-batch: "
            f"{each}. The measurements of {' and '.join(self.names)} do not hold."
        )

    def reason(self, name: str) -> str:
        """Why the measurements of a device do not hold."""
        return (
            f"real steps took {_milliseconds(self.seconds[name])} for a micro-batch, and the "
            f"measurements promised {_milliseconds(self.expected_seconds[name])}"
        )


def misjudged(now: Mapping[str, float], expected: Mapping[str, float]) -> Misjudged | None:
    """Compare the seconds of the first steady steps with those of the measurements.

    Only differences that change the slowest stage's time by a fifth count, and what has changed
    alike everywhere does not: the batches may be longer than the measured one.

    Returns:
        None if the measurements hold.
    """
    common, slowest = _common(now, expected), max(now.values())
    wrong = []
    for name, seconds in now.items():
        promised = common * expected[name]
        least, most = sorted((seconds, promised))
        if most > MISJUDGED * least and most - least > THRESHOLD * slowest:
            wrong.append(name)
    return Misjudged(now, expected, wrong) if wrong else None


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


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


def best_split(before: Candidate, keeps_own: bool = False) -> Candidate | None:
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
