"""Re-planning: other layers for the same devices in the same order, by what they take now."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from ..errors import PlanError
from ..plan import COORDINATOR, Plan, StagePlan
from .candidates import Candidate
from .checking import candidate_of
from .forms import with_coordinator
from .profile import DeviceProfile, Profile
from .splitting import Matrix, best_split
from .watching import StageSeconds

LEAST_GAIN = 0.05
"""Share of the step that a move has to save."""


@dataclass(frozen=True)
class Replanned:
    """A plan for the devices as they are now.

    Args:
        plan: The same as before, with other layers.
        gain: The share of the step that it saves, as predicted.
        profile: What was measured, scaled to what devices take now; None where nothing was.
    """

    plan: Plan
    gain: float
    profile: Profile | None

    @property
    def is_worth_it(self) -> bool:
        """Whether it saves enough for layers to move."""
        return self.gain >= LEAST_GAIN


def expected_seconds(plan: Plan, profile: Profile) -> dict[str, float] | None:
    """What each stage takes for a micro-batch by the profile; None where it does not say."""
    try:
        plan.check(len(profile.model.layers), profile.workers)
        candidate = candidate_of(plan, profile)
    except PlanError:
        return None
    found = _stage_seconds(candidate)
    return found if all(0 < seconds < math.inf for seconds in found.values()) else None


def replan(
    plan: Plan, profile: Profile | None, seconds: Mapping[str, StageSeconds]
) -> Replanned | None:
    """The best layers for the plan's stages.

    With a profile, its times are scaled to the present ones, memory is kept to, and steps are
    simulated. Without one, all layers of a stage are taken for alike and the slowest stage is made
    as fast as possible; a coordinator without layers gets none then, and one with the last layers
    keeps them, since their time is not known apart from the head's. A coordinator that is not among
    ``seconds`` keeps the layers that it has.

    Returns:
        None where the layers do not fit, by the profile.
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
        matrices[0] = _only(matrices[0], before.ranges[0])
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
    """The seconds of every stage that its worker may hold."""
    points = np.arange(num_layers + 1)
    first, end = points[:, None], points[None, :]
    present = seconds or StageSeconds(0.0)
    num_present = len(stage.layer_indices)
    each = present.layers / max(1, num_present)
    matrix = np.where(first <= end, present.ends + each * (end - first), np.inf)
    if not stage.is_local:
        return np.where(first < end, matrix, np.inf)
    if present.layers == 0 or num_present == 0:
        return _only(matrix, stage.layers)
    is_possible = first == 0 if stage.layers[0] == 0 else end == num_layers
    return np.where(is_possible, matrix, np.inf)


def _only(matrix: Matrix, layers: tuple[int, int]) -> Matrix:
    kept = np.full_like(matrix, np.inf)
    kept[layers] = matrix[layers]
    return kept


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


def _stage_seconds(candidate: Candidate) -> dict[str, float]:
    pipeline = candidate.pipeline
    times = [stage.forward_seconds + stage.backward_seconds for stage in pipeline.stages]
    times[0] += pipeline.loss_seconds
    return dict(zip(candidate.names, times, strict=True))


def _with_ranges(plan: Plan, ranges: Sequence[tuple[int, int]]) -> Plan:
    had_coordinator = any(stage.is_local for stage in plan.stages)
    stages = [
        dataclasses.replace(stage, layers=layers)
        for stage, layers in zip(with_coordinator(plan), ranges, strict=True)
        if had_coordinator or not stage.is_local or layers[0] < layers[1]
    ]
    return dataclasses.replace(plan, stages=stages)
