"""A candidate: an order of devices with their layers, as it would run, and as the plan it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from ..plan import (
    COORDINATOR,
    Narrowing,
    Plan,
    StagePlan,
    WireDtype,
    bytes_per_number,
    most_started,
)
from .costs import Cost, End, Holder, Need, Option, cost_at, layer_seconds
from .profile import EMBEDDING, ENDS, HEAD, Link, ModelProfile, Profile
from .roles import START, WORKER, Form, Role
from .simulation import (
    Hop,
    Pipeline,
    Simulation,
    StageTimes,
    busy_seconds_of_media,
    least_seconds,
    predict,
)
from .split import Matrix


class Costs:
    """Everything a candidate is made from, worked out once for each kind of device.

    Args:
        profile: With a batch size.
        pins: Layers that a device has to hold.
    """

    def __init__(self, profile: Profile, pins: Mapping[str, tuple[int, int]]) -> None:
        self.profile = profile
        self.pins = pins
        self.batch_size = profile.batch_size or 1
        self._kinds = {device.name: _kind_of(device) for device in profile.devices}
        self._links = {(link.source, link.target): link for link in profile.links}
        self._holders: dict[tuple[bytes, int, Role], Holder] = {}
        self._hops: dict[tuple[str, str, float], Hop] = {}

    def size(self, micro_batches: int) -> int:
        """Samples in the largest of so many micro-batches."""
        return math.ceil(self.batch_size / micro_batches)

    def kind(self, name: str) -> bytes:
        """Equal for devices that were measured alike."""
        return self._kinds[name]

    def holder(self, name: str, size: int, role: Role | None = None) -> Holder:
        """The device at a micro-batch size, in its role of the form with the coordinator first
        where no other is given."""
        if role is None:
            role = Form.FIRST.role(0) if name == COORDINATOR else WORKER
        key = (self._kinds[name], size, role)
        if key not in self._holders:
            device, ends = self.profile.device(name), self._ends(name, size, role)
            self._holders[key] = Holder(device, self.profile.model, size, role, ends)
        return self._holders[key]

    def _ends(self, name: str, size: int, role: Role) -> list[End]:
        """What a role's ends take."""
        own, model = self.profile.device(COORDINATOR), self.profile.model
        found = []
        for end in role.ends:
            part = EMBEDDING if end == START else end
            cost = cost_at(own, part, model.dtype, False, size)
            found.append(End(end, cost, own.optimizer_seconds.get(end, 0.0)))
        are_together = role.ends == ENDS
        return found if are_together else [self._apart(end, name, size) for end in found]

    def _apart(self, end: End, name: str, size: int) -> End:
        """One of a line's ends. Both were measured on the coordinator, as if the embedding were
        there: its forward is nearly all the start, which stays; its backward, optimizer's step and
        memory are the embedding's. A worker takes so many times as long for these as it takes for
        decoder layers."""
        if end.cost is None or end.name == HEAD:
            return end
        if end.name == START:
            return End(START, Cost(end.cost.forward_seconds, 0.0, 0.0, 0.0))
        factor = self._times_as_long(name, size)
        backward = end.cost.backward_seconds * factor
        cost = end.cost._replace(forward_seconds=0.0, backward_seconds=backward)
        return End(EMBEDDING, cost, end.optimizer_seconds * factor)

    def _times_as_long(self, name: str, size: int) -> float:
        """A worker's time for decoder layers by the coordinator's; 1 where one is not known."""
        model = self.profile.model
        own, its = (
            layer_seconds(self.profile.device(each), model, model.dtype, size)
            for each in (COORDINATOR, name)
        )
        return its / own if 0 < own < math.inf and its < math.inf else 1.0

    def matrix(self, name: str, size: int, in_flight: int, role: Role | None = None) -> Matrix:
        """The seconds of every stage that the device may hold, its pin kept to."""
        holder = self.holder(name, size, role)
        seconds = holder.matrix(in_flight)
        if name not in self.pins:
            return seconds
        first, end = self.pins[name]
        if first == end:  # the coordinator without layers
            first = end = len(seconds) - 1 if holder.role.has_last else 0
        pinned = np.full_like(seconds, np.inf)
        pinned[first, end] = seconds[first, end]
        return pinned

    def link(self, source: str, target: str) -> Link:
        """As `Profile.link`, without looking through all of them."""
        return self._links.get((source, target)) or self.profile.link(source, target)

    def hop(self, source: str, target: str, num_bytes: float) -> Hop:
        """So many bytes over that link."""
        key = (source, target, num_bytes)
        if key not in self._hops:
            link = self.link(source, target)
            medium = link.shared or f"{link.source} to {link.target}"
            self._hops[key] = Hop(medium, num_bytes / link.bytes_per_second, link.latency_seconds)
        return self._hops[key]


def _kind_of(device: msgspec.Struct) -> bytes:
    name = getattr(device, "name", "")
    content = msgspec.structs.asdict(device) | {"name": name if name == COORDINATOR else ""}
    return msgspec.json.encode(content)


@dataclass(frozen=True)
class Candidate:
    """An order with layers for each device.

    Args:
        costs: What it was made from.
        names: The coordinator in any form first, then the workers in the order of the layers.
        ranges: Their layers.
        options: How each runs them.
        micro_batches: As in the plan.
        in_flight: As in the plan.
        narrowings: What is rounded on its way, as in the plan; the planner itself rounds nothing.
        form: Whether the coordinator's layers are the first or the last ones, and who has the
            embedding.
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
        """Its workers in their order."""
        return tuple(self.names[1:])

    def holder(self, index: int) -> Holder:
        """A stage's device in its role."""
        return self.costs.holder(self.names[index], self.size, self.form.role(index))

    @cached_property
    def pipeline(self) -> Pipeline:
        """What the simulator plays."""
        there, back = hops_between(self.costs, self.names, self.size, self.narrowings, self.form)
        first, end = self.ranges[0]
        return Pipeline(
            [self._times(index) for index in range(len(self.names))],
            self._loss_seconds,
            there,
            back,
            self.micro_batches,
            self.in_flight,
            # As `Plan.starts_on_worker` has it.
            starts_first=self.form is not Form.FIRST or first == end,
            max_started=most_started(self.in_flight, sends_token_ids=self.form is Form.LINE),
        )

    @property
    def bottleneck_seconds(self) -> float:
        """The slowest stage's time for one micro-batch."""
        own, *others = (t.forward_seconds + t.backward_seconds for t in self.pipeline.stages)
        return max(own + self.pipeline.loss_seconds, *others) if others else own

    @property
    def busy_seconds_of_media(self) -> dict[str, float]:
        """How long one micro-batch takes each link, or what links share."""
        if self.pipeline.is_alone:
            return {}
        return busy_seconds_of_media([*self.pipeline.forward_hops, *self.pipeline.backward_hops])

    @cached_property
    def least_seconds(self) -> float:
        """A bound on its step, without playing it."""
        return least_seconds(self.pipeline)

    @cached_property
    def simulation(self) -> Simulation:
        """Its step, played."""
        return predict(self.pipeline)

    @property
    def step_seconds(self) -> float:
        """The predicted step."""
        return self.simulation.step_seconds

    def need(self, index: int) -> Need:
        """The memory that a stage needs."""
        return self.holder(index).need(self.options[index], *self.ranges[index], self.in_flight)

    def layer_seconds(self, index: int) -> tuple[float, float]:
        """A stage's layers, forward and backward of one micro-batch."""
        (first, end), option = self.ranges[index], self.options[index]
        forward, backward = (sums[end] - sums[first] for sums in (option.forward, option.backward))
        return float(forward), float(backward)

    def has_embedding(self, index: int) -> bool:
        """Whether a stage is a worker's that has the embedding."""
        role = self.form.role(index)
        return EMBEDDING in role.ends and not role.is_coordinator

    def plan(self) -> Plan:
        """As a plan. A coordinator without layers is left out of it."""
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
        layers = self.costs.profile.model.layers[first:end]
        step = sum(holder.device.optimizer_seconds.get(kind, 0.0) for kind in layers)
        step += sum(each.optimizer_seconds for each in holder.ends.values())
        return StageTimes(forward, backward, step)

    @property
    def _loss_seconds(self) -> float:
        head = self.holder(0).end_seconds(HEAD)
        return head if self.form is Form.FIRST else head + sum(self.layer_seconds(0))


def hops_between(
    costs: Costs,
    names: Sequence[str],
    size: int,
    narrowings: Sequence[Narrowing] = (),
    form: Form = Form.FIRST,
) -> tuple[list[Hop], list[Hop]]:
    """The hops that leave each stage forward and backward."""
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
    return _hops(costs, names, behind, there), _hops(costs, names, before, back)


def _hops(
    costs: Costs, sources: Sequence[str], targets: Sequence[str], num_bytes: Sequence[float]
) -> list[Hop]:
    pairs = zip(sources, targets, num_bytes, strict=True)
    return [costs.hop(source, target, amount) for source, target, amount in pairs]


def _share(model: ModelProfile, wire_dtype: WireDtype | None) -> float:
    """What is left of the bytes of a boundary."""
    if wire_dtype is None:
        return 1.0
    return min(1.0, bytes_per_number(wire_dtype) / bytes_per_number(model.dtype))
