"""The facts of a topology: who holds what, on which device, over which links.

Whatever is not known is None or empty, and is left out of the picture.

The topology that a plan describes, with what a profile knows of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ..errors import PlanError
from ..plan import COORDINATOR, Narrowing, Plan, StagePlan
from ..planner.candidates import Candidate
from ..planner.costs import Need
from ..planner.feasibility import candidate_of
from ..planner.profile import ENDS, Profile
from ..units import in_bytes_per_second, in_percent, in_seconds, in_short_bytes

MEMORY_PARTS = ("weights", "training", "in flight", "other")
"""Kinds of memory in the order of the bar: ``training`` is gradients and optimizer state."""


EMBEDDING = "embedding"
"""The mark of a place that has the input embedding, and its name where it stands alone."""


@dataclass(frozen=True)
class Memory:
    """What is taken of a device's memory.

    Args:
        total_bytes: All of it; 0 where the device does not say.
        used_bytes: By each of `MEMORY_PARTS`, as far as it is known.
    """

    total_bytes: float
    used_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def sum_bytes(self) -> float:
        """All that is taken."""
        return math.fsum(self.used_bytes.values())


@dataclass(frozen=True)
class Place:
    """A process with its layers.

    Args:
        name: As plans call it.
        host: The machine, where the name does not say it.
        device: What it computes on.
        layers: Half-open range.
        memory: Its bar.
        marks: What is special: ``embedding`` (it is here), ``4-bit``, ``frozen``, ``recomputed``,
            ``float16``.
    """

    name: str
    host: str = ""
    device: str = ""
    layers: tuple[int, int] = (0, 0)
    memory: Memory | None = None
    marks: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """How many layers it holds."""
        return self.layers[1] - self.layers[0]

    @property
    def machine(self) -> str:
        """The machine that it is on, as far as is known."""
        return self.host or split_address(self.name)[0]


@dataclass(frozen=True)
class Speed:
    """One direction of a link."""

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class Link:
    """The way between two places, both directions.

    Args:
        forward: What activations travel at.
        backward: What gradients travel at.
        activation_dtype: What activations are rounded to on it.
        gradient_dtype: The same of gradients.
        is_one_way: Only token ids travel on it, and no gradient comes back.
    """

    forward: Speed | None = None
    backward: Speed | None = None
    activation_dtype: str | None = None
    gradient_dtype: str | None = None
    is_one_way: bool = False


@dataclass(frozen=True)
class Topology:
    """A run, as it is laid out.

    Args:
        title: What is trained.
        num_layers: Of the whole model.
        coordinator: With the head, the loss, any first or last layers, and the embedding where the
            first stage has not got it.
        stages: The workers in the order of the layers.
        links: From the coordinator to the first stage, on to each next one, and from the last back
            to the coordinator; one more than stages, or none where there are no stages.
        facts: Short sentences about the whole.
        frozen_ends: Which of ``embedding`` and ``head`` do not train.
    """

    title: str
    num_layers: int
    coordinator: Place
    stages: Sequence[Place]
    links: Sequence[Link]
    facts: Sequence[str] = ()
    frozen_ends: frozenset[str] = frozenset()

    @property
    def places(self) -> list[Place]:
        """The coordinator and the stages."""
        return [self.coordinator, *self.stages]

    @property
    def own_parts(self) -> tuple[list[str], list[str]]:
        """What the coordinator has before the stages, and behind them."""
        place = self.coordinator
        before, behind = ["data", EMBEDDING], ["head", "loss"]
        if self.stages and EMBEDDING in self.stages[0].marks:
            before.remove(EMBEDDING)
        if place.num_layers and place.layers[0] > 0:
            behind.insert(0, "layers")
        elif place.num_layers:
            before.append("layers")
        return before, behind

    @property
    def machines(self) -> list[str]:
        """The machines, each once, in the order in which they come."""
        return list(dict.fromkeys(place.machine for place in self.places))


def split_address(name: str) -> tuple[str, str]:
    """The host and the ``:port`` of a name that is an address; else the name and nothing."""
    host, colon, port = name.rpartition(":")
    return (host.strip("[]"), f":{port}") if colon and port.isdigit() else (name, "")


def layers_as_text(layers: tuple[int, int]) -> str:
    """As ``layers 2–4``, the last one included."""
    first, end = layers
    if first >= end:
        return "no layers"
    return f"layer {first}" if end - first == 1 else f"layers {first}–{end - 1}"


def speed_as_text(speed: Speed) -> tuple[str, str]:
    """Bandwidth and latency."""
    return in_bytes_per_second(speed.bytes_per_second), in_seconds(speed.latency_seconds)


def memory_as_text(memory: Memory) -> str:
    """As ``5.1 of 23.5 GiB``, or as much of that as is known."""
    used, total = memory.sum_bytes, memory.total_bytes
    if not memory.used_bytes:
        return in_short_bytes(total)
    if not total:
        return in_short_bytes(used)
    whole, part = in_short_bytes(total), in_short_bytes(used)
    number, unit = part.split()
    return f"{number if whole.endswith(unit) else part} of {whole}"


THIS_MACHINE = "this machine"


def topology_of(plan: Plan, profile: Profile | None = None, title: str = "") -> Topology:
    """The facts of a plan; without a profile there are fewer.

    Raises:
        PlanError: If it is no plan that could run, or the profile is of something else.
    """
    num_layers = plan.stages[-1].layers[1] if plan.stages else 0
    if num_layers < 1:
        raise PlanError("The plan has no layers, so there is nothing to draw; give it stages.")
    plan.check(num_layers, [stage.worker for stage in plan.remote_stages])
    bare = _bare(plan, title)
    return bare if profile is None else with_profile(bare, plan, profile)


def with_profile(bare: Topology, plan: Plan, profile: Profile) -> Topology:
    """The same with what was measured: devices, memory, links, the predicted step.

    Raises:
        PlanError: If the plan and the profile do not go together.
    """
    plan.check(len(profile.model.layers), profile.workers)
    candidate = candidate_of(plan, profile)
    known = {
        name: _measured_place(place, candidate, index)
        for index, (name, place) in enumerate(
            zip(candidate.names, [bare.coordinator, *bare.stages], strict=True)
        )
    }
    frozen_ends = {end for end in ENDS if not profile.model.part(end).trainable_parameters}
    return replace(
        bare,
        coordinator=known[COORDINATOR],
        stages=[known[place.name] for place in bare.stages],
        links=_measured_links(bare, profile),
        facts=[*bare.facts, _prediction(candidate)],
        # A head that is the embedding has no parameters of its own.
        frozen_ends=bare.frozen_ends | (frozen_ends if len(frozen_ends) == len(ENDS) else set()),
    )


def _bare(plan: Plan, title: str) -> Topology:
    local = next((stage for stage in plan.stages if stage.is_local), None)
    num_layers = plan.stages[-1].layers[1]
    stages = [_place(stage) for stage in plan.remote_stages]
    links = [_rounding(narrowing) for narrowing in plan.narrowings] if stages else []
    if stages and EMBEDDING in stages[0].marks:
        links[0] = Link(is_one_way=True)
    return Topology(
        title=title,
        num_layers=num_layers,
        coordinator=_place(local or StagePlan([COORDINATOR], (0, 0))),
        stages=stages,
        links=links,
        facts=[f"{plan.micro_batches} micro-batches, at most {plan.max_in_flight} in flight"],
    )


def _place(stage: StagePlan) -> Place:
    is_here = stage.is_local or stage.worker.startswith("local-")
    marks = [EMBEDDING] if stage.embedding else []
    marks += ["recomputed"] if stage.recompute else []
    marks += [stage.dtype] if stage.dtype else []
    host = THIS_MACHINE if is_here else ""
    return Place(stage.worker, host, layers=stage.layers, marks=tuple(marks))


def _rounding(narrowing: Narrowing) -> Link:
    return Link(None, None, narrowing.activation_dtype, narrowing.gradient_dtype)


def _measured_place(place: Place, candidate: Candidate, index: int) -> Place:
    profile, name = candidate.costs.profile, candidate.names[index]
    device = profile.device(name)
    parts = [profile.model.part(kind) for kind in profile.model.layers[slice(*place.layers)]]
    is_frozen = bool(parts) and not any(part.trainable_parameters for part in parts)
    marks = ("frozen",) if is_frozen else ()
    memory = Memory(float(device.memory_bytes), _by_part(candidate.need(index)))
    return replace(
        place,
        device=device.device,
        memory=memory,
        marks=tuple(dict.fromkeys((*place.marks, *marks))),
    )


def _by_part(need: Need) -> Mapping[str, float]:
    return {
        "weights": float(need.weights),
        "training": float(need.gradients + need.optimizer),
        "in flight": float(need.in_flight),
        "other": float(need.base + need.working),
    }


def _measured_links(bare: Topology, profile: Profile) -> list[Link]:
    speeds = {
        (link.source, link.target): Speed(link.bytes_per_second, link.latency_seconds)
        for link in profile.links
    }
    around = [place.name for place in (*bare.places, bare.coordinator)]
    return [
        replace(link, forward=speeds.get((source, target)), backward=speeds.get((target, source)))
        for link, (source, target) in zip(bare.links, pairwise(around), strict=False)
    ]


def _prediction(candidate: Candidate) -> str:
    tokens = candidate.costs.batch_size * candidate.costs.profile.model.tokens_per_sample
    seconds = candidate.step_seconds
    rate = f"{tokens / seconds:,.0f} tokens/s, " if seconds else ""
    return f"predicted: {rate}bubble {in_percent(candidate.simulation.bubble)}"
