"""The topology of a plan: processes with their layers and devices, and the links between them.

A profile adds devices, memory and links. Unknown facts are None or empty, and pictures omit them.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product

import msgspec

from ..errors import PlanError
from ..events import Deployed, PlacedProcess
from ..pipeline.placement import COORDINATOR_STAGE, Placement
from ..plan import COORDINATOR, Plan, StagePlan
from ..planner.candidates import Candidate
from ..planner.costs import Need
from ..planner.feasibility import as_measured, candidate_of
from ..planner.profile import ENDS, Link, Profile
from ..telemetry.layer_ranges import Range, Ranges, layers_as_text, ranges_of
from ..units import in_bytes_per_second, in_micro_batches, in_percent, in_seconds, in_short_bytes

logger = logging.getLogger(__name__)

MEMORY_PARTS = ("weights", "training", "in flight", "other")
"""Kinds of memory in the order of the bar: ``training`` is gradients and optimizer state."""

EMBEDDING = "embedding"
"""The mark of a place that holds the input embedding, and the name of the coordinator's part."""

HEAD = "head"
"""The mark of a place that holds the head, and the name of the coordinator's part."""

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
        """The use of the memory: the weights alone, or everything."""
        return "weights" if list(self.used_bytes) == ["weights"] else "memory"


@dataclass(frozen=True)
class DrawnPlace:
    """A process with its layers.

    Args:
        name: The name in the plan.
        number: The number of the process; 0 is the coordinator. A worker keeps it when layers move.
        host: The machine, if the name does not contain it.
        device: The name of the computing device.
        ranges: Its layers; empty for a worker without layers at present.
        memory: The memory of the device.
        marks: Special properties: ``embedding`` and ``head`` (the place holds it), ``4-bit``,
            ``frozen``, ``recomputed``, ``recomputed by layers``, ``float16``; with the stages if it
            is not true of all stages.
        identity: Equal for all processes on one machine; empty if it is unknown.
    """

    name: str
    number: int
    host: str = ""
    device: str = ""
    ranges: Ranges = ()
    memory: Memory | None = None
    marks: tuple[str, ...] = ()
    identity: str = ""

    @property
    def num_layers(self) -> int:
        """The number of its layers."""
        return sum(each.num_layers for each in self.ranges)

    @property
    def machine(self) -> str:
        """Distinguishes the machines of processes, even at the ends of tunnels with equal names."""
        return self.identity or self.machine_name

    @property
    def machine_name(self) -> str:
        """The machine's name: its host, or the host in the process's address."""
        return self.host or split_address(self.name)[0]


@dataclass(frozen=True)
class DrawnLink:
    """The link between two places, in both directions.

    Args:
        forward: The measured link of activations.
        backward: The measured link of gradients.
        activation_dtype: The dtype of rounded activations on this link.
        gradient_dtype: The dtype of rounded gradients on this link.
        is_one_way: Whether only token ids cross the link, without gradients in return.
    """

    forward: Link | None = None
    backward: Link | None = None
    activation_dtype: str | None = None
    gradient_dtype: str | None = None
    is_one_way: bool = False


@dataclass(frozen=True)
class DrawnHop:
    """A step on the way of activations, or an exchange between two replicas.

    Args:
        stage: The number of the sending stage; 0 is the coordinator's. For an exchange, the number
            of the common stage.
        source: The index of the sending place.
        target: The index of the receiving place.
        link: The link between the two.
    """

    stage: int
    source: int
    target: int
    link: DrawnLink

    @property
    def is_inside(self) -> bool:
        """Whether both stages have the same place, so tensors do not cross a link."""
        return self.source == self.target


@dataclass(frozen=True)
class Topology:
    """The processes of a run and the links between them.

    Args:
        title: The name of the model.
        num_layers: The number of layers of the whole model.
        coordinator: The place with the head, the loss, its own first and last layers, and the
            embedding unless the first stage holds it.
        workers: The workers in the order of their layers, then the workers without layers.
        hops: The ways of the micro-batches: from the coordinator through all stages and back to the
            coordinator, in the order of the stages, also between two stages of one place; empty
            without stages. Before and after a stage with replicas, there is a hop for each two
            places on the way of a micro-batch.
        exchanges: The replicas with an exchange of gradients, each pair once.
        facts: Short phrases about the whole run.
        frozen_ends: The frozen ones of ``embedding`` and ``head``.
    """

    title: str
    num_layers: int
    coordinator: DrawnPlace
    workers: Sequence[DrawnPlace]
    hops: Sequence[DrawnHop]
    exchanges: Sequence[DrawnHop] = ()
    facts: Sequence[str] = ()
    frozen_ends: frozenset[str] = frozenset()

    @property
    def places(self) -> list[DrawnPlace]:
        """The coordinator and the workers."""
        return [self.coordinator, *self.workers]

    @property
    def num_stages(self) -> int:
        """The number of stages on workers."""
        return max((held.stage for place in self.places for held in place.ranges), default=0)

    @property
    def is_line(self) -> bool:
        """Whether each worker has one stage for itself, or all of them are without a stage."""
        has_one_each = all(len(place.ranges) == 1 for place in self.workers)
        has_replicas = any(held.share is not None for each in self.places for held in each.ranges)
        return not self.hops or (has_one_each and not has_replicas)

    def ranges_of_stage(self, number: int) -> dict[int, Range]:
        """The range of each place of a stage on workers, by the place's index."""
        return {
            index: held
            for index, place in enumerate(self.places)
            for held in place.ranges
            if held.stage == number
        }

    @property
    def own_parts(self) -> tuple[list[str], list[str]]:
        """The names of the coordinator's own parts before the stages, and after the stages; without
        its layers as a replica.
        """
        is_away = bool(self.workers) and EMBEDDING in self.workers[0].marks
        ends = ["data"] if is_away else ["data", EMBEDDING]
        alone = [each.layers for each in self.coordinator.ranges if each.stage == COORDINATOR_STAGE]
        first = [layers_as_text(layers) for layers in alone if layers[0] == 0]
        last = [layers_as_text(layers) for layers in alone if layers[0] > 0]
        has_head = not any(HEAD in place.marks for place in self.workers)
        return [*ends, *first], [*last, *[HEAD] * has_head, "loss"]

    def shown(self, part: str) -> str:
        """The name of an own part, with a word on a frozen one."""
        return f"{part}, frozen" if part in self.frozen_ends else part

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


_MARKS = re.compile(r"\((?:R|TM|C)\)|[®™©]", re.IGNORECASE)
_FILLERS = re.compile(r"\s+(?:CPU|Processor|Graphics|@)(?=[\s,]|$)|\s*\([^)]*\)")
_VENDORS = re.compile(r"^(?:Intel|AMD|NVIDIA)\s+(?=\S)")


def device_names(name: str) -> Iterator[str]:
    """The name of a device, and then shorter names, each without the least important words."""
    yield name
    for words in (_MARKS, _FILLERS, _VENDORS):
        name = words.sub("", name).strip() or name
        yield name
    words_left = name.split()
    while len(words_left) > 1:
        words_left.pop()
        yield f"{' '.join(words_left).rstrip(',')} …"


def short_device(name: str, fits: Callable[[str], bool]) -> str:
    """The longest fitting name of a device; the shortest if all are too long."""
    shorter = ""
    for shorter in device_names(name):
        if fits(shorter):
            break
    return shorter


def speed_as_text(speed: Link) -> tuple[str, str]:
    """Bandwidth and latency."""
    return in_bytes_per_second(speed.bytes_per_second), in_seconds(speed.latency_seconds)


def memory_as_text(memory: Memory) -> str:
    """As ``5.1 of 23.5 GiB``, or the known part of it."""
    used, total = math.fsum(memory.used_bytes.values()), memory.total_bytes
    if not memory.used_bytes:
        return in_short_bytes(total)
    if not total:
        return in_short_bytes(used)
    whole, part = in_short_bytes(total), in_short_bytes(used)
    number, unit = part.split()
    return f"{number if whole.endswith(unit) else part} of {whole}"


def topology_of(plan: Plan, profile: Profile | None = None, title: str = "") -> Topology:
    """The topology of a plan, with the facts of a profile, if any.

    Raises:
        PlanError: If the plan cannot run, or the profile does not fit it.
    """
    num_layers = plan.stages[-1].layers[1] if plan.stages else 0
    if num_layers < 1:
        raise PlanError("The plan has no layers to draw; give it stages.")
    plan.check(num_layers, plan.workers)
    ranges = ranges_of(plan)
    coordinator, *workers = (
        _place(name, number, ranges[name], plan) for number, name in enumerate(ranges)
    )
    numbers = {name: number for number, name in enumerate(ranges)}
    bare = Topology(
        title=title,
        num_layers=num_layers,
        coordinator=coordinator,
        workers=workers,
        hops=_hops(plan, numbers) if workers else [],
        exchanges=_exchanges(plan, numbers),
        facts=[f"{in_micro_batches(plan.micro_batches)}, at most {plan.max_in_flight} in flight"],
    )
    return bare if profile is None else with_profile(bare, plan, profile)


def topology_of_run(event: Deployed) -> Topology:
    """The topology of a run, where its layers are; a profile adds its measured times.

    Raises:
        PlanError: If the plan cannot run.
    """
    bare = topology_of(event.plan, title=event.model)
    coordinator, *workers = event.processes
    here = replace(bare.coordinator, host=coordinator.equipment.host)
    drawn = {place.name: place for place in bare.workers}
    placed = {each.name: each for each in workers}
    idle = [DrawnPlace(name, 0) for name in placed if name not in drawn]
    found = replace(
        bare,
        coordinator=_equipped(here, coordinator, here.host),
        workers=[_equipped(each, placed[each.name], here.host) for each in (*bare.workers, *idle)],
        frozen_ends=frozenset(event.frozen_ends),
    )
    if event.profile is None:
        return found
    try:
        profile = msgspec.convert(event.profile, Profile, strict=False)
        return with_profile(found, as_measured(event.plan, profile), profile)
    except PlanError:
        logger.debug("the profile is of another plan", exc_info=True)
        return found


def _equipped(place: DrawnPlace, process: PlacedProcess, host: str) -> DrawnPlace:
    """The place on its device; a local worker without a host of its own is on the given one."""
    equipment = process.equipment
    return replace(
        place,
        number=process.number,
        host=equipment.host or (host if place.host else ""),
        device=equipment.device_name,
        identity=equipment.machine,
        memory=Memory(equipment.memory_bytes, {"weights": process.weights_bytes}),
        marks=(*marks_of(place.ranges, process.marks), *place.marks),
    )


def _hops(plan: Plan, numbers: Mapping[str, int]) -> list[DrawnHop]:
    """The hops of a step's micro-batches, with the hops between two stages side by side."""
    links = [DrawnLink(None, None, n.activation_dtype, n.gradient_dtype) for n in plan.narrowings]
    if plan.remote_stages[0].embedding:
        links[0] = DrawnLink(is_one_way=True)
    placement = Placement.of(plan)
    stages = [COORDINATOR_STAGE, *(stage.number for stage in placement.stages), COORDINATOR_STAGE]
    ways = [
        [numbers[placement.process(stage, microbatch)] for stage in stages]
        for microbatch in range(plan.micro_batches)
    ]
    return [
        DrawnHop(number, *ends, link)
        for number, link in enumerate(links)
        for ends in sorted({(way[number], way[number + 1]) for way in ways})
    ]


def _exchanges(plan: Plan, numbers: Mapping[str, int]) -> list[DrawnHop]:
    """The pairs of processes for adding up gradients. A coordinator as a replica does this for all,
    unless the plan lets the others own a part.
    """
    found = []
    for number, stage in enumerate(plan.remote_stages, start=1):
        others = stage.remote_workers
        pairs = [*product([COORDINATOR], others)] if stage.is_hosted else []
        if not stage.is_hosted or stage.optimizer == "split":
            pairs += combinations(others, 2)
        found += [DrawnHop(number, numbers[one], numbers[two], DrawnLink()) for one, two in pairs]
    return found


def with_profile(bare: Topology, plan: Plan, profile: Profile) -> Topology:
    """A topology with the facts of a profile added: devices, memory, links, the predicted step.

    Raises:
        PlanError: If the profile does not fit the plan.
    """
    plan.check(len(profile.model.layers), profile.workers)
    candidate = candidate_of(plan, profile)
    coordinator, *workers = (_measured_place(place, candidate) for place in bare.places)
    frozen_ends = {end for end in ENDS if not profile.model.part(end).trainable_parameters}
    return replace(
        bare,
        coordinator=coordinator,
        workers=workers,
        hops=_measured(bare, bare.hops, profile),
        exchanges=_measured(bare, bare.exchanges, profile),
        facts=[*bare.facts, _prediction(candidate)],
        # A head with the embedding's weight does not have parameters of its own.
        frozen_ends=bare.frozen_ends | (frozen_ends if len(frozen_ends) == len(ENDS) else set()),
    )


def _place(name: str, number: int, ranges: Ranges, plan: Plan) -> DrawnPlace:
    is_here = name == COORDINATOR or name.startswith("local-")
    stages = [stage for stage in plan.stages if name in stage.workers and stage.layer_indices]
    marks = marks_of(ranges, [_marks_of_stage(stage) for stage in stages])
    return DrawnPlace(name, number, THIS_MACHINE if is_here else "", ranges=ranges, marks=marks)


def _marks_of_stage(stage: StagePlan) -> list[str]:
    marks = [EMBEDDING] * stage.embedding + [HEAD] * stage.head
    by_layers = " by layers" if stage.recompute == "layers" else ""
    marks += [f"recomputed{by_layers}"] if stage.recompute else []
    return marks + ([stage.dtype] if stage.dtype else [])


def marks_of(ranges: Ranges, marks: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The marks of a place from its ranges' marks. A mark of some ranges names their layers."""
    found = []
    for mark in dict.fromkeys(each for some in marks for each in some):
        having = [held for held, some in zip(ranges, marks, strict=True) if mark in some]
        is_of_all = len(having) == len(ranges) or mark in (EMBEDDING, HEAD)
        layers = layers_as_text(*(held.layers for held in having))
        found.append(mark if is_of_all else f"{mark}: {layers}")
    return tuple(found)


def _measured_place(place: DrawnPlace, candidate: Candidate) -> DrawnPlace:
    if not place.ranges and place.name != COORDINATOR:
        return place
    profile = candidate.costs.profile
    device = profile.device(place.name)
    kinds = [kind for each in place.ranges for kind in profile.model.layers[slice(*each.layers)]]
    parts = [profile.model.part(kind) for kind in kinds]
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


def _measured(bare: Topology, hops: Sequence[DrawnHop], profile: Profile) -> list[DrawnHop]:
    """The hops with the measured speeds."""
    speeds = {(link.source, link.target): link for link in profile.links}
    names = [place.name for place in bare.places]
    found = []
    for hop in hops:
        source, target = names[hop.source], names[hop.target]
        there, back = speeds.get((source, target)), speeds.get((target, source))
        found.append(replace(hop, link=replace(hop.link, forward=there, backward=back)))
    return found


def _prediction(candidate: Candidate) -> str:
    tokens = candidate.costs.num_samples * candidate.costs.profile.model.tokens_per_sample
    seconds = candidate.step_seconds
    rate = f"{tokens / seconds:,.0f} tokens/s, " if seconds else ""
    return f"predicted: {rate}bubble {in_percent(candidate.simulation.bubble)}"
