"""Small changes of a candidate, and the descent by them while the simulated step gets shorter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations, permutations, product

from .arrangements import Arrangement
from .candidates import Candidate, as_replicas, spans_of
from .feasibility import shortages
from .replicas import ReplicaPart

SHARES_MOVED = (1, 2)
"""Numbers of micro-batches that a change moves from one replica to another."""

LAYERS_MOVED = (1, 2, 4, 8)
"""Numbers of layers that a change moves from one stage to another."""

MOST_NEAR_PLAYED = 12
"""The most changes of one candidate to simulate, the lowest bounds first."""

LEAST_GAIN_OF_CHANGE = 1e-9
"""Share of the step that a change must save; less may be rounding."""


def step_of(candidate: Candidate) -> float:
    """The predicted step, as a key."""
    return candidate.step_seconds


def least_of(candidate: Candidate) -> float:
    """The lower bound of the step, as a key."""
    return candidate.least_seconds


def descended(
    best: Candidate,
    near: Callable[[Candidate], Iterable[Candidate]],
    most: int = MOST_NEAR_PLAYED,
    played: set[Hashable] | None = None,
) -> Candidate:
    """Change a candidate while the simulated step gets shorter.

    Args:
        best: The candidate to begin with.
        near: The changes of a candidate.
        most: The most changes of one candidate to simulate, the lowest bounds first.
        played: The identities of simulated candidates; they are not tried again.
    """
    played = set() if played is None else played
    while True:
        found = best
        for candidate in sorted(near(best), key=least_of)[:most]:
            limit = found.step_seconds * (1 - LEAST_GAIN_OF_CHANGE)
            if candidate.least_seconds >= limit:
                break
            if candidate.identity not in played and candidate.is_below(limit):
                found = candidate
            played.add(candidate.identity)
        if found is best:
            return best
        best = found


def moved_layers(
    counts: Sequence[int], givers: Iterable[int], takers: Iterable[int]
) -> Iterator[list[int]]:
    """Numbers of layers by stage after one of the givers has given layers to one of the takers."""
    for giver, taker, by in product(givers, takers, LAYERS_MOVED):
        if giver != taker and counts[giver] >= by:
            moved = list(counts)
            moved[giver] -= by
            moved[taker] += by
            yield moved


def with_counts(
    way: Arrangement, counts: Sequence[int], most_in_flight: int, below: float
) -> Iterator[Candidate]:
    """The candidate with these numbers of layers, if they fit the devices and the pins, and their
    lower bound is less than ``below``."""
    front, *of_teams, behind = counts
    if min(of_teams, default=1) < 1 or not of_teams and behind:
        return
    if way.left.embedding and front or way.left.head and behind:
        return
    ranges, in_flight = spans_of(counts), min(most_in_flight, way.micro_batches)
    if way.least_seconds(ranges, in_flight) < below:
        yield way.with_ranges(ranges, in_flight)


def with_moved_layers(way: Arrangement, best: Candidate) -> Iterator[Candidate]:
    """Candidates with some layers less in one stage and more in another; the stages between them
    keep their number."""
    counts = [end - first for first, end in best.ranges_of_teams]
    places = range(len(counts)) if way.hosted is None else range(1, len(counts) - 1)
    for moved in moved_layers(counts, places, places):
        yield from with_counts(way, moved, best.in_flight, best.step_seconds)


def with_moved_shares(best: Candidate) -> Iterator[Candidate]:
    """Candidates with one or two micro-batches less on one replica and more on another."""
    for index, team in enumerate(best.teams):
        shares = [seat.part.share for seat in team if seat.part is not None]
        for (giver, taker), by in product(permutations(range(len(shares)), 2), SHARES_MOVED):
            if shares[giver] > by:
                moved = list(shares)
                moved[giver] -= by
                moved[taker] += by
                changed = _with_shares(best, index, moved)
                if not shortages(changed):
                    yield changed


def with_other_turns(best: Candidate) -> Iterator[Candidate]:
    """Candidates with two replicas exchanged in their stage's list: its order decides the turns."""
    for index, team in enumerate(best.teams):
        shares = [seat.part.share for seat in team if seat.part is not None]
        for one, other in combinations(range(len(shares)), 2):
            order = [*range(len(shares))]
            order[one], order[other] = other, one
            yield _with_shares(best, index, [shares[n] for n in order], order)


def _with_shares(
    best: Candidate, index: int, shares: Sequence[int], order: Sequence[int] | None = None
) -> Candidate:
    """The candidate with other shares of one team, and with its members in another order."""
    teams = [list(team) for team in best.teams]
    teams[index] = [teams[index][n] for n in order or range(len(shares))]
    parts = [seat.part for seat in teams[index]]
    head_bytes = max(part.kept_bytes for part in parts if part is not None)
    optimizer = parts[0].optimizer if parts[0] is not None else None
    teams[index] = as_replicas(teams[index], shares, optimizer, head_bytes)
    between = [seat for team in teams for seat in team]
    return dataclasses.replace(best, seats=[best.seats[0], *between, best.seats[-1]])


def with_whole_optimizer(best: Candidate, limit: float) -> Candidate:
    """The candidate in which replicas on workers step all parameters each, if it fits and its step
    is shorter than the limit; otherwise the same candidate."""

    def changed(part: ReplicaPart | None) -> ReplicaPart | None:
        if part is None or part.optimizer is None:
            return part
        return dataclasses.replace(part, optimizer="each")

    seats = [dataclasses.replace(seat, part=changed(seat.part)) for seat in best.seats]
    whole = dataclasses.replace(best, seats=seats)
    return whole if whole.is_below(limit) and not shortages(whole) else best
