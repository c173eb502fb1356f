"""Comparison of plans, which deploys nothing: a given plan, and two plans side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import PlanError
from ..plan import Plan
from .candidates import Candidate
from .costs import allowed_dtypes, layer_seconds
from .feasibility import candidate_of, shortages
from .profile import Profile
from .search import Search
from .solver import Solution, Wishes, apply, micro_batch_counts
from .verdict import tokens_per_second


def predict_given(plan: Plan, profile: Profile, wishes: Wishes) -> Solution:
    """A given plan in the place of the solver's choice.

    Raises:
        PlanError: If the plan does not fit the profile, or a stage of it was not measured.
    """
    candidate = candidate_of(plan, apply(wishes, profile))
    unknown = [short.text for short in shortages(candidate) if math.isinf(short.short_bytes)]
    if unknown:
        raise PlanError(f"The plan cannot be predicted: {' '.join(unknown)}")
    costs = candidate.costs
    counts = micro_batch_counts(costs.batch_size, None, costs.profile.window)
    return Solution(candidate, Search(costs, counts))


def bottleneck(candidate: Candidate) -> str:
    """The slowest process or link of a plan, as a sentence."""
    seconds = candidate.process_seconds
    seconds |= {f"the link {name}": s for name, s in candidate.busy_seconds_of_media.items()}
    slowest = max(seconds, key=lambda name: seconds[name])
    return (
        f"bottleneck: {slowest}, which each micro-batch occupies for {_duration(seconds[slowest])}"
    )


@dataclass(frozen=True)
class Side:
    """One of two plans that are compared.

    Args:
        title: The name of its profile.
        candidate: The plan.
    """

    title: str
    candidate: Candidate

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a batch over the seconds of its step."""
        return tokens_per_second(self.candidate)

    def held(self, name: str) -> str:
        """The layers that a device holds."""
        held = [seat.layers for seat in self.candidate.seats_of(name) if seat.num_layers]
        if held or name in self.candidate.processes:
            ranges = ", ".join(f"{first}:{end}" for first, end in held or [(0, 0)])
            return f"{ranges} ({sum(end - first for first, end in held)})"
        return "–"

    def layer_seconds(self, name: str) -> float:
        """One layer for one sample, forward and backward; infinite if it was not measured."""
        profile, size = self.candidate.costs.profile, self.candidate.size
        if name not in (device.name for device in profile.devices):
            return math.inf
        device, model = profile.device(name), profile.model
        dtype = next(iter(allowed_dtypes(device, model, size)), model.dtype)
        return layer_seconds(device, model, dtype, size) / len(model.kinds) / size


def compare(before: Side, after: Side) -> RenderableType:
    """Two plans side by side: which is faster, by how much, and each device.

    Raises:
        PlanError: If they are for different models.
    """
    models = [side.candidate.costs.profile.model.fingerprint for side in (before, after)]
    if models[0] != models[1]:
        raise PlanError(
            f"{before.title} and {after.title} are profiles of different models ({models[0]} and "
            f"{models[1]}); compare profiles of one model."
        )
    table = Table("device", box=box.SIMPLE_HEAD)
    for side in (before, after):
        table.add_column(f"layers, {side.title}")
    for side in (before, after):
        table.add_column(f"a layer, {side.title}")
    table.add_column("speed")
    names = [
        device.name for side in (before, after) for device in side.candidate.costs.profile.devices
    ]
    for name in dict.fromkeys(names):
        was, is_now = before.layer_seconds(name), after.layer_seconds(name)
        cells = [
            name,
            before.held(name),
            after.held(name),
            _duration(was),
            _duration(is_now),
        ]
        table.add_row(*map(Text, [*cells, _times(was, is_now)]))
    return Group(table, Text(difference(before, after)))


def difference(before: Side, after: Side) -> str:
    """Which of two plans is faster, and by how much, as a sentence."""
    times = after.tokens_per_second / before.tokens_per_second
    rates = f"{after.tokens_per_second:,.0f} instead of {before.tokens_per_second:,.0f} tokens/s"
    steps = (
        f"a step of {_duration(after.candidate.step_seconds)} instead of "
        f"{_duration(before.candidate.step_seconds)}"
    )
    return f"{after.title} is {times:.2f} x as fast as {before.title}: {rates}, {steps}"


def _duration(seconds: float) -> str:
    if math.isinf(seconds):
        return "–"
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _times(was: float, is_now: float) -> str:
    if math.isinf(was) or math.isinf(is_now) or is_now == 0:
        return "–"
    return f"{was / is_now:.2f} x"
