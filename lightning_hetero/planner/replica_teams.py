"""Teams: devices that share a stage as replicas, and the seconds of all their possible stages.

A team is one composite device. For each possible stage it deals the micro-batches so that its
slowest replica ends as early as possible. Its seconds are this replica's, divided by all
micro-batches:

    seconds of a ·  9 of 16 micro-batches ┐
    seconds of b ·  4                     ├ the greatest of these / 16
    seconds of c ·  3                     ┘

So layers are split over teams as over devices, and a device is a team of one. The coordinator may
be in a team.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..plan import COORDINATOR, Dtype, Recompute, ReplicaOptimizer, most_started
from .candidates import Costs, Range
from .costs import BothEnds, Holder, Index, Left, Need, Numbers, fastest_of
from .layer_split import Matrix, only
from .profile import EMBEDDING, HEAD
from .replicas import (
    Counts,
    Team,
    exchange_seconds,
    most_in_flight,
    of_replica,
    optimizer_part,
    whole_counts,
)
from .step_model import busy_seconds_of_media

_MANY_BYTES = 1e9
_NOTHING, _NOTHING_CHOSEN = np.zeros((0, 0)), np.zeros((0, 0), np.int8)


class Way(NamedTuple):
    """How all replicas of a team run their layers."""

    dtype: Dtype
    recompute: Recompute
    optimizer: ReplicaOptimizer | None


class TeamTable(NamedTuple):
    """Every possible stage of a team.

    Args:
        seconds: The composite seconds of a micro-batch, [first, end]; infinite if it does not fit.
        ways: The possible ways; empty for a single process.
        exchange_seconds: Seconds of the exchange, [first, end]; empty without ways.
        chosen: The index of the fastest way, [first, end]; empty without ways.
    """

    seconds: Matrix
    ways: Sequence[Way] = ()
    exchange_seconds: Matrix = _NOTHING
    chosen: npt.NDArray[np.int8] = _NOTHING_CHOSEN


class _Dealt(NamedTuple):
    """The micro-batches of every possible stage, dealt to the replicas.

    Args:
        seconds: As in a `TeamTable`, before memory is asked for.
        counts: The micro-batches of each replica.
    """

    seconds: Matrix
    counts: Counts


class TeamRequest(NamedTuple):
    """The subject of a table; equal requests have equal tables.

    Args:
        names: The processes.
        micro_batches: Pieces of the batch.
        in_flight: The most micro-batches in flight.
        left: The ends of the model on workers.
        ends: The ends of the model on the replicas of this team.
        is_last: Whether the head comes after the layers of the team.
        is_only: Whether this is the only team.
        own: If the coordinator is a replica, the layers of all teams; it has the others alone.
    """

    names: tuple[str, ...]
    micro_batches: int
    in_flight: int
    left: Left
    ends: tuple[str, ...]
    is_last: bool = False
    is_only: bool = False
    own: Range = (0, 0)

    @property
    def is_hosted(self) -> bool:
        """Whether the coordinator is one of the replicas."""
        return COORDINATOR in self.names


def ends_of_team(index: int, last: int, left: Left) -> tuple[str, ...]:
    """The ends of the model on a team of workers; ``last`` is the index of the last team."""
    is_first, is_last = left.embedding and index == 0, left.head and index == last
    return (EMBEDDING,) * is_first + (HEAD,) * is_last


class Tables:
    """The tables of teams, each made once.

    Args:
        costs: The costs of devices and links.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._tables: dict[TeamRequest, TeamTable] = {}
        self._per_layer: dict[tuple[str, ...], float] = {}

    def table(self, request: TeamRequest) -> TeamTable:
        """The table of a team."""
        if request not in self._tables:
            self._tables[request] = self._made(request)
        return self._tables[request]

    def _made(self, request: TeamRequest) -> TeamTable:
        num = self.costs.num_layers + 1
        holders = self.holders(request)
        if len(holders) == 1:
            seconds = holders[0].matrix(request.in_flight)
            pins, (name,) = self.costs.pins, request.names
            seconds = only(seconds, pins[name]) if name in pins else seconds
            return TeamTable(seconds)
        ways = list(_ways(holders, request))
        if not ways:
            return TeamTable(np.full((num, num), np.inf))
        first, end = self._stages(request)
        found = []
        for way in ways:
            if way.recompute != "layers":  # it takes as long as the way before it
                dealt = self._dealt(request, holders, way, first, end)
            found.append(self._fitting(request, holders, way, dealt, first, end))
            if way.dtype == ways[-1].dtype and np.isfinite(found[-1]).all():
                break  # The others are slower, and save memory only.
        seconds, chosen = fastest_of(found)
        exchange = self._exchange(request, holders[0], first, end)
        # A table by the number of layers serves every first layer.
        first, end = np.ogrid[:num, :num]
        if seconds.ndim == 1:
            counts = np.maximum(end - first, 0)
            seconds, exchange, chosen = seconds[counts], exchange[counts], chosen[counts]
        is_stage = first < end
        if EMBEDDING in request.ends:
            is_stage &= first == 0
        if HEAD in request.ends:
            is_stage &= end == num - 1
        seconds = np.where(is_stage, seconds, np.inf)
        return TeamTable(seconds, ways, exchange, chosen)

    def holders(self, request: TeamRequest) -> list[Holder]:
        """The devices of a team."""
        size = self.costs.size(request.micro_batches)
        return [self.costs.holder(name, size, request.ends) for name in request.names]

    def _stages(self, request: TeamRequest) -> tuple[Index, Index]:
        """The first layer and the end of each stage; if only the number of layers counts, of the
        stages from layer 0 on."""
        num = self.costs.num_layers + 1
        if EMBEDDING in request.ends or len(self.costs.profile.model.kinds) == 1:
            return np.zeros(num, np.int64), np.arange(num)
        first, end = np.meshgrid(np.arange(num), np.arange(num), indexing="ij")
        return np.minimum(first, end), end

    def own(self, request: TeamRequest) -> BothEnds:
        """The coordinator."""
        return self.costs.both_ends(self.costs.size(request.micro_batches), request.left)

    def fixed_seconds(self, request: TeamRequest) -> list[float]:
        """The seconds of each replica in a step besides its micro-batches of the stage."""
        if not request.is_hosted:
            return [0.0] * len(request.names)
        own = float(self.own(request).matrix(request.in_flight)[request.own])
        seconds = own * request.micro_batches
        return [seconds if name == COORDINATOR else 0.0 for name in request.names]

    def hop_seconds(self, request: TeamRequest) -> list[float]:
        """For each replica of an only team, a micro-batch's seconds on the busiest medium between
        it and the coordinator; 0 in other teams, because replicas there have many links."""
        if not request.is_only:
            return [0.0] * len(request.names)
        found, size = [], self.costs.size(request.micro_batches)
        for name in request.names:
            there, back = self.costs.hops([COORDINATOR, name], size, request.left)
            media = busy_seconds_of_media([*there, *back])
            found.append(0.0 if name == COORDINATOR else max(media.values()))
        return found

    def _dealt(
        self, request: TeamRequest, holders: Sequence[Holder], way: Way, first: Index, end: Index
    ) -> _Dealt:
        options = [holder.option(way.dtype, way.recompute) for holder in holders]
        pairs = list(zip(holders, options, strict=True))
        hops = self.hop_seconds(request)
        each = np.stack(
            [
                np.maximum(h.seconds(option, first, end), hop)
                for (h, option), hop in zip(pairs, hops, strict=True)
            ]
        )
        fixed = np.array(self.fixed_seconds(request))
        fixed = fixed.reshape(-1, *[1] * (each.ndim - 1))
        is_possible = np.isfinite(each).all(axis=0) & math.isfinite(fixed.max())
        # A replica without micro-batches would only cost memory and an exchange.
        if request.micro_batches < len(holders) or not is_possible.any():
            return _Dealt(np.full(each.shape[1:], np.inf), np.zeros_like(each, np.int64))
        each = np.where(is_possible, each, 1.0)
        counts = whole_counts(each, request.micro_batches, fixed)
        seconds = (fixed + counts * each).max(axis=0) / request.micro_batches
        return _Dealt(np.where(is_possible, seconds, np.inf), counts)

    def _fitting(
        self,
        request: TeamRequest,
        holders: Sequence[Holder],
        way: Way,
        dealt: _Dealt,
        first: Index,
        end: Index,
    ) -> Matrix:
        """The seconds; infinite where the layers do not fit."""
        is_possible = np.isfinite(dealt.seconds)
        if not is_possible.any():
            return dealt.seconds
        for index, holder in enumerate(holders):
            option = holder.option(way.dtype, way.recompute)
            most = self._in_flight(request, index, dealt.counts)
            need = holder.need(option, first, end, most)
            is_possible &= self._need(request, index, way, need, most).total <= holder.usable_bytes
        return np.where(is_possible, dealt.seconds, np.inf)

    def _in_flight(self, request: TeamRequest, index: int, counts: Counts) -> Numbers:
        """The most micro-batches in flight on a replica, by its counts."""
        total = np.full_like(counts[index], request.micro_batches)
        if request.is_hosted and request.names[index] != COORDINATOR:
            # As in `as_replicas`.
            total = total - counts[request.names.index(COORDINATOR)]
        started = most_started(request.in_flight, request.left.embedding)
        most: Numbers = most_in_flight(counts[index], total, started, request.in_flight)
        return most

    def _need(
        self, request: TeamRequest, index: int, way: Way, need: Need, in_flight: Numbers
    ) -> Need:
        """The memory need of a replica; the coordinator's includes the ends of the model."""
        name = request.names[index]
        part = optimizer_part(name, way.optimizer, len(request.names))
        if name != COORDINATOR:
            return of_replica(need, part)
        own = self.own(request)
        options = own.options_for(*request.own, request.in_flight)
        ends = own.need(options, *request.own, request.in_flight)
        return ends + of_replica(need, part, in_flight * self.head_bytes(request))

    def head_bytes(self, request: TeamRequest) -> float:
        """The bytes of the coordinator's head and loss for a micro-batch if they come after this
        team; otherwise 0."""
        head = self.own(request).behind.ends.get(HEAD)
        cost = head.cost if head is not None and request.is_last else None
        return 0.0 if cost is None else cost.peak_bytes

    def exchange_seconds_per_layer(self, names: tuple[str, ...]) -> float:
        """The seconds in which a team exchanges gradients and weights of the model's smallest
        layer, without latency."""
        if names not in self._per_layer:
            model = self.costs.profile.model
            num_bytes = min(model.part(kind).gradient_bytes for kind in model.kinds)
            team = exchange_seconds([Team(names, _MANY_BYTES)], self.costs.link)
            latency = exchange_seconds([Team(names, 1.0)], self.costs.link)
            per_byte = max(0.0, team - latency) / _MANY_BYTES
            self._per_layer[names] = num_bytes * per_byte if len(names) > 1 else 0.0
        return self._per_layer[names]

    def _exchange(self, request: TeamRequest, holder: Holder, first: Index, end: Index) -> Matrix:
        """The seconds of the exchange: latency, and a part in proportion to the bytes."""
        num_bytes = np.asarray(holder.need(holder.options[0], first, end, 1).gradients)
        little, much = (
            exchange_seconds([Team(request.names, amount)], self.costs.link)
            for amount in (1.0, 1.0 + _MANY_BYTES)
        )
        per_byte = (much - little) / _MANY_BYTES
        return np.where(num_bytes > 0, little + (num_bytes - 1) * per_byte, 0.0)


def _ways(holders: Sequence[Holder], request: TeamRequest) -> Iterator[Way]:
    """The ways that all replicas can run. Replicas on workers each step a part of the parameters:
    this is never slower and takes the least memory."""
    common = [
        [(option.dtype, option.recompute) for option in h.options if option.weights is None]
        for h in holders
    ]
    for dtype, recompute in max(common, key=len):
        # The coordinator recomputes by layers, and its options say no more than that.
        if all((dtype, bool(recompute)) in other for other in common):
            yield Way(dtype, recompute, None if request.is_hosted else "split")
