"""Teams: devices that share a stage as replicas, and the exact split of layers over teams.

A team is one composite device. For each possible stage it has the counts of micro-batches that let
its slowest replica end first, and the seconds of that one, divided by all micro-batches:

    seconds of a ·  9 of 16 micro-batches ┐
    seconds of b ·  4                     ├ the greatest of these / 16
    seconds of c ·  3                     ┘

So the split over teams is that over devices. A team may have the coordinator, which then has no
other layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..plan import COORDINATOR, Dtype, ReplicaOptimizer, most_started
from .candidates import Candidate, Costs, Range, Seat, as_replicas
from .costs import BothEnds, Holder, Index, Need, Numbers, fastest_of
from .layer_split import Matrix, best_splits, nowhere_but
from .layer_split import Numbers as Vector
from .profile import EMBEDDING, HEAD
from .replicas import (
    Counts,
    Team,
    exchange_seconds,
    most_in_flight,
    of_replica,
    optimizer_part,
    shares_of,
    whole_counts,
)
from .step_model import busy_seconds_of_media

MOST_COMPARED = 1000
"""Splits of one arrangement that are compared."""

_MANY_BYTES = 1e9
_INSTANT = 1e-12


class Way(NamedTuple):
    """How the replicas of a team run their layers; one way for all of them."""

    dtype: Dtype
    recompute: bool
    optimizer: ReplicaOptimizer | None


@dataclass(frozen=True)
class TeamTable:
    """Every possible stage of a team.

    Args:
        seconds: The composite seconds of a micro-batch, [first, end]; infinite if it does not fit.
        exchange_seconds: Seconds of the exchange, [first, end].
        ways: The ways that were tried; empty for a single worker.
        chosen: The index of the fastest way, [first, end].
        is_limited: Whether memory leaves out a stage that would be possible otherwise, or one
            without recomputation.
    """

    seconds: Matrix
    exchange_seconds: Matrix
    ways: Sequence[Way]
    chosen: npt.NDArray[np.int8]
    is_limited: bool = False


@dataclass(frozen=True)
class _Request:
    """What a table is for; equal requests have equal tables.

    Args:
        names: The processes.
        micro_batches: Pieces of the batch.
        in_flight: The most micro-batches in flight.
        embedding_left: Whether a worker has the embedding.
        has_embedding: Whether the replicas of this team have it.
        is_last: Whether the coordinator's head is behind the team.
        is_only: Whether there is no other team.
        own: The layers that the coordinator does not have for itself, if it is a replica.
    """

    names: tuple[str, ...]
    micro_batches: int
    in_flight: int
    embedding_left: bool
    has_embedding: bool
    is_last: bool
    is_only: bool
    own: Range = (0, 0)

    @property
    def is_hosted(self) -> bool:
        """Whether the coordinator is one of the replicas."""
        return COORDINATOR in self.names


class Tables:
    """The tables of teams, each made once.

    Args:
        costs: The costs of devices and links.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._tables: dict[_Request, TeamTable] = {}
        self._per_layer: dict[tuple[str, ...], float] = {}

    def table(self, request: _Request) -> TeamTable:
        """The table of a team."""
        if request not in self._tables:
            self._tables[request] = self._made(request)
        return self._tables[request]

    def _made(self, request: _Request) -> TeamTable:
        num = self.costs.num_layers + 1
        holders = self.holders(request)
        if len(holders) == 1:
            seconds = holders[0].matrix(request.in_flight)
            is_limited = not np.array_equal(seconds, holders[0].matrix(in_flight=1))
            no_way = np.zeros((num, num), np.int8)
            return TeamTable(seconds, np.zeros((num, num)), (), no_way, is_limited)
        ways = list(_ways(holders, request))
        if not ways:
            no_stage = np.full((num, num), np.inf)
            return TeamTable(no_stage, np.zeros((num, num)), (), np.zeros((num, num), np.int8))
        first, end = self._stages(request)
        found = []
        for way in ways:
            found.append(self._seconds(request, holders, way, first, end))
            if way.dtype == ways[-1].dtype and np.isfinite(found[-1]).all():
                break  # The others are slower, and save memory only.
        is_limited = not all(
            np.isfinite(each).all()
            for each, way in zip(found, ways, strict=False)
            if not way.recompute
        )
        seconds, chosen = fastest_of(found)
        exchange = self._exchange(request, holders[0], first, end)
        # A table by the number of layers serves every first layer.
        first, end = np.ogrid[:num, :num]
        if seconds.ndim == 1:
            counts = np.maximum(end - first, 0)
            seconds, exchange, chosen = seconds[counts], exchange[counts], chosen[counts]
        is_stage = first < end if not request.has_embedding else (first == 0) & (end > 0)
        seconds = np.where(is_stage, seconds, np.inf)
        return TeamTable(seconds, exchange, ways, chosen, is_limited)

    def holders(self, request: _Request) -> list[Holder]:
        """The devices of a team."""
        size = self.costs.size(request.micro_batches)
        ends = (EMBEDDING,) if request.has_embedding else ()
        return [self.costs.holder(name, size, ends) for name in request.names]

    def _stages(self, request: _Request) -> tuple[Index, Index]:
        """The first layer and the end of each stage, or, where only their number counts, of each
        stage from layer 0 on."""
        num = self.costs.num_layers + 1
        if request.has_embedding or len(self.costs.profile.model.kinds) == 1:
            return np.zeros(num, np.int64), np.arange(num)
        first, end = np.meshgrid(np.arange(num), np.arange(num), indexing="ij")
        return np.minimum(first, end), end

    def own(self, request: _Request) -> BothEnds:
        """The coordinator."""
        return self.costs.both_ends(self.costs.size(request.micro_batches), request.embedding_left)

    def fixed_seconds(self, request: _Request) -> list[float]:
        """What each replica has to do besides its micro-batches of the stage, in a step."""
        if not request.is_hosted:
            return [0.0] * len(request.names)
        own = float(self.own(request).matrix(request.in_flight)[request.own])
        seconds = own * request.micro_batches
        return [seconds if name == COORDINATOR else 0.0 for name in request.names]

    def hop_seconds(self, request: _Request) -> list[float]:
        """For each replica of an only team the longer one of its hops to and from the coordinator,
        there or back; 0 in other teams, whose replicas have many links to their neighbors."""
        if not request.is_only:
            return [0.0] * len(request.names)
        found, size = [], self.costs.size(request.micro_batches)
        for name in request.names:
            there, back = self.costs.hops([COORDINATOR, name], size, request.embedding_left)
            media = busy_seconds_of_media([*there, *back])
            found.append(0.0 if name == COORDINATOR else max(media.values()))
        return found

    def _seconds(
        self, request: _Request, holders: Sequence[Holder], way: Way, first: Index, end: Index
    ) -> Matrix:
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
            return np.full(each.shape[1:], np.inf)
        each = np.where(is_possible, each, 1.0)
        counts = whole_counts(each, request.micro_batches, fixed)
        ends = fixed + counts * each
        for index, (holder, option) in enumerate(pairs):
            most = self._in_flight(request, index, counts)
            need = holder.need(option, first, end, most)
            is_possible &= self._need(request, index, way, need, most).total <= holder.usable_bytes
        return np.where(is_possible, ends.max(axis=0) / request.micro_batches, np.inf)

    def _in_flight(self, request: _Request, index: int, counts: Counts) -> Numbers:
        """The most micro-batches in flight on a replica, by its counts."""
        total = np.full_like(counts[index], request.micro_batches)
        if request.is_hosted and request.names[index] != COORDINATOR:
            # As in `as_replicas`.
            total = total - counts[request.names.index(COORDINATOR)]
        started = most_started(request.in_flight, request.embedding_left)
        most: Numbers = most_in_flight(counts[index], total, started, request.in_flight)
        return most

    def _need(
        self, request: _Request, index: int, way: Way, need: Need, in_flight: Numbers
    ) -> Need:
        """The memory of a replica, for the coordinator with the ends of the model."""
        name = request.names[index]
        part = optimizer_part(name, way.optimizer, len(request.names))
        if name != COORDINATOR:
            return of_replica(need, part)
        own = self.own(request)
        options = own.options_for(*request.own, request.in_flight)
        ends = own.need(options, *request.own, request.in_flight)
        return ends + of_replica(need, part, in_flight * self.head_bytes(request))

    def head_bytes(self, request: _Request) -> float:
        """What head and loss take for a micro-batch, if they are behind this team."""
        head = self.own(request).behind.ends[HEAD].cost
        return head.peak_bytes if head is not None and request.is_last else 0.0

    def exchange_seconds_per_layer(self, names: tuple[str, ...]) -> float:
        """The seconds for which a team exchanges the gradients of its smallest layer, without
        latency."""
        if names not in self._per_layer:
            model = self.costs.profile.model
            num_bytes = min(model.part(kind).gradient_bytes for kind in model.kinds)
            team = exchange_seconds([Team(names, _MANY_BYTES)], self.costs.link)
            latency = exchange_seconds([Team(names, 1.0)], self.costs.link)
            per_byte = max(0.0, team - latency) / _MANY_BYTES
            self._per_layer[names] = num_bytes * per_byte if len(names) > 1 else 0.0
        return self._per_layer[names]

    def _exchange(self, request: _Request, holder: Holder, first: Index, end: Index) -> Matrix:
        """The seconds of the exchange: latency, and a part in proportion to the bytes."""
        num_bytes = np.asarray(holder.need(holder.options[0], first, end, 1).gradients)
        little, much = (
            exchange_seconds([Team(request.names, amount)], self.costs.link)
            for amount in (1.0, 1.0 + _MANY_BYTES)
        )
        per_byte = (much - little) / _MANY_BYTES
        return np.where(num_bytes > 0, little + (num_bytes - 1) * per_byte, 0.0)


@lru_cache(maxsize=64)
def _all_cuts(num_layers: int, num_teams: int) -> npt.NDArray[np.int64]:
    """All first layers of each team, and the ends of the last one's layers."""
    found = [*combinations(range(num_layers + 1), num_teams + 1)]
    return np.array(found, np.int64).reshape(-1, num_teams + 1)


def _ways(holders: Sequence[Holder], request: _Request) -> Iterator[Way]:
    """The ways that are open to all replicas. Each steps a part of the parameters, which is never
    slower and takes the least memory."""
    common = [[(option.dtype, option.recompute) for option in h.options] for h in holders]
    for dtype, recompute in common[0]:
        if all((dtype, recompute) in other for other in common):
            yield Way(dtype, recompute, None if request.is_hosted else "split")


@dataclass(frozen=True)
class TeamArrangement:
    """Teams in the order of the layers, whose layers are not chosen yet.

    Args:
        tables: The tables of teams.
        teams: The processes of each stage behind the coordinator's first layers.
        micro_batches: Pieces of the batch.
        embedding_left: Whether the first team has the embedding.
        kept: If the coordinator is a replica, how many of the first and of the last layers it has
            for itself.
    """

    tables: Tables
    teams: tuple[tuple[str, ...], ...]
    micro_batches: int
    embedding_left: bool = False
    kept: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, candidate: Candidate, tables: Tables) -> TeamArrangement:
        """The arrangement of a candidate, whose workers have one seat each."""
        teams = tuple(tuple(seat.name for seat in team) for team in candidate.teams)
        is_hosted = any(COORDINATOR in team for team in teams)
        kept = (candidate.seats[0].num_layers, candidate.seats[-1].num_layers)
        pieces, left = candidate.micro_batches, candidate.embedding_left
        return cls(tables, teams, pieces, left, kept if is_hosted else (0, 0))

    @property
    def workers(self) -> list[str]:
        """The workers of all teams."""
        return [name for team in self.teams for name in team if name != COORDINATOR]

    @property
    def hosted(self) -> int | None:
        """The index of the team that has the coordinator."""
        return next((n for n, team in enumerate(self.teams) if COORDINATOR in team), None)

    def place(self, in_flight: int, below: float = math.inf) -> list[Candidate] | None:
        """Split the layers exactly, with the coordinator's layers in front, and with them behind;
        without the splits whose step cannot be shorter than ``below``.

        The exchange of a team counts to its seconds, because both grow with its layers.

        Returns:
            None if the layers do not fit with so many micro-batches in flight.
        """
        candidates: list[Candidate] | None = None
        found = [self.tables.table(request) for request in self._requests(in_flight)]
        stages = [
            (table.seconds + table.exchange_seconds / self.micro_batches)[None] for table in found
        ]
        num = self.tables.costs.num_layers
        for before, behind in self._ends(in_flight):
            splits = best_splits(stages, before, behind)
            if not math.isfinite(splits.own_seconds[0]):
                continue
            candidates = candidates or []
            ranges = list(pairwise([0, *splits.cuts[0].tolist(), num]))
            if self.least_seconds(ranges, in_flight) < below:
                candidates.append(self.with_ranges(ranges, in_flight))
        return candidates

    def place_many(self, in_flight: int, below: float, most: int) -> list[Candidate] | None:
        """As `place`, but several splits: those with the shortest steps by the seconds of stages,
        filling and draining included. It compares all splits, so layers must be few."""
        tables = [self.tables.table(request) for request in self._requests(in_flight)]
        cuts = _all_cuts(self.tables.costs.num_layers, len(self.teams))
        first, end = self._layers_of_teams
        if self.hosted is not None:
            cuts = cuts[(cuts[:, 0] == first) & (cuts[:, -1] == end)]
        own = self._own.matrix(in_flight)[cuts[:, 0], cuts[:, -1]]
        spans = list(pairwise(cuts.T))
        of_teams = [table.seconds[span] for table, span in zip(tables, spans, strict=True)]
        seconds = np.stack([*of_teams, *([own] if self.hosted is None else [])])
        exchanges = zip(tables, spans, strict=True)
        exchange = np.max([table.exchange_seconds[span] for table, span in exchanges], axis=0)
        least = seconds.max(axis=0) * self.micro_batches + exchange
        if not np.isfinite(least).any():
            return None
        near, num = np.flatnonzero(least < below), self.tables.costs.num_layers
        filling = seconds[:, near].sum(axis=0) - seconds[:, near].max(axis=0)
        order = np.argsort(least[near] + filling, kind="stable")[:most]
        return [
            self.with_ranges(list(pairwise([0, *cuts[index].tolist(), num])), in_flight)
            for index in near[order]
        ]

    @property
    def has_few_splits(self) -> bool:
        """Whether `place_many` is fast."""
        num = self.tables.costs.num_layers + 1
        return math.comb(num, len(self.teams) + 1) <= MOST_COMPARED

    @property
    def most_hopeful_seconds(self) -> float:
        """A lower bound of the step, without tables: all layers count as the cheapest ones, may be
        divided, and fit anywhere."""
        costs, count, own = self.tables.costs, self.micro_batches, self._own
        # In T seconds a team of so much speed runs at most T / (count / speed + exchange) layers,
        # less what its coordinator does besides; and all teams run all layers.
        num_layers, layers_per_second = float(costs.num_layers), 0.0
        for team in [*self.teams, *([] if self.hosted is not None else [(COORDINATOR,)])]:
            speeds = {name: 1 / max(self._layer_seconds(name), _INSTANT) for name in team}
            speed = sum(speeds.values())
            if speed == 0:
                continue
            per_layer = count / speed + self.tables.exchange_seconds_per_layer(team)
            layers_per_second += 1 / per_layer
            if COORDINATOR in team:
                besides = sum(self.kept) + own.end_seconds * speeds[COORDINATOR]
                num_layers += besides * count / speed / per_layer - sum(self.kept)
        if not layers_per_second:
            return math.inf
        return max(num_layers / layers_per_second, own.end_seconds * count)

    def _layer_seconds(self, name: str) -> float:
        """The seconds of the cheapest layer on a device."""
        if name == COORDINATOR:
            return self._own.speed.layer_seconds
        costs = self.tables.costs
        return costs.holder(name, costs.size(self.micro_batches)).speed.layer_seconds

    def is_limited(self, in_flight: int) -> bool:
        """Whether fewer micro-batches in flight may leave memory for stages that do not fit
        otherwise, or that run faster then."""
        if any(self.tables.table(request).is_limited for request in self._requests(in_flight)):
            return True
        return not np.array_equal(self._own.matrix(in_flight), self._own.matrix(1))

    def least_seconds(self, ranges: Sequence[Range], in_flight: int) -> float:
        """The step of the slowest process alone, and of the longest exchange; infinite if the
        layers do not fit."""
        (_, first), *between, (end, _) = ranges
        slowest, exchange = 0.0, 0.0
        if self.hosted is None:
            slowest = float(self._own.matrix(in_flight)[first, end])
        for request, span in zip(self._requests(in_flight), between, strict=True):
            table = self.tables.table(request)
            slowest = max(slowest, float(table.seconds[span]))
            exchange = max(exchange, float(table.exchange_seconds[span]))
        return slowest * self.micro_batches + exchange

    def _ends(self, in_flight: int) -> Iterator[tuple[Vector, Vector]]:
        """The coordinator's seconds before the teams' layers and behind them."""
        num = self.tables.costs.num_layers
        if self.hosted is not None:
            # Its seconds are in those of its team.
            first, end = self._layers_of_teams
            yield nowhere_but(first, num + 1), nowhere_but(end, num + 1)
            return
        seconds = self._own.matrix(in_flight)
        if not self.embedding_left:
            yield seconds[:, -1], nowhere_but(num, num + 1)
        yield nowhere_but(0, num + 1), seconds[0]

    @property
    def _layers_of_teams(self) -> Range:
        return self.kept[0], self.tables.costs.num_layers - self.kept[1]

    @property
    def _own(self) -> BothEnds:
        costs = self.tables.costs
        return costs.both_ends(costs.size(self.micro_batches), self.embedding_left)

    def _requests(self, in_flight: int) -> list[_Request]:
        last = len(self.teams) - 1
        return [
            _Request(
                team,
                self.micro_batches,
                in_flight,
                self.embedding_left,
                self.embedding_left and index == 0,
                index == last,
                last == 0,
                self._layers_of_teams if COORDINATOR in team else (0, 0),
            )
            for index, team in enumerate(self.teams)
        ]

    def with_ranges(self, ranges: Sequence[Range], in_flight: int) -> Candidate:
        """The candidate with these layers, those of the coordinator at both ends."""
        costs, own = self.tables.costs, self._own
        (_, first), *between, (end, _) = ranges
        before, behind = own.options_for(first, end, in_flight)
        seats = [Seat(COORDINATOR, ranges[0], before, tuple(own.front.ends))]
        for request, span in zip(self._requests(in_flight), between, strict=True):
            seats += self._seats(request, span)
        seats.append(Seat(COORDINATOR, ranges[-1], behind, (HEAD,)))
        return Candidate(costs, seats, self.micro_batches, in_flight)

    def _seats(self, request: _Request, span: Range) -> list[Seat]:
        table, holders = self.tables.table(request), self.tables.holders(request)
        ends = (EMBEDDING,) if request.has_embedding else ()
        if len(holders) == 1:
            option = holders[0].option_for(*span, request.in_flight)
            return [Seat(request.names[0], span, option, ends)]
        way = table.ways[int(table.chosen[span])]
        options = [holder.option(way.dtype, way.recompute) for holder in holders]
        seats = [
            Seat(name, span, option, ends)
            for name, option in zip(request.names, options, strict=True)
        ]
        pairs = zip(holders, options, strict=True)
        hops = self.tables.hop_seconds(request)
        seconds = [
            max(float(holder.seconds(option, *span)), hop)
            for (holder, option), hop in zip(pairs, hops, strict=True)
        ]
        fixed = self.tables.fixed_seconds(request)
        shares = shares_of(seconds, request.micro_batches, fixed)
        head_bytes = self.tables.head_bytes(request)
        return as_replicas(seats, shares, way.optimizer, head_bytes)
