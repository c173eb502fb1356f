"""Candidates: devices with their layers, as the simulator plays them and as plans.

A candidate is a list of seats in the order of the layers. A seat is a process with consecutive
layers. The coordinator has the first and the last seat; both may be without layers:

    coordinator ─────────────▶ worker 1 ─▶ worker 2 ─▶ worker 1 ─▶ coordinator
    start, embedding, layers   layers      layers      layers      layers, head, loss

A worker may have any number of seats. Seats with the same layers are replicas of one stage, each
with its part of the micro-batches; the coordinator may have such a seat beside its other two.

The embedding may be on the worker with the first layer. Then the coordinator still starts each
micro-batch, with masks, positions and the user's own code, and sends token ids. The head may be on
the worker with the last layer: then the coordinator sends it labels, and it returns losses.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise, product

import msgspec

from ..pipeline.rule import loss_waits, starts_first_with
from ..plan import (
    COORDINATOR,
    Narrowing,
    Plan,
    ReplicaOptimizer,
    StagePlan,
    most_started,
)
from .bounds import least_seconds
from .costs import (
    BOTH_HERE,
    END,
    START,
    BothEnds,
    Cost,
    End,
    Holder,
    Left,
    Need,
    Option,
    cost_at,
    crossing_bytes,
    layer_seconds,
)
from .profile import EMBEDDING, HEAD, DeviceProfile, Link, Profile
from .replicas import (
    ReplicaPart,
    Team,
    exchange_seconds,
    most_in_flight,
    of_replica,
    optimizer_part,
)
from .safe_mode import safe_step_seconds
from .simulation import Simulation, predict, predict_below
from .step_model import Hop, Pipeline, Replicas, StageTimes, busy_seconds_of_media
from .token_slices import SliceHolder

Range = tuple[int, int]
Hops = tuple[Sequence[Hop], Sequence[Hop]]


class Costs:
    """Costs of devices and links, computed once for each kind of device.

    Args:
        profile: A profile with a batch size.
        pins: Layers that a device must hold.

    Attributes:
        kinds: A key for each device; it is equal for devices with equal measurements.
        num_batches: The batches of an accumulation window.
        num_samples: The samples of all these batches.
        is_safe_mode: Whether ``training_step`` sees whole batches, and only workers have pieces;
            also with slices along the tokens.
    """

    def __init__(self, profile: Profile, pins: Mapping[str, Range]) -> None:
        self.profile = profile
        self.pins = pins
        self.num_batches = profile.accumulate_grad_batches
        self.batch_size = profile.batch_size or 1
        self.num_samples = self.batch_size * self.num_batches
        self.num_layers = len(profile.model.layers)
        is_cut_whole = profile.settings.get("cut") == "boundary"
        self.is_safe_mode = is_cut_whole or profile.model.slices is not None
        self.kinds = {device.name: _kind_of(device) for device in profile.devices}
        self._links = {(link.source, link.target): link for link in profile.links}
        self._holders: dict[tuple[bytes, int, tuple[str, ...]], Holder] = {}
        self._both_ends: dict[tuple[int, Left], BothEnds] = {}
        self._hops: dict[tuple[str, str, float], Hop] = {}
        self._hops_of: dict[tuple[tuple[str, ...], int, Left], Hops] = {}

    def size(self, micro_batches: int) -> int:
        """Samples in the largest micro-batch, if the window has this many."""
        return math.ceil(self.num_samples / micro_batches)

    def in_a_piece(self, size: int) -> str:
        """The size of a micro-batch, or of a slice along the tokens, in words."""
        if self.profile.model.slices is not None:
            return f"about {size} tokens in a slice"
        return f"{size} samples in a micro-batch"

    def holder(self, name: str, size: int, ends: tuple[str, ...] = ()) -> Holder:
        """The device at a micro-batch size, with these ends of the model."""
        key = (self.kinds[name], size, ends)
        if key not in self._holders:
            device, made = self.profile.device(name), [self._end(e, name, size) for e in ends]
            waits = self.num_batches > 1
            if (slices := self.profile.model.slices) is not None:
                args = device, self.profile.model, size, slices, self.batch_size, made
                return self._holders.setdefault(key, SliceHolder(*args))
            kept = math.ceil(self.batch_size / size) if self.is_safe_mode else 1
            self._holders[key] = Holder(device, self.profile.model, size, made, waits, kept)
        return self._holders[key]

    def both_ends(self, size: int, left: Left = BOTH_HERE) -> BothEnds:
        """The coordinator at a micro-batch size, without these ends of the model."""
        key = (size, left)
        if key not in self._both_ends:
            ends = ends_here(left)
            front, behind = (self.holder(COORDINATOR, size, each) for each in ends)
            self._both_ends[key] = BothEnds(front, behind)
        return self._both_ends[key]

    def _end(self, end: str, name: str, size: int) -> End:
        """The cost of an end of the model.

        Both ends were measured on the coordinator, with the embedding there. Nearly all of the
        measured forward is the start, and this stays on the coordinator. Backward, optimizer step
        and memory belong to the embedding. A worker's factor for them is its factor for decoder
        layers, and so is its factor for a head that was not measured there.
        """
        if end == END:
            return End(END, Cost(0.0, 0.0, 0.0, 0.0))
        own, model = self.profile.device(COORDINATOR), self.profile.model
        if end == HEAD and name != COORDINATOR and self.measured_head(name):
            there = self.profile.device(name)
            steps = own.optimizer_seconds.get(HEAD, 0.0) * self._slowdown(name, size)
            found = cost_at(there, HEAD, model.dtype, False, size)
            return End(HEAD, found, there.optimizer_seconds.get(HEAD, steps))
        part = EMBEDDING if end == START else end
        cost = cost_at(own, part, model.dtype, False, size)
        optimizer_seconds = own.optimizer_seconds.get(end, 0.0)
        if cost is not None and end == START:
            return End(START, Cost(cost.forward_seconds, 0.0, 0.0, 0.0))
        if cost is not None and name != COORDINATOR:
            factor = self._slowdown(name, size)
            forward = cost.forward_seconds * factor if end == HEAD else 0.0
            backward = cost.backward_seconds * factor
            cost = cost._replace(forward_seconds=forward, backward_seconds=backward)
            optimizer_seconds *= factor
        return End(end, cost, optimizer_seconds)

    def measured_head(self, name: str) -> bool:
        """Whether the head was measured on a device, in the user's precision."""
        model = self.profile.model
        timings = self.profile.device(name).timings
        return any((t.part, t.dtype) == (HEAD, model.dtype) for t in timings)

    def may_hold_head(self, team: Sequence[str]) -> bool:
        """Whether all of these processes are workers that may have the head and the loss."""
        may_leave = self.profile.model.head_may_leave and not self.is_safe_mode
        return may_leave and all(n != COORDINATOR and self.measured_head(n) for n in team)

    def _slowdown(self, name: str, size: int) -> float:
        """The worker's seconds for decoder layers over the coordinator's; 1 if one is unknown."""
        model = self.profile.model
        own, its = (
            layer_seconds(self.profile.device(each), model, model.dtype, size)
            for each in (COORDINATOR, name)
        )
        return its / own if 0 < own < math.inf and its < math.inf else 1.0

    def link(self, source: str, target: str) -> Link:
        """The link of this direction, measured or assumed."""
        speed = self.profile.default_link
        assumed = Link(source, target, speed.latency_seconds, speed.bytes_per_second)
        return self._links.get((source, target), assumed)

    def hops(self, names: Sequence[str], size: int, left: Left) -> Hops:
        """The forward and the backward hop from each stage, the coordinator's stage first, without
        rounding."""
        key = (tuple(names), size, left)
        if key not in self._hops_of:
            self._hops_of[key] = boundary_hops(self, names, size, left)
        return self._hops_of[key]

    def hop(self, source: str, target: str, num_bytes: float) -> Hop:
        """The transfer of this many bytes over a link."""
        key = (source, target, num_bytes)
        if key not in self._hops:
            link = self.link(source, target)
            medium = link.shared or f"{link.source} to {link.target}"
            self._hops[key] = Hop(medium, num_bytes / link.bytes_per_second, link.latency_seconds)
        return self._hops[key]


def lefts_of_any(costs: Costs, workers: Sequence[str]) -> list[Left]:
    """Whether the embedding and the head may be on some of these workers: the possible pairs, the
    last one with most ends on workers."""
    may_leave = costs.profile.model.embedding_may_leave and bool(workers)
    return pairs_of(may_leave, any(costs.may_hold_head([name]) for name in workers))


def pairs_of(embedding_may_leave: bool, head_may_leave: bool) -> list[Left]:
    """Whether embedding and head have left the coordinator: the possible pairs, the last one with
    most ends on workers."""
    ways = product((False, True)[: 1 + embedding_may_leave], (False, True)[: 1 + head_may_leave])
    return [Left(*each) for each in ways]


def ends_here(left: Left) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The ends of the coordinator's first and last seat."""
    return (START if left.embedding else EMBEDDING,), (END if left.head else HEAD,)


def _kind_of(device: DeviceProfile) -> bytes:
    name = COORDINATOR if device.name == COORDINATOR else ""
    return msgspec.json.encode(msgspec.structs.replace(device, name=name))


@dataclass(frozen=True)
class Seat:
    """A process with consecutive layers.

    Args:
        name: The process.
        layers: Its layers here; the coordinator's seat may be empty.
        option: How it runs them.
        ends: The ends of the model here, as for `Holder`.
        part: Its part in a stage with replicas; None if it has the stage alone.
    """

    name: str
    layers: Range
    option: Option
    ends: tuple[str, ...] = ()
    part: ReplicaPart | None = None

    @property
    def num_layers(self) -> int:
        """The number of its layers."""
        return self.layers[1] - self.layers[0]

    @property
    def layer_seconds(self) -> tuple[float, float]:
        """Forward and backward of its layers for one micro-batch."""
        first, end = self.layers
        forward, backward = self.option.forward, self.option.backward
        return float(forward[end] - forward[first]), float(backward[end] - backward[first])

    @property
    def has_embedding(self) -> bool:
        """Whether it is a worker with the embedding."""
        return EMBEDDING in self.ends and self.name != COORDINATOR

    @property
    def has_head(self) -> bool:
        """Whether it is a worker with the head."""
        return HEAD in self.ends and self.name != COORDINATOR


@dataclass(frozen=True)
class Candidate:
    """Devices with layers for each.

    Args:
        costs: The costs of devices and links.
        seats: In the order of the layers. The first and the last one are the coordinator's.
        micro_batches: Pieces of all batches of the window, equally many of each.
        in_flight: The most micro-batches in flight.
        narrowings: The rounding of a given plan at its boundaries; empty for the planner's own
            candidates.
    """

    costs: Costs
    seats: Sequence[Seat]
    micro_batches: int
    in_flight: int
    narrowings: Sequence[Narrowing] = ()

    @property
    def size(self) -> int:
        """Samples in a micro-batch."""
        return self.costs.size(self.micro_batches)

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """The workers, each once, in the order of their first layers."""
        names = (seat.name for seat in self.seats[1:-1])
        return tuple(dict.fromkeys(name for name in names if name != COORDINATOR))

    @property
    def processes(self) -> tuple[str, ...]:
        """The coordinator and the workers."""
        return (COORDINATOR, *self.workers)

    @property
    def left(self) -> Left:
        """The ends of the model on workers."""
        return Left(START in self.seats[0].ends, END in self.seats[-1].ends)

    @property
    def ranges(self) -> list[Range]:
        """The layers of each seat."""
        return [seat.layers for seat in self.seats]

    @property
    def ranges_of_teams(self) -> list[Range]:
        """The layers of each stage, the coordinator's at both ends."""
        between = [team[0].layers for team in self.teams]
        return [self.seats[0].layers, *between, self.seats[-1].layers]

    @property
    def has_lone_seats(self) -> bool:
        """Whether each worker has one seat, and its stage alone."""
        return len(self.workers) == len(self.seats) - 2 and not self.has_replicas

    @cached_property
    def teams(self) -> list[list[Seat]]:
        """The seats of each stage after the coordinator's first one; several are replicas."""
        between = groupby(self.seats[1:-1], key=lambda seat: seat.layers)
        return [list(seats) for _, seats in between]

    @property
    def has_replicas(self) -> bool:
        """Whether several processes hold the same stage."""
        return any(seat.part is not None for seat in self.seats)

    def seats_of(self, name: str) -> list[Seat]:
        """The seats of a process."""
        return [seat for seat in self.seats if seat.name == name]

    def holder(self, seat: Seat) -> Holder:
        """The device of a seat."""
        return self.costs.holder(seat.name, self.size, seat.ends)

    @cached_property
    def pipeline(self) -> Pipeline:
        """The step for the simulator."""
        names = [seat.name for seat in self.seats[:-1]]
        numbers = {name: number for number, name in enumerate(self.processes)}
        own, behind = self.seats[0], self.seats[-1]
        loss_seconds = self.holder(behind).end_seconds(HEAD) + sum(behind.layer_seconds)
        loss_seconds += self._own_software
        head = None if self.left.head else self.holder(behind).ends[HEAD].cost
        return Pipeline(
            [self._times(seat) for seat in self.seats[:-1]],
            loss_seconds,
            *self._hops(names),
            self.micro_batches,
            self.in_flight,
            starts_first=starts_first_with(own.num_layers, behind.num_layers),
            max_started=self.max_started,
            processes=() if self.has_lone_seats else [numbers[name] for name in names],
            replicas=self._replicas() if self.has_replicas else None,
            num_batches=self.costs.num_batches,
            loss_backward_seconds=behind.layer_seconds[1] + (head.backward_seconds if head else 0),
            loss_waits=loss_waits(len(self.processes) - 1, own.num_layers, behind.num_layers),
        )

    @property
    def max_started(self) -> int:
        """The bound of the plan for micro-batches started on the coordinator."""
        return most_started(self.in_flight, sends_token_ids=self.left.embedding)

    def _hops(self, names: Sequence[str]) -> Hops:
        if self.has_replicas:
            return (), ()
        if self.narrowings:
            return boundary_hops(self.costs, names, self.size, self.left, self.narrowings)
        return self.costs.hops(names, self.size, self.left)

    def _replicas(self) -> Replicas:
        """The stage and the share of each seat but the last, and the hops between their devices."""
        stages = [[self.seats[0]], *self.teams]
        numbers = [number for number, team in enumerate(stages) for _ in team]
        shares = [1 if seat.part is None else seat.part.share for seat in self.seats[:-1]]
        return Replicas(numbers, shares, *self._hops_between(numbers), self.exchange_seconds)

    def _hops_between(
        self, numbers: Sequence[int]
    ) -> tuple[dict[tuple[int, int], Hop], dict[tuple[int, int], Hop]]:
        model, last = self.costs.profile.model, numbers[-1]
        crossing = crossing_bytes(model, last + 1, self.size, self.left, self.narrowings)
        there: dict[tuple[int, int], Hop] = {}
        back: dict[tuple[int, int], Hop] = {}
        names = [seat.name for seat in self.seats]
        places = [*numbers, last + 1]
        for one, other in product(range(len(names)), repeat=2):
            if places[other] != places[one] + 1 or names[one] == names[other]:
                continue
            # The coordinator is entry 0 at both ends.
            ends = tuple(0 if names[each] == COORDINATOR else each for each in (one, other))
            forward, backward = crossing[places[one]]
            there[ends[0], ends[1]] = self.costs.hop(names[one], names[other], forward)
            back[ends[1], ends[0]] = self.costs.hop(names[other], names[one], backward)
        return there, back

    @cached_property
    def exchange_seconds(self) -> float:
        """The seconds of a step in which replicas exchange gradients and weights."""
        return exchange_seconds(self._exchanging, self.costs.link)

    @property
    def _exchanging(self) -> list[Team]:
        return [
            Team(
                [seat.name for seat in team],
                self.gradient_bytes(team[0]),
                is_split=team[0].part is not None and team[0].part.optimizer == "split",
            )
            for team in self.teams
            if len(team) > 1
        ]

    def bytes_sent(self, source: str, target: str) -> float:
        """The bytes from one process to another in an optimizer step."""
        pipeline, names = self.pipeline, [seat.name for seat in self.seats]
        replicas = pipeline.replicas
        numbers = range(len(names)) if replicas is None else replicas.numbers
        crossing = crossing_bytes(
            self.costs.profile.model,
            pipeline.num_stages,
            self.costs.num_samples,
            self.left,
            self.narrowings,
        )
        found = 0.0
        for way, count in pipeline.ways.items():
            for one, other in pairwise([*way, 0]):
                forward, backward = crossing[numbers[other] - 1 if other else numbers[one]]
                ends, part = (names[one], names[other]), count / self.micro_batches
                found += part * forward * (ends == (source, target))
                found += part * backward * (ends == (target, source))
        for team in self._exchanging:
            for one_name, other_name, num_bytes in team.transfers():
                found += num_bytes * ({one_name, other_name} == {source, target})
        return found

    def gradient_bytes(self, seat: Seat) -> float:
        """The bytes of the gradients of a seat's parameters."""
        need = self.holder(seat).need(seat.option, *seat.layers, in_flight=1)
        return float(need.gradients)

    def _times(self, seat: Seat) -> StageTimes:
        holder, (forward, backward) = self.holder(seat), seat.layer_seconds
        ends, optimizer = (
            (holder.before_layers, holder.behind_layers),
            holder.optimizer_seconds(*seat.layers),
        )
        if seat.part is not None:
            optimizer *= optimizer_part(seat.name, seat.part.optimizer, seat.part.num)
        if seat is self.seats[0]:
            last = self.seats[-1]
            optimizer += self.holder(last).optimizer_seconds(*last.layers)
        forward += sum(each.forward_seconds for each in ends)
        backward += sum(each.backward_seconds for each in ends)
        software = self._own_software if seat is self.seats[0] else holder.software_seconds / 2
        return StageTimes(forward + software, backward + software, optimizer)

    @property
    def _own_software(self) -> float:
        """The seconds of the coordinator's software in each of its three actions of a micro-batch:
        start, loss and last backward; 0 without workers."""
        ends = self.costs.both_ends(self.size, Left(self.left.embedding))
        return ends.software_seconds / 3 if self.workers else 0.0

    @property
    def process_seconds(self) -> dict[str, float]:
        """The seconds of each process for one micro-batch; the coordinator's include the loss.

        A replica's are the mean over all micro-batches, also the ones of other replicas."""
        pipeline, num = self.pipeline, self.micro_batches
        seconds = [
            (stage.forward_seconds + stage.backward_seconds) * count / num
            for stage, count in zip(pipeline.stages, pipeline.counts, strict=True)
        ]
        seconds[0] += pipeline.loss_seconds
        return dict(zip(self.processes, pipeline.sums(seconds), strict=True))

    @property
    def bottleneck_seconds(self) -> float:
        """The slowest process's time for one micro-batch."""
        return max(self.process_seconds.values())

    @property
    def busy_seconds_of_media(self) -> dict[str, float]:
        """The seconds of one micro-batch on each link or shared medium."""
        if self.pipeline.is_alone:
            return {}
        if self.has_replicas:
            return self.pipeline.media_seconds
        hops = [*self.pipeline.forward_hops, *self.pipeline.backward_hops]
        return busy_seconds_of_media(hop for hop in hops if hop != NO_HOP)

    @cached_property
    def least_seconds(self) -> float:
        """A lower bound of the step, without a simulation."""
        return least_seconds(self.pipeline)

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated step; in the safe mode, its spans are of the usual mode."""
        found, seconds = predict(self.pipeline), self._safe_seconds
        return found if seconds is None else replace(found, step_seconds=seconds)

    @property
    def step_seconds(self) -> float:
        """The predicted step."""
        seconds = self._safe_seconds
        return self.simulation.step_seconds if seconds is None else seconds

    @cached_property
    def _safe_seconds(self) -> float | None:
        """The step in the safe mode; None in the usual mode, and if both take equally long."""
        return safe_step_seconds(self.pipeline) if self.costs.is_safe_mode else None

    @property
    def num_tokens(self) -> int:
        """The tokens of an optimizer step."""
        return self.costs.num_samples * self.costs.profile.model.tokens_per_sample

    @property
    def tokens_per_second(self) -> float:
        """The speed; infinite if the step takes 0 seconds."""
        seconds = self.step_seconds
        return self.num_tokens / seconds if seconds > 0 else math.inf

    def is_below(self, seconds: float) -> bool:
        """Whether the predicted step is shorter; a simulation stops early once it cannot be."""
        known = vars(self)
        if "simulation" in known or self.costs.is_safe_mode:
            return self.step_seconds < seconds
        if seconds <= known.get("_at_least", 0.0):
            return False
        found = predict_below(self.pipeline, seconds)
        if found is None:
            known["_at_least"] = seconds
            return False
        known["simulation"] = found  # the value of the cached property
        return True

    @property
    def identity(self) -> Hashable:
        """Equal for candidates of one search with the same plan."""
        same = self.workers, tuple(self.ranges), self.micro_batches, self.in_flight, self.left
        if not self.has_replicas:
            return same
        return (*same, *((seat.name, seat.part) for seat in self.seats))

    def need(self, name: str) -> Need:
        """The memory need of a process."""
        return self.need_of(self.seats_of(name))

    def need_of(self, seats: Sequence[Seat]) -> Need:
        """The memory need of seats of one process, which may differ from its present seats."""
        first, *others = map(self._need, seats)
        return sum(others, start=first)

    def _need(self, seat: Seat) -> Need:
        holder, part = self.holder(seat), seat.part
        if part is None:
            return holder.need(seat.option, *seat.layers, self.in_flight)
        count = most_in_flight(part.share, part.total, self.max_started, self.in_flight)
        need = holder.need(seat.option, *seat.layers, count)
        stepped = optimizer_part(seat.name, part.optimizer, part.num)
        return of_replica(need, stepped, count * part.kept_bytes)

    def plan(self) -> Plan:
        """The candidate as a plan, without empty stages."""
        held = [[self.seats[0]], *self.teams, [self.seats[-1]]]
        stages = [self._stage_plan(team) for team in held if team[0].num_layers]
        return Plan(stages, self.micro_batches // self.costs.num_batches, self.in_flight)

    def _stage_plan(self, team: Sequence[Seat]) -> StagePlan:
        seat, dtype = team[0], self.costs.profile.model.dtype
        plan = StagePlan(
            [each.name for each in team],
            seat.layers,
            seat.option.recompute,
            None if seat.option.dtype == dtype else seat.option.dtype,
            embedding=seat.has_embedding,
            weights=seat.option.weights,
            head=seat.has_head,
        )
        parts = [each.part for each in team if each.part is not None]
        if not parts:
            return plan
        shares, optimizer = [part.share for part in parts], parts[0].optimizer
        return replace(plan, shares=shares, optimizer=None if optimizer == "each" else optimizer)


def as_replicas(
    seats: Sequence[Seat],
    shares: Sequence[int],
    optimizer: ReplicaOptimizer | None,
    head_bytes: float = 0.0,
) -> list[Seat]:
    """Seats as the replicas of one stage.

    Args:
        seats: A seat of each replica, with the same layers.
        shares: How many micro-batches of a round each one runs.
        optimizer: As in a `StagePlan`.
        head_bytes: The bytes of head and loss for a micro-batch, if this is the last stage on
            workers. The coordinator's own micro-batches may keep them until their loss.
    """
    own = sum(n for seat, n in zip(seats, shares, strict=True) if seat.name == COORDINATOR)
    is_hosted = any(seat.name == COORDINATOR for seat in seats)
    found = []
    for seat, share in zip(seats, shares, strict=True):
        is_own, total = seat.name == COORDINATOR, sum(shares)
        part = ReplicaPart(
            share,
            # The coordinator's turns come last in a round, and its own micro-batches may end before
            # earlier ones on workers.
            total if is_own else total - own,
            len(seats),
            optimizer if is_hosted else optimizer or "each",
            head_bytes if is_own else 0.0,
        )
        found.append(replace(seat, part=part))
    return found


NO_HOP = Hop("inside a process", 0.0)


def boundary_hops(
    costs: Costs,
    names: Sequence[str],
    size: int,
    left: Left = BOTH_HERE,
    narrowings: Sequence[Narrowing] = (),
) -> Hops:
    """The forward and the backward hop from each stage, the coordinator's stage first."""
    crossing = crossing_bytes(costs.profile.model, len(names), size, left, narrowings)
    there, back = ([each[way] for each in crossing] for way in (0, 1))
    behind, before = [*names[1:], names[0]], [names[-1], *names[:-1]]
    return (
        [_hop(costs, *each) for each in zip(names, behind, there, strict=True)],
        [_hop(costs, *each) for each in zip(names, before, [back[-1], *back[:-1]], strict=True)],
    )


def _hop(costs: Costs, source: str, target: str, num_bytes: float) -> Hop:
    return NO_HOP if source == target else costs.hop(source, target, num_bytes)


def spans_of(counts: Sequence[int]) -> list[Range]:
    """Consecutive ranges with these numbers of layers."""
    return list(pairwise(accumulate(counts, initial=0)))
