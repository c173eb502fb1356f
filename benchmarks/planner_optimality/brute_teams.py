"""The shortest step over all plans of a small cluster in which stages may have replicas.

It tries every way to put workers into ordered teams, the coordinator in the first team, the last
one or none, every split of the layers and all shares. Each team runs in the fastest way that fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, product

from lightning_hetero.plan import COORDINATOR, StagePlan
from lightning_hetero.planner.candidates import Candidate, Costs, Seat
from lightning_hetero.planner.costs import START
from lightning_hetero.planner.feasibility import shortages, with_parts
from lightning_hetero.planner.profile import EMBEDDING, HEAD, Profile
from lightning_hetero.planner.replicas import Team, exchange_seconds

CLOSE = 1e-3
"""Share of the step by which a better plan must be better."""

Teams = tuple[tuple[str, ...], ...]
Ranges = Sequence[tuple[int, int]]


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
            for shares in product(*(compositions(pieces, len(team)) for team in teams)):
                if self._least(teams, ranges, shares, pieces, left) < self._limit:
                    self._try_plan(teams, ranges, shares, pieces, left)

    @property
    def _limit(self) -> float:
        return self._seconds * (1 - CLOSE)

    def _least(
        self, teams: Teams, ranges: Ranges, shares: Sequence[Sequence[int]], pieces: int, left: bool
    ) -> float:
        """The time of the busiest process without recomputation, and the exchange."""
        size, own = self._costs.size(pieces), self._costs.both_ends(self._costs.size(pieces), left)
        busy = {COORDINATOR: own.end_seconds * pieces}
        exchanges = []
        for index, (team, counts) in enumerate(zip(teams, shares, strict=True)):
            ends = (EMBEDDING,) if left and index == 0 else ()
            span = ranges[index + 1]
            for name, count in zip(team, counts, strict=True):
                holder = self._costs.holder(name, size, ends)
                each = min(float(holder.seconds(option, *span)) for option in holder.options)
                busy[name] = busy.get(name, 0.0) + each * count
            if len(team) > 1:
                option = self._costs.holder(team[0], size, ends).options[0]
                num_bytes = float(option.gradients[span[1]] - option.gradients[span[0]])
                exchanges.append(Team(team, num_bytes))
        for span in (ranges[0], ranges[-1]):
            busy[COORDINATOR] += float(own.front.options[0].seconds(*span)) * pieces
        return max(busy.values()) + exchange_seconds(exchanges, self._costs.link)

    def _try_plan(
        self, teams: Teams, ranges: Ranges, shares: Sequence[Sequence[int]], pieces: int, left: bool
    ) -> None:
        num = sum(len({*team} - {COORDINATOR}) for team in teams) + 1
        counts = {1, 2, math.ceil(num / 2), num, 3 * num // 2, 2 * num, 3 * num, 4 * num}
        for in_flight in sorted({min(count, pieces) for count in counts}, reverse=True):
            for optimizer in ("each", "split"):
                candidate = self._fitting(
                    teams, ranges, shares, (pieces, in_flight), left, optimizer
                )
                if candidate is not None and candidate.is_below(self._limit):
                    self._best, self._seconds = candidate, candidate.step_seconds

    def _fitting(
        self,
        teams: Teams,
        ranges: Ranges,
        shares: Sequence[Sequence[int]],
        counts: tuple[int, int],
        left: bool,
        optimizer: str,
    ) -> Candidate | None:
        """The plan with the fewest stages that recompute; None if it does not fit."""
        stages = [
            StagePlan([*team], span, shares=[*each], optimizer=_of_team(team, optimizer))
            for team, span, each in zip(teams, ranges[1:-1], shares, strict=True)
        ]
        ways = sorted(product((False, True), repeat=len(ranges)), key=sum)
        for again in ways:
            seats = self._seats(stages, ranges, again, self._costs.size(counts[0]), left)
            whole = Candidate(self._costs, seats, *counts)
            whole = with_parts(whole, stages) if any(len(t) > 1 for t in teams) else whole
            if not shortages(whole):
                return whole
        return None

    def _seats(
        self,
        stages: Sequence[StagePlan],
        ranges: Ranges,
        again: Sequence[bool],
        size: int,
        left: bool,
    ) -> list[Seat]:
        seats = [self._seat(COORDINATOR, ranges[0], again[0], size, START if left else EMBEDDING)]
        for index, stage in enumerate(stages):
            end = EMBEDDING if left and index == 0 else None
            for name in stage.workers:
                seats.append(self._seat(name, stage.layers, again[index + 1], size, end))
        return [*seats, self._seat(COORDINATOR, ranges[-1], again[-1], size, HEAD)]

    def _seat(
        self, name: str, span: tuple[int, int], again: bool, size: int, end: str | None
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
