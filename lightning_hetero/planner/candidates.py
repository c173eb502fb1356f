"""Candidates: orders of devices with their layers, as the simulator plays them and as plans.

A candidate has one of three forms, which say where the coordinator's layers and the input embedding
are:

    first   embedding, layers ─▶ worker 1 ─▶ worker 2 ─▶ head, loss
    last    embedding ─────────▶ worker 1 ─▶ worker 2 ─▶ layers, head, loss
    line    start ─▶ embedding, worker 1 ─────▶ worker 2 ─▶ layers, head, loss

The coordinator is at both ends of the arrows, and it is stage 0 in every form. In a line it still
starts each micro-batch, with masks, positions and the user's own code, and sends token ids.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TypeVar

import msgspec

from ..plan import (
    BYTES_PER_NUMBER,
    COORDINATOR,
    Narrowing,
    Plan,
    StagePlan,
    WireDtype,
    most_started,
)
from .costs import START, WORKER, Cost, End, Holder, Need, Option, Role, cost_at, layer_seconds
from .profile import EMBEDDING, ENDS, HEAD, DeviceProfile, Link, ModelProfile, Profile
from .simulation import (
    Hop,
    Pipeline,
    Simulation,
    StageTimes,
    busy_seconds_of_media,
    least_seconds,
    predict,
)
from .split import Matrix, Split, best_split, bottleneck, only

OfStage = TypeVar("OfStage")


class Form(Enum):
    """Where the coordinator's layers and the input embedding are."""

    FIRST = "first"
    LAST = "last"
    LINE = "line"

    @classmethod
    def of(cls, plan: Plan) -> Form:
        """The form of a plan."""
        if any(stage.embedding for stage in plan.stages):
            return cls.LINE
        has_workers_first = bool(plan.remote_stages) and not plan.stages[0].is_local
        return cls.LAST if has_workers_first and plan.stages[-1].is_local else cls.FIRST

    def role(self, index: int) -> Role:
        """The role of the stage with this index; the coordinator's index is 0."""
        return _ROLES[self].get(index, WORKER)

    def no_layers(self, num_layers: int) -> tuple[int, int]:
        """The range of a coordinator without layers."""
        return (0, 0) if self is Form.FIRST else (num_layers, num_layers)

    def in_layer_order(self, stages: Sequence[OfStage]) -> list[OfStage]:
        """Reorder a list that begins with the coordinator into the order of the layers."""
        return list(stages) if self is Form.FIRST else [*stages[1:], stages[0]]

    def coordinator_first(self, stages: Sequence[OfStage]) -> list[OfStage]:
        """Reorder a list in the order of the layers so that it begins with the coordinator."""
        return list(stages) if self is Form.FIRST else [stages[-1], *stages[:-1]]


_ROLES: dict[Form, dict[int, Role]] = {
    Form.FIRST: {0: Role(ENDS, is_coordinator=True, has_first=True)},
    Form.LAST: {0: Role(ENDS, is_coordinator=True, has_last=True)},
    Form.LINE: {
        0: Role((START, HEAD), is_coordinator=True, has_last=True, num_boundaries=1),
        1: Role((EMBEDDING,), has_first=True, num_boundaries=1),
    },
}


def forms_for(model: ModelProfile) -> tuple[Form, ...]:
    """The forms in which a model can train."""
    return tuple(Form) if model.embedding_may_leave else (Form.FIRST, Form.LAST)


def lightest_form(model: ModelProfile, workers: Sequence[str]) -> Form:
    """The form in which the coordinator has the fewest ends of the model."""
    return Form.LINE if workers and model.embedding_may_leave else Form.FIRST


def with_coordinator(plan: Plan) -> list[StagePlan]:
    """The stages in the order of the layers; a coordinator without layers is added as a stage."""
    if any(stage.is_local for stage in plan.stages):
        return list(plan.stages)
    form, num_layers = Form.of(plan), max((stage.layers[1] for stage in plan.stages), default=0)
    own = StagePlan([COORDINATOR], form.no_layers(num_layers))
    return form.in_layer_order([own, *plan.stages])


class Costs:
    """Costs of devices and links, computed once for each kind of device.

    Args:
        profile: A profile with a batch size.
        pins: Layers that a device must hold.

    Attributes:
        kinds: A key for each device; it is equal for devices with equal measurements.
    """

    def __init__(self, profile: Profile, pins: Mapping[str, tuple[int, int]]) -> None:
        self.profile = profile
        self.pins = pins
        self.batch_size = profile.batch_size or 1
        self.kinds = {device.name: _kind_of(device) for device in profile.devices}
        self._links = {(link.source, link.target): link for link in profile.links}
        self._holders: dict[tuple[bytes, int, Role], Holder] = {}
        self._hops: dict[tuple[str, str, float], Hop] = {}

    def size(self, micro_batches: int) -> int:
        """Samples in the largest micro-batch, if the batch is cut into this many."""
        return math.ceil(self.batch_size / micro_batches)

    def holder(self, name: str, size: int, role: Role | None = None) -> Holder:
        """The device at a micro-batch size. The default role is that of the form with the
        coordinator first."""
        if role is None:
            role = Form.FIRST.role(0) if name == COORDINATOR else WORKER
        key = (self.kinds[name], size, role)
        if key not in self._holders:
            device, ends = self.profile.device(name), self._ends(name, size, role)
            self._holders[key] = Holder(device, self.profile.model, size, role, ends)
        return self._holders[key]

    def _ends(self, name: str, size: int, role: Role) -> list[End]:
        """The costs of the ends of a role."""
        own, model = self.profile.device(COORDINATOR), self.profile.model
        found = []
        for end in role.ends:
            part = EMBEDDING if end == START else end
            cost = cost_at(own, part, model.dtype, False, size)
            found.append(End(end, cost, own.optimizer_seconds.get(end, 0.0)))
        return found if role.ends == ENDS else [self._apart(end, name, size) for end in found]

    def _apart(self, end: End, name: str, size: int) -> End:
        """The cost of an end in a line, where the embedding is on a worker.

        Both ends were measured on the coordinator, with the embedding there. Nearly all of the
        measured forward is the start, which stays on the coordinator. Backward, optimizer step and
        memory belong to the embedding. A worker's factor for them is its factor for decoder layers.
        """
        if end.cost is None or end.name == HEAD:
            return end
        if end.name == START:
            return End(START, Cost(end.cost.forward_seconds, 0.0, 0.0, 0.0))
        factor = self._slowdown(name, size)
        backward = end.cost.backward_seconds * factor
        cost = end.cost._replace(forward_seconds=0.0, backward_seconds=backward)
        return End(EMBEDDING, cost, end.optimizer_seconds * factor)

    def _slowdown(self, name: str, size: int) -> float:
        """The worker's seconds for decoder layers over the coordinator's; 1 if one is unknown."""
        model = self.profile.model
        own, its = (
            layer_seconds(self.profile.device(each), model, model.dtype, size)
            for each in (COORDINATOR, name)
        )
        return its / own if 0 < own < math.inf and its < math.inf else 1.0

    def matrix(self, name: str, holder: Holder, in_flight: int) -> Matrix:
        """The seconds of every stage that the device may hold under its pin."""
        seconds = holder.matrix(in_flight)
        if name not in self.pins:
            return seconds
        first, end = self.pins[name]
        if first == end:  # a coordinator without layers
            first = end = len(seconds) - 1 if holder.role.has_last else 0
        return only(seconds, (first, end))

    def link(self, source: str, target: str) -> Link:
        """The link of this direction, measured or assumed."""
        speed = self.profile.default_link
        assumed = Link(source, target, speed.latency_seconds, speed.bytes_per_second)
        return self._links.get((source, target), assumed)

    def hop(self, source: str, target: str, num_bytes: float) -> Hop:
        """The transfer of this many bytes over a link."""
        key = (source, target, num_bytes)
        if key not in self._hops:
            link = self.link(source, target)
            medium = link.shared or f"{link.source} to {link.target}"
            self._hops[key] = Hop(medium, num_bytes / link.bytes_per_second, link.latency_seconds)
        return self._hops[key]


def _kind_of(device: DeviceProfile) -> bytes:
    name = COORDINATOR if device.name == COORDINATOR else ""
    return msgspec.json.encode(msgspec.structs.replace(device, name=name))


@dataclass(frozen=True)
class Candidate:
    """An order of devices with layers for each.

    Args:
        costs: The costs of devices and links.
        names: The coordinator first, in any form, then the workers in the order of the layers.
        ranges: The layers of each device.
        options: How each device runs its layers.
        micro_batches: Pieces of the batch.
        in_flight: The most micro-batches in flight.
        narrowings: The rounding of a given plan at its boundaries; the planner rounds nothing.
        form: Where the coordinator's layers and the embedding are.
    """

    costs: Costs
    names: Sequence[str]
    ranges: Sequence[tuple[int, int]]
    options: Sequence[Option]
    micro_batches: int
    in_flight: int
    narrowings: Sequence[Narrowing] = ()
    form: Form = Form.FIRST

    @property
    def size(self) -> int:
        """Samples in a micro-batch."""
        return self.costs.size(self.micro_batches)

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers in the order of the layers."""
        return tuple(self.names[1:])

    def holder(self, index: int) -> Holder:
        """The device of a stage, in its role."""
        return self.costs.holder(self.names[index], self.size, self.form.role(index))

    @cached_property
    def pipeline(self) -> Pipeline:
        """The step that the simulator plays."""
        there, back = hops_between(self.costs, self.names, self.size, self.narrowings, self.form)
        first, end = self.ranges[0]
        behind_seconds = 0.0 if self.form is Form.FIRST else sum(self.layer_seconds(0))
        return Pipeline(
            [self._times(index) for index in range(len(self.names))],
            self.holder(0).end_seconds(HEAD) + behind_seconds,
            there,
            back,
            self.micro_batches,
            self.in_flight,
            # The same condition as `Plan.starts_on_worker`.
            starts_first=self.form is not Form.FIRST or first == end,
            max_started=most_started(self.in_flight, sends_token_ids=self.form is Form.LINE),
        )

    @property
    def stage_seconds(self) -> list[float]:
        """The seconds of each stage for one micro-batch; the coordinator's include the loss."""
        seconds = [stage.forward_seconds + stage.backward_seconds for stage in self.pipeline.stages]
        seconds[0] += self.pipeline.loss_seconds
        return seconds

    @property
    def bottleneck_seconds(self) -> float:
        """The slowest stage's time for one micro-batch."""
        return max(self.stage_seconds)

    @property
    def busy_seconds_of_media(self) -> dict[str, float]:
        """The seconds for which one micro-batch occupies each link or shared medium."""
        if self.pipeline.is_alone:
            return {}
        return busy_seconds_of_media([*self.pipeline.forward_hops, *self.pipeline.backward_hops])

    @cached_property
    def least_seconds(self) -> float:
        """A lower bound of the step, without a simulation."""
        return least_seconds(self.pipeline)

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated step."""
        return predict(self.pipeline)

    @property
    def step_seconds(self) -> float:
        """The predicted step."""
        return self.simulation.step_seconds

    @property
    def identity(self) -> Hashable:
        """Equal for candidates of one search that are the same plan."""
        return self.workers, tuple(self.ranges), self.micro_batches, self.in_flight, self.form

    def need(self, index: int) -> Need:
        """The memory that a stage needs."""
        return self.holder(index).need(self.options[index], *self.ranges[index], self.in_flight)

    def layer_seconds(self, index: int) -> tuple[float, float]:
        """Forward and backward of a stage's layers for one micro-batch."""
        (first, end), option = self.ranges[index], self.options[index]
        forward, backward = (sums[end] - sums[first] for sums in (option.forward, option.backward))
        return float(forward), float(backward)

    def has_embedding(self, index: int) -> bool:
        """Whether the stage is on a worker and has the embedding."""
        role = self.form.role(index)
        return EMBEDDING in role.ends and not role.is_coordinator

    def plan(self) -> Plan:
        """The candidate as a plan, without a stage for a coordinator that has no layers."""
        stages = [self._stage_plan(index) for index in range(len(self.names))]
        held = [stage for stage in self.form.in_layer_order(stages) if stage.layer_indices]
        return Plan(held, self.micro_batches, self.in_flight)

    def _stage_plan(self, index: int) -> StagePlan:
        option, dtype = self.options[index], self.costs.profile.model.dtype
        return StagePlan(
            [self.names[index]],
            self.ranges[index],
            option.recompute,
            None if option.dtype == dtype else option.dtype,
            embedding=self.has_embedding(index),
        )

    def _times(self, index: int) -> StageTimes:
        (first, end), holder = self.ranges[index], self.holder(index)
        is_behind = index == 0 and self.form is not Form.FIRST
        forward, backward = (0.0, 0.0) if is_behind else self.layer_seconds(index)
        before = holder.before_layers
        forward, backward = forward + before.forward_seconds, backward + before.backward_seconds
        return StageTimes(forward, backward, holder.optimizer_seconds(first, end))


def hops_between(
    costs: Costs,
    names: Sequence[str],
    size: int,
    narrowings: Sequence[Narrowing] = (),
    form: Form = Form.FIRST,
) -> tuple[list[Hop], list[Hop]]:
    """The forward and the backward hop that leaves each stage."""
    model = costs.profile.model
    narrowings = narrowings or [Narrowing()] * len(names)
    activation_bytes = model.activation_bytes_per_sample * size
    gradient_bytes = model.gradient_bytes_per_sample * size
    there = [activation_bytes * _share(model, each.activation_dtype) for each in narrowings]
    around = [narrowings[-1], *narrowings[:-1]]
    back = [gradient_bytes * _share(model, each.gradient_dtype) for each in around]
    if form is Form.LINE:
        there[0], back[1] = model.token_id_bytes_per_sample * size, 0.0
    behind, before = [*names[1:], names[0]], [names[-1], *names[:-1]]
    return list(map(costs.hop, names, behind, there)), list(map(costs.hop, names, before, back))


def _share(model: ModelProfile, wire_dtype: WireDtype | None) -> float:
    """The share of a boundary's bytes that remains after rounding."""
    if wire_dtype is None:
        return 1.0
    return min(1.0, BYTES_PER_NUMBER[wire_dtype] / BYTES_PER_NUMBER[model.dtype])


@dataclass(frozen=True)
class Arrangement:
    """A candidate whose layers are not chosen yet.

    Args:
        costs: The costs of devices and links.
        workers: The workers in the order of the layers.
        micro_batches: Pieces of the batch.
        form: Where the coordinator's layers and the embedding are.
    """

    costs: Costs
    workers: Sequence[str]
    micro_batches: int
    form: Form = Form.FIRST

    @property
    def names(self) -> list[str]:
        """The coordinator and the workers."""
        return [COORDINATOR, *self.workers]

    @property
    def size(self) -> int:
        """Samples in a micro-batch."""
        return self.costs.size(self.micro_batches)

    @cached_property
    def holders(self) -> list[Holder]:
        """The devices in their roles, the coordinator first."""
        names = enumerate(self.names)
        return [self.costs.holder(name, self.size, self.form.role(index)) for index, name in names]

    @cached_property
    def least_bottleneck_seconds(self) -> float:
        """The bottleneck with one micro-batch in flight, which leaves the most memory."""
        return bottleneck(self._matrices(1))

    @cached_property
    def busiest_seconds(self) -> float:
        """The seconds of a micro-batch on the link or shared medium that it occupies longest."""
        there, back = self._hops
        return max(busy_seconds_of_media([*there, *back]).values(), default=0.0)

    def place(self, below: float = math.inf) -> list[Candidate]:
        """Split the layers exactly, for several numbers of micro-batches in flight.

        Twice as many micro-batches in flight as processes hide the transfers. Fewer are tried if
        they leave memory for a better split. The list is empty if no step can be shorter than
        ``below``.
        """
        processes = len(self.names)
        levels = {2 * processes, processes, math.ceil(processes / 2), 1} if self.workers else {1}
        found: list[Candidate] = []
        if self.micro_batches * self.least_bottleneck_seconds >= below:
            return found
        for in_flight in sorted({min(level, self.micro_batches) for level in levels}, reverse=True):
            candidate = self.place_at(in_flight, below)
            if candidate is not None:
                found.append(candidate)
                # The two sum in different orders, so their last digits may differ.
                if candidate.bottleneck_seconds <= self.least_bottleneck_seconds * (1 + 1e-9):
                    break
        return found

    def place_at(self, in_flight: int, below: float = math.inf) -> Candidate | None:
        """Split the layers exactly for this number in flight; None if they do not fit, or if the
        step cannot be shorter than ``below``."""
        split = best_split(self._matrices(in_flight), self.busiest_seconds)
        if split is None or self._least_seconds(split) >= below:
            return None
        return self.with_ranges(self.form.coordinator_first(split.ranges), in_flight)

    def _least_seconds(self, split: Split) -> float:
        """The bounds of `least_seconds` by each stage's work, without making a candidate."""
        own = self.form.coordinator_first(split.stage_seconds)
        holder, (there, back) = self.holders[0], self._hops
        start = holder.before_layers
        loss = own[0] - start.forward_seconds - start.backward_seconds
        if self.form is Form.FIRST:
            loss = holder.end_seconds(HEAD)
        most, own[0] = self.micro_batches * own[0], own[0] - loss
        before, more = 0.0, self.micro_batches - 1
        for index, seconds in enumerate(own):
            most = max(most, before + self.micro_batches * seconds)
            before += seconds
            if there:
                before += there[index].busy_seconds + there[index].latency_seconds
                after = back[(index + 1) % len(back)]
                before += after.busy_seconds + after.latency_seconds
        return max(most, before + loss + more * loss)

    @cached_property
    def _hops(self) -> tuple[Sequence[Hop], Sequence[Hop]]:
        """The forward and the backward hop that leaves each stage; none without workers."""
        if not self.workers:
            return (), ()
        return hops_between(self.costs, self.names, self.size, form=self.form)

    def with_ranges(self, ranges: Sequence[tuple[int, int]], in_flight: int) -> Candidate:
        """The candidate with these layers, where each device uses its fastest option that fits."""
        options = [
            holder.option_for(*span, in_flight)
            for holder, span in zip(self.holders, ranges, strict=True)
        ]
        count = self.micro_batches
        return Candidate(self.costs, self.names, ranges, options, count, in_flight, form=self.form)

    def fits(self, ranges: Sequence[tuple[int, int]], in_flight: int) -> bool:
        """Whether each device can hold its layers."""
        return all(
            math.isfinite(holder.matrix(in_flight)[span])
            for holder, span in zip(self.holders, ranges, strict=True)
        )

    def keeps_pins(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether each pinned device has its layers; all ranges without layers are alike."""
        spans = dict(zip(self.names, ranges, strict=True))
        pinned = [(spans[name], pin) for name, pin in self.costs.pins.items() if name in spans]
        return all(span == pin or span[0] == span[1] and pin[0] == pin[1] for span, pin in pinned)

    def _matrices(self, in_flight: int) -> list[Matrix]:
        """The matrix of seconds of each stage, in the order of the layers."""
        pairs = zip(self.names, self.holders, strict=True)
        return self.form.in_layer_order(
            [self.costs.matrix(name, holder, in_flight) for name, holder in pairs]
        )


def place_both(
    costs: Costs, workers: Sequence[str], micro_batches: int, below: float = math.inf
) -> list[Candidate]:
    """Split the layers with the coordinator first and, if there are workers, also last."""
    found = Arrangement(costs, workers, micro_batches).place(below)
    return found + place_last(costs, workers, micro_batches, below)


def place_last(
    costs: Costs, workers: Sequence[str], micro_batches: int, below: float = math.inf
) -> list[Candidate]:
    """Split the layers with the coordinator's layers behind those of the workers.

    A line is tried if the embedding may leave, because its links carry less. The embedding stays
    with the coordinator where a line would have a slower stage or link.
    """
    if not workers:
        return []
    last = Arrangement(costs, workers, micro_batches, Form.LAST)
    if not costs.profile.model.embedding_may_leave:
        return last.place(below)
    line = replace(last, form=Form.LINE)
    slowest_last, slowest_in_line = (
        max(each.least_bottleneck_seconds, each.busiest_seconds) for each in (last, line)
    )
    found = line.place(below)
    return found + last.place(below) if slowest_last < slowest_in_line else found
