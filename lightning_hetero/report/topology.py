"""The topology of a plan: which process holds which layers, on which device, over which links.

A profile adds devices, memory and links. Unknown facts are None or empty, and pictures omit them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ..errors import PlanError
from ..plan import COORDINATOR, Plan, StagePlan
from ..planner.candidates import Candidate
from ..planner.costs import Need
from ..planner.feasibility import candidate_of
from ..planner.profile import ENDS, Profile
from ..units import in_bytes_per_second, in_micro_batches, in_percent, in_seconds, in_short_bytes

MEMORY_PARTS = ("weights", "training", "in flight", "other")
"""Kinds of memory in the order of the bar: ``training`` is gradients and optimizer state."""

EMBEDDING = "embedding"
"""The mark of a place that holds the input embedding, and the name of the coordinator's part."""

THIS_MACHINE = "this machine"


@dataclass(frozen=True)
class Memory:
    """The memory of a device and how much of it is used.

    Args:
        total_bytes: The device's memory; 0 if it is unknown.
        used_bytes: The used memory by `MEMORY_PARTS`, without unknown parts.
    """

    total_bytes: float
    used_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the used memory is for: the weights alone, or everything."""
        return "weights" if list(self.used_bytes) == ["weights"] else "memory"


@dataclass(frozen=True)
class Place:
    """A process with its layers.

    Args:
        name: The name in the plan.
        host: The machine, if the name does not contain it.
        device: The name of the device that computes.
        layers: Half-open range.
        memory: The memory of the device.
        marks: What is special: ``embedding`` (the place holds it), ``4-bit``, ``frozen``,
            ``recomputed``, ``float16``.
        identity: Equal for all processes on one machine; empty if it is unknown.
    """

    name: str
    host: str = ""
    device: str = ""
    layers: tuple[int, int] = (0, 0)
    memory: Memory | None = None
    marks: tuple[str, ...] = ()
    identity: str = ""

    @property
    def num_layers(self) -> int:
        """The number of its layers."""
        return self.layers[1] - self.layers[0]

    @property
    def machine(self) -> str:
        """Distinguishes the machines of processes, also behind tunnels, where names do not."""
        return self.identity or self.machine_name

    @property
    def machine_name(self) -> str:
        """The machine's name: its host, or the host in the process's address."""
        return self.host or split_address(self.name)[0]


@dataclass(frozen=True)
class Speed:
    """One direction of a link."""

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class Link:
    """The link between two places, in both directions.

    Args:
        forward: The speed of activations.
        backward: The speed of gradients.
        activation_dtype: The dtype to which activations are rounded on this link.
        gradient_dtype: The dtype to which gradients are rounded on this link.
        is_one_way: Whether only token ids cross the link, and no gradient comes back.
    """

    forward: Speed | None = None
    backward: Speed | None = None
    activation_dtype: str | None = None
    gradient_dtype: str | None = None
    is_one_way: bool = False


@dataclass(frozen=True)
class Topology:
    """The processes of a run and the links between them.

    Args:
        title: The name of the model.
        num_layers: The number of layers of the whole model.
        coordinator: The place with the head, the loss, its own first or last layers, and the
            embedding unless the first stage holds it.
        stages: The workers in the order of their layers.
        links: The links from the coordinator through all stages and back to the coordinator: one
            more than stages, or none if there are no stages.
        facts: Short phrases about the whole run.
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
        """The coordinator's own parts before the stages, and after the stages."""
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
        """The machines without repetition, in the order of the places."""
        return list(dict.fromkeys(place.machine for place in self.places))


def is_loopback(host: str) -> bool:
    """Whether a host of an address is this machine, or the near end of a tunnel."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def split_address(name: str) -> tuple[str, str]:
    """The host and the ``:port`` of an address; for another name, the name and an empty string."""
    host, colon, port = name.rpartition(":")
    return (host.strip("[]"), f":{port}") if colon and port.isdigit() else (name, "")


def layers_as_text(layers: tuple[int, int]) -> str:
    """A range of layers such as ``layers 2–4``, where layer 4 is the last one."""
    first, end = layers
    if first >= end:
        return "no layers"
    return f"layer {first}" if end - first == 1 else f"layers {first}–{end - 1}"


_MARKS = re.compile(r"\((?:R|TM|C)\)|[®™©]", re.IGNORECASE)
_FILLERS = re.compile(r"\s+(?:CPU|Processor|Graphics|@)(?=[\s,]|$)|\s*\([^)]*\)")
_VENDORS = re.compile(r"^(?:Intel|AMD|NVIDIA)\s+(?=\S)")


def device_names(name: str) -> Iterator[str]:
    """The name of a device, and then shorter names, each without the words that tell least."""
    yield name
    for words in (_MARKS, _FILLERS, _VENDORS):
        name = words.sub("", name).strip() or name
        yield name
    words_left = name.split()
    while len(words_left) > 1:
        words_left.pop()
        yield f"{' '.join(words_left).rstrip(',')} …"


def short_device(name: str, fits: Callable[[str], bool]) -> str:
    """The longest of a device's names that fits; the shortest if none does."""
    shorter = ""
    for shorter in device_names(name):
        if fits(shorter):
            break
    return shorter


def speed_as_text(speed: Speed) -> tuple[str, str]:
    """Bandwidth and latency."""
    return in_bytes_per_second(speed.bytes_per_second), in_seconds(speed.latency_seconds)


def memory_as_text(memory: Memory) -> str:
    """As ``5.1 of 23.5 GiB``, or as much of that as is known."""
    used, total = math.fsum(memory.used_bytes.values()), memory.total_bytes
    if not memory.used_bytes:
        return in_short_bytes(total)
    if not total:
        return in_short_bytes(used)
    whole, part = in_short_bytes(total), in_short_bytes(used)
    number, unit = part.split()
    return f"{number if whole.endswith(unit) else part} of {whole}"


def topology_of(plan: Plan, profile: Profile | None = None, title: str = "") -> Topology:
    """The topology of a plan, with the facts of a profile if there is one.

    Raises:
        PlanError: If the plan cannot run, or the profile does not fit it.
    """
    num_layers = plan.stages[-1].layers[1] if plan.stages else 0
    if num_layers < 1:
        raise PlanError("The plan has no layers to draw; give it stages.")
    plan.check(num_layers, [stage.worker for stage in plan.remote_stages])
    local = next((stage for stage in plan.stages if stage.is_local), None)
    stages = [_place(stage) for stage in plan.remote_stages]
    links = []
    if stages:
        links = [Link(None, None, n.activation_dtype, n.gradient_dtype) for n in plan.narrowings]
        if EMBEDDING in stages[0].marks:
            links[0] = Link(is_one_way=True)
    bare = Topology(
        title=title,
        num_layers=num_layers,
        coordinator=_place(local or StagePlan([COORDINATOR], (0, 0))),
        stages=stages,
        links=links,
        facts=[f"{in_micro_batches(plan.micro_batches)}, at most {plan.max_in_flight} in flight"],
    )
    return bare if profile is None else with_profile(bare, plan, profile)


def with_profile(bare: Topology, plan: Plan, profile: Profile) -> Topology:
    """A topology with the facts of a profile added: devices, memory, links, the predicted step.

    Raises:
        PlanError: If the profile does not fit the plan.
    """
    plan.check(len(profile.model.layers), profile.workers)
    candidate = candidate_of(plan, profile)
    coordinator, *stages = (_measured_place(place, candidate) for place in bare.places)
    frozen_ends = {end for end in ENDS if not profile.model.part(end).trainable_parameters}
    return replace(
        bare,
        coordinator=coordinator,
        stages=stages,
        links=_measured_links(bare, profile),
        facts=[*bare.facts, _prediction(candidate)],
        # A head that shares the embedding's weight has no parameters of its own.
        frozen_ends=bare.frozen_ends | (frozen_ends if len(frozen_ends) == len(ENDS) else set()),
    )


def _place(stage: StagePlan) -> Place:
    is_here = stage.is_local or stage.worker.startswith("local-")
    marks = [EMBEDDING] if stage.embedding else []
    marks += ["recomputed"] if stage.recompute else []
    marks += [stage.dtype] if stage.dtype else []
    host = THIS_MACHINE if is_here else ""
    return Place(stage.worker, host, layers=stage.layers, marks=tuple(marks))


def _measured_place(place: Place, candidate: Candidate) -> Place:
    profile = candidate.costs.profile
    device = profile.device(place.name)
    parts = [profile.model.part(kind) for kind in profile.model.layers[slice(*place.layers)]]
    is_frozen = bool(parts) and not any(part.trainable_parameters for part in parts)
    marks = ("frozen",) if is_frozen else ()
    memory = Memory(float(device.memory_bytes), _by_part(candidate.need(place.name)))
    marks = tuple(dict.fromkeys((*place.marks, *marks)))
    return replace(place, device=device.device, memory=memory, marks=marks)


def _by_part(need: Need) -> Mapping[str, float]:
    return {
        "weights": float(need.weights),
        "training": float(need.gradients + need.optimizer),
        "in flight": float(need.in_flight),
        "other": float(need.base + need.working + need.boundaries),
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
