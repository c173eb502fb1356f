"""Arrangements: teams in the order of the layers, and the exact splits of the layers over them.

A line is an arrangement of teams of one. `place` splits the layers of many lines at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..plan import COORDINATOR
from .candidates import Candidate, Costs, Hops, Range, Seat, as_replicas, pairs_of
from .costs import BOTH_HERE, BothEnds, Left
from .layer_split import (
    Choice,
    Indices,
    Matrix,
    Numbers,
    Splits,
    best_splits,
    bottlenecks,
    nowhere_but,
    only,
)
from .profile import EMBEDDING, HEAD
from .replica_teams import Tables, TeamRequest, TeamTable, ends_of_team
from .replicas import shares_of
from .step_model import busy_seconds_of_media

MOST_AT_ONCE = 2**20
"""Numbers of a batch of matrices; this bounds its memory."""

MOST_KEPT = 24
"""The most splits of a batch that become candidates: the ones with the lowest bounds."""

_INSTANT = 1e-12

Teams = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Arrangement:
    """Teams in the order of the layers, before their layers are chosen.

    Args:
        tables: The tables of teams.
        teams: The processes of each stage after the coordinator's first layers.
        micro_batches: Pieces of all batches of the window.
        left: Whether the first team has the embedding, and the last one the head; with the head
            there, the coordinator is in no team.
        kept: If the coordinator is a replica, how many of the first and of the last layers it has
            alone.
    """

    tables: Tables
    teams: Teams
    micro_batches: int
    left: Left = BOTH_HERE
    kept: tuple[int, int] = (0, 0)
    _known: dict[int, list[TeamTable]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, candidate: Candidate, tables: Tables) -> Arrangement:
        """The arrangement of a candidate; its workers must have one seat each."""
        teams = tuple(tuple(seat.name for seat in team) for team in candidate.teams)
        is_hosted = any(COORDINATOR in team for team in teams)
        kept = (candidate.seats[0].num_layers, candidate.seats[-1].num_layers)
        kept = kept if is_hosted else (0, 0)
        return cls(tables, teams, candidate.micro_batches, candidate.left, kept)

    @classmethod
    def line(
        cls,
        tables: Tables,
        workers: Sequence[str],
        micro_batches: int,
        left: Left = BOTH_HERE,
    ) -> Arrangement:
        """An arrangement of workers, each with its stage alone."""
        return cls(tables, tuple((name,) for name in workers), micro_batches, left)

    @property
    def costs(self) -> Costs:
        """The costs of devices and links."""
        return self.tables.costs

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """The workers of all teams."""
        return tuple(name for team in self.teams for name in team if name != COORDINATOR)

    @cached_property
    def is_line(self) -> bool:
        """Whether each stage has one process."""
        return all(len(team) == 1 for team in self.teams)

    @property
    def hosted(self) -> int | None:
        """The index of the team that has the coordinator."""
        return next((n for n, team in enumerate(self.teams) if COORDINATOR in team), None)

    @cached_property
    def size(self) -> int:
        """Samples in a micro-batch."""
        return self.costs.size(self.micro_batches)

    @cached_property
    def own(self) -> BothEnds:
        """The coordinator."""
        return self.costs.both_ends(self.size, self.left)

    @cached_property
    def hops(self) -> Hops:
        """The forward and the backward hop from each stage of a line; empty without workers and in
        other arrangements."""
        if not self.workers or not self.is_line:
            return (), ()
        return self.costs.hops([COORDINATOR, *self.workers], self.size, self.left)

    @cached_property
    def travel_seconds(self) -> list[float]:
        """The seconds of the hops after each stage of a line, there and back."""
        there, back = self.hops
        return [
            hop.busy_seconds + hop.latency_seconds + after.busy_seconds + after.latency_seconds
            for hop, after in zip(there, [*back[1:], *back[:1]], strict=True)
        ]

    @cached_property
    def busiest_seconds(self) -> float:
        """The seconds of a micro-batch on the slowest link or medium of a line."""
        there, back = self.hops
        return max(busy_seconds_of_media([*there, *back]).values(), default=0.0)

    @property
    def most_hopeful_seconds(self) -> float:
        """A lower bound of the step, without tables: all layers cost as little as the cheapest one,
        may be divided, and fit anywhere."""
        count = self.micro_batches
        # In T seconds a team runs at most T / (count / speed + exchange) layers, less the other
        # work of its coordinator; and all teams together run all layers.
        num_layers, layers_per_second = float(self.costs.num_layers), 0.0
        for team in [*self.teams, *([] if self.hosted is not None else [(COORDINATOR,)])]:
            speeds = {name: 1 / max(self._layer_seconds(name), _INSTANT) for name in team}
            speed = sum(speeds.values())
            if speed == 0:
                continue
            per_layer = count / speed + self.tables.exchange_seconds_per_layer(team)
            layers_per_second += 1 / per_layer
            if COORDINATOR in team:
                besides = sum(self.kept) + self.own.end_seconds * speeds[COORDINATOR]
                num_layers += besides * count / speed / per_layer - sum(self.kept)
        if not layers_per_second:
            return math.inf
        return max(num_layers / layers_per_second, self.own.end_seconds * count)

    def _layer_seconds(self, name: str) -> float:
        """The seconds of the cheapest layer on a device."""
        if name == COORDINATOR:
            return self.own.speed.layer_seconds
        return self.costs.holder(name, self.size).speed.layer_seconds

    def tables_of(self, in_flight: int) -> list[TeamTable]:
        """The table of each team."""
        if in_flight not in self._known:
            self._known[in_flight] = [self.tables.table(each) for each in self.requests(in_flight)]
        return self._known[in_flight]

    def own_matrix(self, in_flight: int) -> Matrix:
        """The coordinator's seconds, infinite where it does not fit or a pin forbids it."""
        seconds, pin = self.own.matrix(in_flight), self.costs.pins.get(COORDINATOR)
        if pin is None:
            return seconds
        return only(seconds, (pin[1], len(seconds) - 1) if pin[0] == 0 else (0, pin[0]))

    def ends(self, front: int | None, in_flight: int) -> tuple[Numbers, Numbers]:
        """The coordinator's seconds before the teams' layers and after them.

        Args:
            front: How many layers it has in front; None if all its layers are in front.
            in_flight: The most micro-batches in flight.
        """
        size = self.costs.num_layers + 1
        if self.hosted is not None:
            # The table of its team counts its seconds.
            first, end = self._layers_of_teams
            return nowhere_but(first, size), nowhere_but(end, size)
        seconds = self.own_matrix(in_flight)
        if front is None:
            return seconds[:, -1], nowhere_but(size - 1, size)
        return nowhere_but(front, size), seconds[front]

    def least_seconds(self, ranges: Sequence[Range], in_flight: int) -> float:
        """The step of the slowest process alone plus the longest exchange; infinite if the layers
        do not fit or a device lacks the layers of its pin."""
        (_, first), *between, (end, _) = ranges
        slowest, exchange = 0.0, 0.0
        if self.hosted is None:
            slowest = float(self.own_matrix(in_flight)[first, end])
        for table, span in zip(self.tables_of(in_flight), between, strict=True):
            slowest = max(slowest, float(table.seconds[span]))
            if table.ways:
                exchange = max(exchange, float(table.exchange_seconds[span]))
        return slowest * self.micro_batches + exchange

    @property
    def _layers_of_teams(self) -> Range:
        return self.kept[0], self.costs.num_layers - self.kept[1]

    def requests(self, in_flight: int) -> list[TeamRequest]:
        """The key of each team's table."""
        return [self._request(index, in_flight) for index in range(len(self.teams))]

    def _request(self, index: int, in_flight: int) -> TeamRequest:
        team, pieces, last = self.teams[index], self.micro_batches, len(self.teams) - 1
        ends = ends_of_team(index, last, self.left)
        if len(team) == 1:
            left = Left(EMBEDDING in ends, HEAD in ends)
            return TeamRequest(team, pieces, in_flight, left, ends)
        own = self._layers_of_teams if COORDINATOR in team else (0, 0)
        return TeamRequest(team, pieces, in_flight, self.left, ends, index == last, last == 0, own)

    def with_ranges(self, ranges: Sequence[Range], in_flight: int) -> Candidate:
        """The candidate with these layers; each team runs them in its fastest way that fits.

        Args:
            ranges: The layers of each stage, the coordinator's at both ends.
            in_flight: The most micro-batches in flight.
        """
        (_, first), *between, (end, _) = ranges
        before, behind = self.own.options_for(first, end, in_flight)
        seats = [Seat(COORDINATOR, ranges[0], before, tuple(self.own.front.ends))]
        for request, span in zip(self.requests(in_flight), between, strict=True):
            seats += self._seats(request, span)
        seats.append(Seat(COORDINATOR, ranges[-1], behind, tuple(self.own.behind.ends)))
        return Candidate(self.costs, seats, self.micro_batches, in_flight)

    def _seats(self, request: TeamRequest, span: Range) -> list[Seat]:
        holders, ends = self.tables.holders(request), request.ends
        if len(holders) == 1:
            option = holders[0].option_for(*span, request.in_flight)
            return [Seat(request.names[0], span, option, ends)]
        table = self.tables.table(request)
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
        return as_replicas(seats, shares, way.optimizer, self.tables.head_bytes(request))


def lefts_of(costs: Costs, teams: Sequence[Sequence[str]]) -> list[Left]:
    """Whether the first of these teams may have the embedding, and the last one the head: the
    possible pairs."""
    if not teams:
        return [BOTH_HERE]
    is_hosted = any(COORDINATOR in team for team in teams)
    may_leave = costs.profile.model.embedding_may_leave and COORDINATOR not in teams[0]
    return pairs_of(may_leave, not is_hosted and costs.may_hold_head(teams[-1]))


def place(way: Arrangement, below: float = math.inf) -> list[Candidate]:
    """Split the layers of an arrangement exactly, with the coordinator's layers all in front, and
    all at the end; leave out candidates with a bound of ``below`` or more."""
    return [each for front in fronts_of(way) for each in place_in([way], front, below)]


def fronts_of(way: Arrangement) -> list[int | None]:
    """The values of ``front`` to try: None for all of the coordinator's layers in front, 0 for all
    at the end."""
    if way.left.embedding or way.hosted is not None:
        return [0]
    if way.left.head:
        return [None]
    return [None, 0] if way.teams and way.own.speed.most_layers else [None]


def place_in(
    ways: Sequence[Arrangement], front: int | None, below: float = math.inf
) -> list[Candidate]:
    """Split the layers of some arrangements exactly, for several numbers of micro-batches in
    flight.

    Twice as many in flight as processes hide the transfers of a line; the turns of replicas need
    more. Fewer are tried if they leave memory for a better split.

    Args:
        ways: Lines with equally many workers, or one arrangement with replicas; all with the same
            number of micro-batches and the same places of embedding and head.
        front: How many layers the coordinator has in front; None if all its layers are in front.
        below: Leave out candidates with a bound of this or more.
    """
    num, pieces, is_line = len(ways[0].workers) + 1, ways[0].micro_batches, ways[0].is_line
    levels = {2 * num, num, math.ceil(num / 2), 1} | (set() if is_line else {4 * num})
    batch = _Batch(ways, front)
    least = batch.bottlenecks(1) if is_line else np.zeros(len(ways))
    is_possible = pieces * least < below
    batch, least = batch.among(is_possible), least[is_possible]
    found: list[Candidate] = []
    for in_flight in sorted(
        {min(level, pieces) for level in levels if num > 1} or {1}, reverse=True
    ):
        if not batch.ways:
            break
        splits = batch.splits(in_flight)
        placed = [*batch.candidates(splits, in_flight, below)]
        found += placed
        if is_line:
            # The two sum in different orders, so their last digits may differ.
            is_slower = splits.bottleneck_seconds > least * (1 + 1e-9)
            batch, least = batch.among(is_slower), least[is_slower]
        elif np.isfinite(splits.own_seconds[0]) and not any(
            seat.option.recompute for candidate in placed for seat in candidate.seats
        ):
            break
    return found


def place_at(
    way: Arrangement, in_flight: int, front: int | None, below: float = math.inf
) -> list[Candidate]:
    """Split the layers exactly for this number in flight; empty if they do not fit, or if the bound
    is ``below`` or more."""
    batch = _Batch([way], front)
    return [*batch.candidates(batch.splits(in_flight), in_flight, below)]


@dataclass(frozen=True)
class _Batch:
    """Lines with equally many workers, or one arrangement, with ``front`` as in `place_in`."""

    ways: Sequence[Arrangement]
    front: int | None

    def among(self, chosen: Choice) -> _Batch:
        """The batch with the chosen arrangements only."""
        pairs = zip(self.ways, chosen, strict=True)
        return _Batch([way for way, is_chosen in pairs if is_chosen], self.front)

    def bottlenecks(self, in_flight: int) -> Numbers:
        """The least possible bottleneck of each arrangement."""
        ends = self.ways[0].ends(self.front, in_flight)
        found = [bottlenecks(self._stages(ways, in_flight), *ends) for ways in self._parts()]
        return np.concatenate(found)

    def splits(self, in_flight: int) -> Splits:
        """The best split of each arrangement: its slowest stage is the fastest possible. With one
        micro-batch in flight stages take turns, so the sum of all stages is the least instead."""
        ends, found = self.ways[0].ends(self.front, in_flight), []
        for ways in self._parts():
            floors = np.array([math.inf if in_flight == 1 else w.busiest_seconds for w in ways])
            found.append(best_splits(self._stages(ways, in_flight), *ends, floors))
        return Splits(
            np.concatenate([each.cuts for each in found]),
            np.concatenate([each.stage_seconds for each in found]),
            np.concatenate([each.own_seconds for each in found]),
        )

    def candidates(self, splits: Splits, in_flight: int, below: float) -> Iterator[Candidate]:
        """The candidates of the splits with a bound under ``below``."""
        fit = np.flatnonzero(np.isfinite(splits.own_seconds))
        least = self._least_seconds(splits, fit, in_flight)
        likely = np.argsort(least, kind="stable")[:MOST_KEPT]
        for index in fit[likely[least[likely] < below]]:
            bounds = [0, *splits.cuts[index].tolist(), self._num_layers]
            yield self.ways[index].with_ranges(list(pairwise(bounds)), in_flight)

    @property
    def _num_layers(self) -> int:
        return self.ways[0].costs.num_layers

    def _parts(self) -> Iterator[Sequence[Arrangement]]:
        size = max(1, MOST_AT_ONCE // (self._num_layers + 1) ** 2)
        for start in range(0, len(self.ways), size):
            yield self.ways[start : start + size]

    @staticmethod
    def _stages(ways: Sequence[Arrangement], in_flight: int) -> list[Numbers]:
        """For each place the matrices of its teams, one of each arrangement. A team's seconds
        include its exchange, because both grow with its layers."""
        rows = [
            [
                each.seconds + each.exchange_seconds / way.micro_batches
                if each.ways
                else each.seconds
                for each in way.tables_of(in_flight)
            ]
            for way in ways
        ]
        return [np.stack(column) for column in zip(*rows, strict=True)]

    def _least_seconds(self, splits: Splits, fit: Indices, in_flight: int) -> Numbers:
        """The bounds of `Candidate.least_seconds` by each process's work, without candidates."""
        own, count = splits.own_seconds[fit], self.ways[0].micro_batches
        cuts, stages = splits.cuts[fit], splits.stage_seconds[fit]
        if not self.ways[0].is_line:
            return np.asarray(count * np.maximum(own, stages.max(axis=1)))
        front = self.ways[0].own.front_matrix(in_flight)[cuts[:, 0], cuts[:, -1]]
        most, before = count * own, np.zeros(len(fit))
        travel = np.array([self.ways[index].travel_seconds for index in fit])
        stages = np.concatenate([front[:, None], stages], axis=1)
        for index in range(stages.shape[1]):
            most = np.maximum(most, before + count * stages[:, index])
            before = before + stages[:, index]
            if travel.size:
                before = before + travel[:, index]
        return np.asarray(np.maximum(most, before + count * (own - front)))
