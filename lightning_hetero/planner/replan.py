"""Replanning: whether a run's stages have drifted from the plan, and which layers suit them now.

`misjudged` compares the first steps with the measurements on which the plan is based.

A `Watcher` looks at the slowest stage, because that one limits the step. It takes medians over some
steps, because one slow step means nothing. It ignores changes common to all stages, because longer
sequences slow all of them alike. `replan` keeps the devices and their order and moves only layers.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from ..errors import PlanError
from ..plan import COORDINATOR, Plan, StagePlan
from .candidates import with_coordinator
from .feasibility import candidate_of
from .profile import DeviceProfile, Profile
from .split import Matrix, best_split, only

THRESHOLD = 0.2
"""Share by which the slowest stage must become slower or faster to count as drifted."""

WARM_UP = 2
"""Steps at the start that are ignored."""

WINDOW = 5
"""Steps over which the median is taken."""

SUSTAINED = 8
"""Steps for which a drift must last; with the window, the tenth slow step reports it."""

MISJUDGED = 1.5
"""Factor by which a device must differ from its measurements for these to be doubted."""

LEAST_GAIN = 0.05
"""Share of the step that a move must save."""


@dataclass(frozen=True)
class StageSeconds:
    """The seconds for which a stage computes on one micro-batch.

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
        self._threshold = threshold
        self._recent: deque[Mapping[str, StageSeconds]] = deque(maxlen=WINDOW)
        self._num_off = 0
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
        self._num_off = self._num_off + 1 if is_off else 0
        if self._num_off < SUSTAINED:
            return None
        drift = _describe(now, self._expected)
        self._expected, self._num_off = now, 0
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
        plan: The plan with other layers.
        gain: The predicted share of the step that it saves.
        profile: The measurements scaled to the present speeds; None without measurements.
    """

    plan: Plan
    gain: float
    profile: Profile | None

    @property
    def is_worth_it(self) -> bool:
        """Whether the plan saves enough to move layers."""
        return self.gain >= LEAST_GAIN


def expected_seconds(plan: Plan, profile: Profile) -> dict[str, float] | None:
    """The profile's seconds of each stage for a micro-batch; None if they are not known."""
    try:
        candidate = candidate_of(plan, profile)
    except PlanError:
        return None
    found = dict(zip(candidate.names, candidate.stage_seconds, strict=True))
    return found if all(0 < seconds < math.inf for seconds in found.values()) else None


def replan(
    plan: Plan, profile: Profile | None, seconds: Mapping[str, StageSeconds]
) -> Replanned | None:
    """Find the best layers for the plan's stages.

    With a profile, the function scales its times to the present ones, respects the memory, and
    simulates steps. Without one, it takes all layers of a stage for equal and minimizes the time
    of the slowest stage. Then a coordinator without layers gets none, and a coordinator with the
    last layers keeps them, because their time is not known apart from the head's. A coordinator
    that is missing from ``seconds`` keeps its layers.

    Returns:
        None if the layers do not fit the profile.
    """
    if profile is not None:
        expected = expected_seconds(plan, profile)
        if expected is not None:
            return _by_profile(plan, _scaled(profile, expected, seconds), seconds)
    return _by_seconds(plan, seconds)


def _by_profile(
    plan: Plan, profile: Profile, seconds: Mapping[str, StageSeconds]
) -> Replanned | None:
    before = candidate_of(plan, profile)
    matrices = [
        before.holder(index).matrix_of(option, before.in_flight)
        for index, option in enumerate(before.options)
    ]
    if COORDINATOR not in seconds:
        matrices[0] = only(matrices[0], before.ranges[0])
    media = before.busy_seconds_of_media
    split = best_split(before.form.in_layer_order(matrices), max(media.values(), default=0.0))
    if split is None:
        return None
    after = dataclasses.replace(before, ranges=before.form.coordinator_first(split.ranges))
    gain = 1 - after.step_seconds / before.step_seconds
    return Replanned(_with_ranges(plan, split.ranges), gain, profile)


def _by_seconds(plan: Plan, seconds: Mapping[str, StageSeconds]) -> Replanned | None:
    stages = with_coordinator(plan)
    num_layers = stages[-1].layers[1]
    matrices = [_matrix(stage, seconds.get(stage.worker), num_layers) for stage in stages]
    split = best_split(matrices)
    if split is None:
        return None
    before = max(float(m[s.layers]) for m, s in zip(matrices, stages, strict=True))
    gain = 1 - split.bottleneck_seconds / before
    return Replanned(_with_ranges(plan, split.ranges), gain, None)


def _matrix(stage: StagePlan, seconds: StageSeconds | None, num_layers: int) -> Matrix:
    """The seconds of every stage that the worker of this stage may hold."""
    first, end = np.ogrid[: num_layers + 1, : num_layers + 1]
    present = seconds or StageSeconds(0.0)
    num_present = len(stage.layer_indices)
    each = present.layers / max(1, num_present)
    matrix = np.where(first <= end, present.ends + each * (end - first), np.inf)
    if not stage.is_local:
        return np.where(first < end, matrix, np.inf)
    if present.layers == 0 or num_present == 0:
        return only(matrix, stage.layers)
    is_possible = first == 0 if stage.layers[0] == 0 else end == num_layers
    return np.where(is_possible, matrix, np.inf)


def _scaled(
    profile: Profile, expected: Mapping[str, float], seconds: Mapping[str, StageSeconds]
) -> Profile:
    factors = {name: stage.total / expected[name] for name, stage in seconds.items()}
    devices = [_slowed(device, factors.get(device.name, 1.0)) for device in profile.devices]
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


def _with_ranges(plan: Plan, ranges: Sequence[tuple[int, int]]) -> Plan:
    had_coordinator = any(stage.is_local for stage in plan.stages)
    stages = [
        dataclasses.replace(stage, layers=layers)
        for stage, layers in zip(with_coordinator(plan), ranges, strict=True)
        if had_coordinator or not stage.is_local or layers[0] < layers[1]
    ]
    return dataclasses.replace(plan, stages=stages)
