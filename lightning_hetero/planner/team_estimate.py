"""A quick estimate of the step of teams, for searches over thousands of plans.

Every process is busy with its own micro-batches, and idle while the first one comes to it and the
last one goes on from it:

    step = busy seconds of a process + seconds of one micro-batch everywhere else + exchange

The estimate takes the process with the longest sum. With few micro-batches in flight processes also
wait for more; the root of both squares is close to simulations of random teams. An estimate takes a
part of a millisecond, a simulation tens of milliseconds. It counts memory like the tables of teams,
for stages from layer 0 on; tables and simulator have the last word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..plan import COORDINATOR, Dtype, Recompute, Weights, most_started
from .costs import BOTH_HERE, Holder, Left, Numbers, Option
from .replica_teams import Tables, ends_of_team
from .replicas import most_in_flight

_INSTANT = 1e-12


@dataclass(frozen=True)
class Outline:
    """Teams with numbers of layers: a plan before its dtypes, shares and recomputation.

    Args:
        teams: The workers of each stage.
        counts: The layers of the coordinator in front, of each team, and of the coordinator after
            them.
        micro_batches: Pieces of all batches of the window.
        in_flight: The most micro-batches in flight.
        left: Whether the first team has the embedding, and the last one the head.
    """

    teams: tuple[tuple[str, ...], ...]
    counts: tuple[int, ...]
    micro_batches: int
    in_flight: int
    left: Left = BOTH_HERE

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers of all teams."""
        return tuple(name for team in self.teams for name in team)

    def ends_of(self, index: int) -> tuple[str, ...]:
        """The ends of the model on the team with this index."""
        return ends_of_team(index, len(self.teams) - 1, self.left)


class TeamSeconds(NamedTuple):
    """A team in a step.

    Args:
        busy: Seconds of its slowest replica.
        passing: Seconds of one micro-batch, on average over all of them.
        longest: Seconds of one micro-batch on the slowest replica.
        behind: Seconds of its exchange and its optimizer step.
    """

    busy: float
    passing: float
    longest: float
    behind: float


NOT_FITTING = TeamSeconds(math.inf, math.inf, math.inf, math.inf)


# A walk asks for the same few numbers again and again.
@lru_cache(maxsize=2**14)
def _most_in_flight(share: int, count: int, started: int, limit: int) -> int:
    return int(most_in_flight(share, count, started, limit))


@dataclass(frozen=True)
class _Column:
    """By the number of layers, the seconds and the bytes of one device with one option."""

    seconds: list[float]
    held_bytes: list[float]
    exchanged_bytes: list[float]
    optimizer_bytes: list[float]
    kept_bytes: list[float]
    optimizer_seconds: list[float]
    usable_bytes: float
    useful_below: float

    def fits(self, layers: int, part: float, in_flight: int) -> bool:
        """Whether this many layers fit, with a part of the optimizer."""
        need = self.held_bytes[layers] + self.optimizer_bytes[layers] * part
        if part < 1:
            need += self.exchanged_bytes[layers]
        return need + in_flight * self.kept_bytes[layers] <= self.usable_bytes


_Columns = dict[tuple[Dtype, Recompute, Weights | None], _Column]
"""By dtype and recomputation."""


def _column(holder: Holder, option: Option) -> _Column:
    num = len(option.forward)
    first, end = np.zeros(num, np.int64), np.arange(num)
    need = holder.need(option, first, end, 1)
    held = need.base + need.weights + need.gradients + need.working + need.boundaries
    more = np.maximum(need.working, need.gradients) - need.working

    def listed(values: Numbers) -> list[float]:
        found: list[float] = np.broadcast_to(np.asarray(values, float), (num,)).tolist()
        return found

    return _Column(
        listed(holder.seconds(option, first, end)),
        listed(held),
        listed(more),
        listed(need.optimizer),
        listed(need.in_flight),
        [holder.optimizer_seconds(0, count) for count in range(num)],
        holder.usable_bytes,
        option.useful_below,
    )


class Estimates:
    """Estimates outlines.

    Args:
        tables: The tables of teams.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._costs = tables.costs
        self._columns: dict[tuple[bytes, int, tuple[str, ...]], _Columns] = {}
        self._teams: dict[tuple[object, ...], TeamSeconds] = {}
        self._hops: dict[tuple[object, ...], float] = {}

    def step_seconds(self, outline: Outline) -> float:
        """The estimated step; infinite if the layers do not fit."""
        costs, count = self._costs, outline.micro_batches
        own = costs.both_ends(costs.size(count), outline.left)
        front, *of_teams, behind = outline.counts
        own_seconds = float(own.matrix(outline.in_flight)[front, costs.num_layers - behind])
        if not math.isfinite(own_seconds):
            return math.inf
        found = [
            self.team_seconds(team, layers, outline, outline.ends_of(index))
            for index, (team, layers) in enumerate(zip(outline.teams, of_teams, strict=True))
        ]
        chain = own_seconds + sum(each.passing for each in found)
        if not math.isfinite(chain):
            return math.inf
        names = [(COORDINATOR,), *outline.teams, (COORDINATOR,)]
        slowest_hop = 0.0
        for index, (one, other) in enumerate(pairwise(names)):
            only_ids = outline.left.embedding and index == 0
            only_losses = outline.left.head and index == len(of_teams)
            hop = self._hop_seconds(one, other, count, only_ids, only_losses)
            chain += hop
            slowest_hop = max(slowest_hop, hop / max(len(one), len(other)) / 2)
        busy = max(
            (count - 1) * own_seconds,
            (count - 1) * slowest_hop,
            *(each.busy - each.passing for each in found),
        )
        # Losses come in order, so a micro-batch that returns late holds up later ones.
        held_up = max(each.longest - each.passing for each in found)
        rounds = count / most_started(outline.in_flight, outline.left.embedding)
        waiting = max(0.0, rounds * (chain + held_up) - chain)
        return chain + math.hypot(busy, waiting) + max(each.behind for each in found)

    def counts_by_speed(self, outline: Outline) -> tuple[int, ...] | None:
        """Numbers of layers for about equally fast teams, as the field of an outline; None if their
        memory is too small. The coordinator has 0."""
        num_layers, teams = self._costs.num_layers, outline.teams
        if len(teams) > num_layers:
            return None
        counts = [1] * len(teams) if len(teams) > 1 else [num_layers]

        def with_one_more(index: int) -> float:
            ends = outline.ends_of(index)
            return self.team_seconds(teams[index], counts[index] + 1, outline, ends).busy

        ends = [(with_one_more(index), index) for index in range(len(teams))]
        heapify(ends)
        for _ in range(num_layers - sum(counts)):
            seconds, index = ends[0]
            if seconds == math.inf:
                return None  # no team has the memory for one more layer
            counts[index] += 1
            heapreplace(ends, (with_one_more(index), index))
        found = (0, *counts, 0)
        is_possible = self.step_seconds(replace(outline, counts=found)) < math.inf
        return found if is_possible else None

    def team_seconds(
        self, team: tuple[str, ...], layers: int, outline: Outline, ends: tuple[str, ...]
    ) -> TeamSeconds:
        """A team with this many layers; infinite if they do not fit."""
        count, in_flight = outline.micro_batches, outline.in_flight
        key = (team, layers, count, in_flight, ends, outline.left.embedding)
        if key not in self._teams:
            self._teams[key] = self._made(team, layers, outline, ends)
        return self._teams[key]

    def _made(
        self, team: tuple[str, ...], layers: int, outline: Outline, ends: tuple[str, ...]
    ) -> TeamSeconds:
        """The team with the first way that all its workers can run in their memory."""
        if len(team) > outline.micro_batches or layers > self._costs.num_layers:
            return NOT_FITTING
        columns = [self._columns_of(name, outline.micro_batches, ends) for name in team]
        for way in columns[0]:
            is_lone_and_useless = (
                len(team) == 1 and outline.in_flight >= columns[0][way].useful_below
            )
            # Replicas are not planned with weights that are read layer by layer.
            is_away = len(team) > 1 and way[2] is not None
            if all(way in each for each in columns) and not is_lone_and_useless and not is_away:
                found = self._of_way([each[way] for each in columns], layers, outline)
                if found is not None:
                    exchange = self._tables.exchange_seconds_per_layer(team) * layers
                    return found._replace(behind=found.behind + exchange)
        return NOT_FITTING

    @staticmethod
    def _of_way(columns: Sequence[_Column], layers: int, outline: Outline) -> TeamSeconds | None:
        """A team without its exchange; None if it does not fit."""
        count, num, limit = outline.micro_batches, len(columns), outline.in_flight
        seconds = [column.seconds[layers] for column in columns]
        if math.inf in seconds:
            return None
        shares = dealt(seconds, count)
        started = most_started(limit, outline.left.embedding)
        for column, share in zip(columns, shares, strict=True):
            most = limit if num == 1 else _most_in_flight(share, count, started, limit)
            if not column.fits(layers, 1 / num, most):
                return None
        busy = [share * each for share, each in zip(shares, seconds, strict=True)]
        steps = max(column.optimizer_seconds[layers] for column in columns) / num
        return TeamSeconds(max(busy), sum(busy) / count, max(seconds), steps)

    def _columns_of(self, name: str, micro_batches: int, ends: tuple[str, ...]) -> _Columns:
        key = (self._costs.kinds[name], micro_batches, ends)
        if key not in self._columns:
            holder = self._costs.holder(name, self._costs.size(micro_batches), ends)
            self._columns[key] = {
                (o.dtype, o.recompute, o.weights): _column(holder, o) for o in holder.options
            }
        return self._columns[key]

    def _hop_seconds(
        self,
        one: tuple[str, ...],
        other: tuple[str, ...],
        micro_batches: int,
        only_ids: bool,
        only_losses: bool,
    ) -> float:
        """The mean seconds of a micro-batch from one team to the next, and back."""
        key = (one, other, micro_batches, only_ids, only_losses)
        if key not in self._hops:
            costs = self._costs
            model, size = costs.profile.model, costs.size(micro_batches)
            there = model.activation_bytes_per_sample * size
            back = model.gradient_bytes_per_sample * size
            if only_ids:
                there, back = model.token_id_bytes_per_sample * size, 0
            if only_losses:
                there, back = 0, 0
            links = costs.profile.links
            pairs = [(a, b) for a in one for b in other] if links else [(one[0], other[0])]
            found = 0.0
            for source, target in pairs:
                hops = costs.hop(source, target, there), costs.hop(target, source, back)
                found += sum(hop.seconds for hop in hops)
            self._hops[key] = found / len(pairs)
        return self._hops[key]


def dealt(seconds: Sequence[float], count: int) -> list[int]:
    """Shares of ``count`` micro-batches, at least one for each replica, so that the slowest one
    ends as early as possible; as `whole_counts`, for a few numbers."""
    each = [max(one, _INSTANT) for one in seconds]
    # If all ended together, rounded down, so that few are left to deal one by one.
    end = count / sum(1 / one for one in each)
    shares = [max(1, int(end / one) - 1) for one in each]
    if sum(shares) > count:
        shares = [1] * len(each)
    ends = [((n + 1) * one, index) for index, (n, one) in enumerate(zip(shares, each, strict=True))]
    heapify(ends)
    for _ in range(count - sum(shares)):
        _, index = ends[0]
        shares[index] += 1
        heapreplace(ends, ((shares[index] + 1) * each[index], index))
    return shares
