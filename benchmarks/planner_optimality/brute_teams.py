"""The shortest step over all plans of a small cluster in which stages may have replicas.

It tries every way to put workers into ordered teams, the coordinator in the first team, the last
one or none, every split of the layers and all shares. Each team runs in the fastest way that fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

from lightning_hetero.plan import COORDINATOR, Recompute, StagePlan
from lightning_hetero.planner.candidates import Candidate, Costs, Seat
from lightning_hetero.planner.costs import START, Left
from lightning_hetero.planner.feasibility import shortages, with_parts
from lightning_hetero.planner.profile import EMBEDDING, HEAD, Profile
from lightning_hetero.planner.replicas import Team, exchange_seconds

CLOSE = 1e-3
"""Share of the step by which a better plan must be better."""

Teams = tuple[tuple[str, ...], ...]
Ranges = Sequence[tuple[int, int]]
Shares = tuple[tuple[int, ...], ...]


class _Way(NamedTuple):
    """What a plan is made of.

    Args:
        teams: The processes of each stage behind the coordinator's first layers.
        ranges: The layers of each stage, those of the coordinator at both ends.
        micro_batches: Pieces of the batch.
        embedding_left: Whether the first team has the embedding.
        shares: The micro-batches of each replica.
    """

    teams: Teams
    ranges: Ranges
    micro_batches: int
    embedding_left: bool
    shares: Shares = ()


class BruteTeams:
    """Tries every plan with lines, replicas and mixtures of both; a worker has one stage.

    Args:
        profile: A profile with a batch size.
        known: A step that is known to be possible.
    """

    def __init__(self, profile: Profile, known: float = math.inf) -> None:
        self._costs = Costs(profile, {})
        self._profile = profile
        self._seconds = known
        self._best: Candidate | None = None

    def best(self) -> Candidate | None:
        """The plan with the shortest step; None if none is shorter than the known one."""
        batch_size = self._profile.batch_size or 1
        may_leave = self._profile.model.embedding_may_leave
        for pieces in (count for count in range(1, batch_size + 1) if batch_size % count == 0):
            for teams in all_teams(self._profile.workers):
                if not all(map(self._has_one_dtype, teams)):
                    continue
                for left in (False, True) if may_leave and teams else (False,):
                    if not (left and COORDINATOR in teams[0]):
                        self._try_teams(teams, pieces, left)
        return self._best

    def _has_one_dtype(self, team: Sequence[str]) -> bool:
        """Whether replicas can compute in one dtype, as those of a stage do."""
        return len({self._costs.holder(name, 1).options[0].dtype for name in team}) == 1

    def _try_teams(self, teams: Teams, pieces: int, left: bool) -> None:
        for ranges in all_ranges(self._costs.num_layers, len(teams)):
            if left and ranges[0][1]:
                continue
            way = _Way(teams, ranges, pieces, left)
            for bound, shares in sorted(self._bounded_shares(way)):
                if bound < self._limit:
                    self._try_plan(way._replace(shares=shares))

    @property
    def _limit(self) -> float:
        return self._seconds * (1 - CLOSE)

    def _bounded_shares(self, way: _Way) -> Iterator[tuple[float, Shares]]:
        """All shares of all teams, each with the time of the busiest process without
        recomputation, and the exchange."""
        size, own = self._costs.size(way.micro_batches), self._own_seconds(way)
        ends = [
            (EMBEDDING,) if way.embedding_left and not index else ()
            for index in range(len(way.teams))
        ]
        held = list(zip(way.teams, way.ranges[1:-1], ends, strict=True))
        exchange = exchange_seconds(
            [
                Team(team, self._gradient_bytes(team[0], size, end, span))
                for team, span, end in held
                if len(team) > 1
            ],
            self._costs.link,
        )
        bounded = []
        for team, span, end in held:
            fixed = [own if name == COORDINATOR else 0.0 for name in team]
            each = [self._seconds_of(name, size, end, span) for name in team]
            busy = (
                (max(f + s * n for f, s, n in zip(fixed, each, shares, strict=True)), shares)
                for shares in compositions(way.micro_batches, len(team))
            )
            bounded.append([found for found in busy if found[0] + exchange < self._limit])
        for some in product(*bounded):
            slowest = max((seconds for seconds, _ in some), default=0.0)
            yield max(own, slowest) + exchange, tuple(shares for _, shares in some)

    def _own_seconds(self, way: _Way) -> float:
        """What the coordinator has to do in a step besides a share of a stage, without
        recomputation."""
        own = self._costs.both_ends(self._costs.size(way.micro_batches), Left(way.embedding_left))
        option = own.front.options[0]
        layers = sum(float(option.seconds(*span)) for span in (way.ranges[0], way.ranges[-1]))
        return way.micro_batches * (own.end_seconds + layers)

    def _gradient_bytes(
        self, name: str, size: int, ends: tuple[str, ...], span: tuple[int, int]
    ) -> float:
        option = self._costs.holder(name, size, ends).options[0]
        return float(option.gradients[span[1]] - option.gradients[span[0]])

    def _seconds_of(
        self, name: str, size: int, ends: tuple[str, ...], span: tuple[int, int]
    ) -> float:
        """The least seconds of a process for one micro-batch of its stage."""
        holder = self._costs.holder(name, size, ends)
        return min(float(holder.seconds(option, *span)) for option in holder.options)

    def _try_plan(self, way: _Way) -> None:
        num = sum(len({*team} - {COORDINATOR}) for team in way.teams) + 1
        counts = {1, 2, math.ceil(num / 2), num, 3 * num // 2, 2 * num, 3 * num, 4 * num}
        levels = sorted({min(count, way.micro_batches) for count in counts}, reverse=True)
        is_parted = any(len(team) > 1 and COORDINATOR not in team for team in way.teams)
        optimizers = ("split", "each") if is_parted else ("each",)
        # Recomputation, a whole optimizer and fewer in flight only raise the bound.
        fastest = self._made(way, levels[0], optimizers[0], [False] * len(way.ranges))
        if fastest.least_seconds >= self._limit:
            return
        for in_flight, optimizer in product(levels, optimizers):
            candidate = self._fitting(way, in_flight, optimizer)
            if candidate is not None and candidate.is_below(self._limit):
                self._best, self._seconds = candidate, candidate.step_seconds

    def _fitting(self, way: _Way, in_flight: int, optimizer: str) -> Candidate | None:
        """The plan with the fewest stages that recompute; None if it does not fit or if its bound
        is too high."""
        own: tuple[Recompute, ...] = (False, True)
        choices = [own, *[(*own, "layers")] * len(way.teams), own]
        for again in sorted(product(*choices), key=lambda each: sum(map(bool, each))):
            made = self._made(way, in_flight, optimizer, again)
            if made.least_seconds < self._limit and not shortages(made):
                return made
        return None

    def _made(
        self, way: _Way, in_flight: int, optimizer: str, again: Sequence[Recompute]
    ) -> Candidate:
        """The plan in which some stages recompute, which may not fit."""
        stages = [
            StagePlan([*team], span, shares=[*each], optimizer=_of_team(team, optimizer))
            for team, span, each in zip(way.teams, way.ranges[1:-1], way.shares, strict=True)
        ]
        seats = self._seats(stages, way, again)
        made = Candidate(self._costs, seats, way.micro_batches, in_flight)
        return with_parts(made, stages) if any(len(team) > 1 for team in way.teams) else made

    def _seats(
        self, stages: Sequence[StagePlan], way: _Way, again: Sequence[Recompute]
    ) -> list[Seat]:
        size = self._costs.size(way.micro_batches)
        first = START if way.embedding_left else EMBEDDING
        seats = [self._seat(COORDINATOR, way.ranges[0], again[0], size, first)]
        for index, stage in enumerate(stages):
            end = EMBEDDING if way.embedding_left and index == 0 else None
            for name in stage.workers:
                seats.append(self._seat(name, stage.layers, again[index + 1], size, end))
        return [*seats, self._seat(COORDINATOR, way.ranges[-1], again[-1], size, HEAD)]

    def _seat(
        self, name: str, span: tuple[int, int], again: Recompute, size: int, end: str | None
    ) -> Seat:
        ends = () if end is None else (end,)
        holder = self._costs.holder(name, size, ends)
        dtype = holder.options[0].dtype
        return Seat(name, span, holder.option(dtype, again), ends)


def _of_team(team: Sequence[str], optimizer: str) -> str | None:
    return None if COORDINATOR in team or len(team) < 2 else optimizer


def all_teams(workers: Sequence[str]) -> Iterator[Teams]:
    """All ordered teams of some of the workers, with the coordinator in the first team, in the
    last one, or in none."""
    for count in range(len(workers) + 1):
        for chosen in combinations(workers, count):
            for teams in _ordered_partitions(chosen):
                yield teams
                for index in {0, len(teams) - 1} if teams else ():
                    yield tuple(
                        (*team, COORDINATOR) if number == index else team
                        for number, team in enumerate(teams)
                    )


def _ordered_partitions(names: Sequence[str]) -> Iterator[Teams]:
    if not names:
        yield ()
        return
    for count in range(1, len(names) + 1):
        for first in combinations(names, count):
            others = [name for name in names if name not in first]
            for behind in _ordered_partitions(others):
                yield (first, *behind)


def all_ranges(num_layers: int, num_teams: int) -> Iterator[Ranges]:
    """All splits; the coordinator has the first and the last range, which may be empty."""
    for cuts in combinations(range(num_layers + 1), num_teams + 1):
        bounds = [0, *cuts, num_layers]
        if num_teams or cuts[0] == num_layers:
            yield list(zip(bounds, bounds[1:], strict=False))


def compositions(total: int, num: int) -> Iterator[tuple[int, ...]]:
    """All shares of ``total`` micro-batches, each of at least one."""
    for cuts in combinations(range(1, total), num - 1):
        bounds = [0, *cuts, total]
        yield tuple(b - a for a, b in zip(bounds, bounds[1:], strict=False))
