"""A candidate: an order of devices with their layers, as it would run, and as the plan it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from ..plan import COORDINATOR, Narrowing, Plan, StagePlan, WireDtype, bytes_per_number
from .bounds import busy_seconds_of_media, least_seconds
from .holding import Holder, Need, Option
from .profile import EMBEDDING, HEAD, Link, ModelProfile, Profile
from .simulation import Hop, Pipeline, Simulation, StageTimes, predict
from .splitting import Matrix, best_split, bottleneck


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
        self._holders: dict[tuple[bytes, int], Holder] = {}

    def size(self, micro_batches: int) -> int:
        """Samples in the largest of so many micro-batches."""
        return math.ceil(self.batch_size / micro_batches)

    def kind(self, name: str) -> bytes:
        """Equal for devices that were measured alike."""
        return self._kinds[name]

    def holder(self, name: str, size: int) -> Holder:
        """The device at a micro-batch size."""
        key = (self._kinds[name], size)
        if key not in self._holders:
            device = self.profile.device(name)
            self._holders[key] = Holder(device, self.profile.model, size)
        return self._holders[key]

    def matrix(self, name: str, size: int, in_flight: int) -> Matrix:
        """The seconds of every stage that the device may hold, its pin kept to."""
        seconds = self.holder(name, size).matrix(in_flight)
        if name not in self.pins:
            return seconds
        pinned = np.full_like(seconds, np.inf)
        pinned[self.pins[name]] = seconds[self.pins[name]]
        return pinned

    def link(self, source: str, target: str) -> Link:
        """As `Profile.link`, without looking through all of them."""
        return self._links.get((source, target)) or self.profile.link(source, target)


def _kind_of(device: msgspec.Struct) -> bytes:
    name = getattr(device, "name", "")
    content = msgspec.structs.asdict(device) | {"name": name if name == COORDINATOR else ""}
    return msgspec.json.encode(content)


@dataclass(frozen=True)
class Candidate:
    """An order with layers for each device.

    Args:
        costs: What it was made from.
        names: The devices in the order of the layers, the coordinator first.
        ranges: Their layers.
        options: How each runs them.
        micro_batches: As in the plan.
        in_flight: As in the plan.
        narrowings: What is rounded on its way, as in the plan; the planner itself rounds nothing.
    """

    costs: Costs
    names: Sequence[str]
    ranges: Sequence[tuple[int, int]]
    options: Sequence[Option]
    micro_batches: int
    in_flight: int
    narrowings: Sequence[Narrowing] = ()

    @property
    def size(self) -> int:
        """Samples in a micro-batch."""
        return self.costs.size(self.micro_batches)

    @property
    def workers(self) -> tuple[str, ...]:
        """Its workers in their order."""
        return tuple(self.names[1:])

    @cached_property
    def pipeline(self) -> Pipeline:
        """What the simulator plays."""
        ends = self.costs.holder(COORDINATOR, self.size)
        there, back = hops_between(self.costs, self.names, self.size, self.narrowings)
        return Pipeline(
            [self._times(index) for index in range(len(self.names))],
            ends.end_seconds(HEAD),
            there,
            back,
            self.micro_batches,
            self.in_flight,
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
        holder = self.costs.holder(self.names[index], self.size)
        return holder.need(self.options[index], *self.ranges[index], self.in_flight)

    def plan(self) -> Plan:
        """As a plan. A coordinator without layers is left out of it."""
        dtype = self.costs.profile.model.dtype
        return Plan(
            [
                StagePlan(
                    [name],
                    span,
                    option.recompute,
                    None if option.dtype == dtype else option.dtype,
                )
                for name, span, option in zip(self.names, self.ranges, self.options, strict=True)
                if span[0] < span[1]
            ],
            self.micro_batches,
            self.in_flight,
        )

    def _times(self, index: int) -> StageTimes:
        (first, end), option = self.ranges[index], self.options[index]
        holder = self.costs.holder(self.names[index], self.size)
        forward = float(option.forward[end] - option.forward[first])
        backward = float(option.backward[end] - option.backward[first])
        embedding = holder.ends.get(EMBEDDING)
        if embedding is not None:
            forward += embedding.forward_seconds
            backward += embedding.backward_seconds
        parts = [*self.costs.profile.model.layers[first:end], *holder.ends]
        step = sum(holder.device.optimizer_seconds.get(part, 0.0) for part in parts)
        return StageTimes(forward, backward, step)


def hops_between(
    costs: Costs, names: Sequence[str], size: int, narrowings: Sequence[Narrowing] = ()
) -> tuple[list[Hop], list[Hop]]:
    """The hops that leave each stage forward and backward."""
    model = costs.profile.model
    narrowings = narrowings or [Narrowing()] * len(names)
    activation_bytes = model.activation_bytes_per_sample * size
    gradient_bytes = model.gradient_bytes_per_sample * size
    there = [
        _hop(costs.link(source, target), activation_bytes * _share(model, form.activation_dtype))
        for source, target, form in zip(names, [*names[1:], names[0]], narrowings, strict=True)
    ]
    before, forms = [names[-1], *names[:-1]], [narrowings[-1], *narrowings[:-1]]
    back = [
        _hop(costs.link(source, target), gradient_bytes * _share(model, form.gradient_dtype))
        for source, target, form in zip(names, before, forms, strict=True)
    ]
    return there, back


def _share(model: ModelProfile, wire_dtype: WireDtype | None) -> float:
    """What is left of the bytes of a boundary."""
    if wire_dtype is None:
        return 1.0
    return min(1.0, bytes_per_number(wire_dtype) / bytes_per_number(model.dtype))


def _hop(link: Link, num_bytes: float) -> Hop:
    medium = link.shared or f"{link.source} to {link.target}"
    return Hop(medium, num_bytes / link.bytes_per_second, link.latency_seconds)


def place(costs: Costs, workers: Sequence[str], micro_batches: int) -> list[Candidate]:
    """The exact split of the layers over this order, for several numbers in flight.

    Twice as many micro-batches in flight as processes hide the way there and back; fewer are
    tried where they leave memory for a better split.
    """
    processes = len(workers) + 1
    levels = {2 * processes, processes, math.ceil(processes / 2), 1} if workers else {1}
    size = costs.size(micro_batches)
    unlimited = bottleneck([costs.matrix(name, size, 1) for name in (COORDINATOR, *workers)])
    found: list[Candidate] = []
    for in_flight in sorted({min(level, micro_batches) for level in levels}, reverse=True):
        if np.isinf(unlimited):
            break
        candidate = place_at(costs, workers, micro_batches, in_flight)
        if candidate is not None:
            found.append(candidate)
            if candidate.bottleneck_seconds <= unlimited:
                break
    return found


def place_at(
    costs: Costs, workers: Sequence[str], micro_batches: int, in_flight: int
) -> Candidate | None:
    """The exact split for this number in flight; None where it does not fit."""
    names, size = [COORDINATOR, *workers], costs.size(micro_batches)
    there, back = hops_between(costs, names, size)
    media = busy_seconds_of_media([*there, *back])
    floor = max(media.values()) if workers else 0.0
    split = best_split([costs.matrix(name, size, in_flight) for name in names], floor)
    if split is None:
        return None
    return with_ranges(costs, names, split.ranges, micro_batches, in_flight)


def with_ranges(
    costs: Costs,
    names: Sequence[str],
    ranges: Sequence[tuple[int, int]],
    micro_batches: int,
    in_flight: int,
) -> Candidate:
    """These layers for these devices, each run in the fastest way that fits."""
    size = costs.size(micro_batches)
    options = [
        costs.holder(name, size).option_for(*span, in_flight)
        for name, span in zip(names, ranges, strict=True)
    ]
    return Candidate(costs, names, ranges, options, micro_batches, in_flight)
