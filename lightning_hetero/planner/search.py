"""The search for devices, their teams and order, and the number of micro-batches.

A plan is a list of teams, each with a stage; in a line every team has one process. With up to five
workers the search tries every subset of them as a line in every order, and counts interchangeable
devices once. It begins with the lowest bound and stops at the best step simulated so far. For one
order of devices it takes the split with the fastest slowest stage (`arrangements`), with all of the
coordinator's layers in front, or all of them at the end.

From the best of these lines it makes small changes while the simulated step gets shorter: it moves
layers, exchanges, adds or removes a worker, or changes the places of embedding and head, the number
of micro-batches or the number in flight. At the end it leaves out workers with too little gain, and
takes the fewest micro-batches in flight that are nearly as fast.

Then it goes on with replicas, from teams of several kinds and from the best line. Further changes
merge two stages, move a worker into another stage, add the coordinator to a team or remove it, or
move micro-batches between replicas. Until then replicas step parts of the parameters, because this
is never slower. At the end it also tries the whole optimizer on each replica. For a mixture in
halves it tries the experts on one worker and all else on another (`experts`).

With more workers there are too many changes to try them all. Then the search splits lines of the
fastest one, two, three, … workers, and goes on from the best line, and from teams, by random
changes (`team_walk`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, permutations, product
from typing import NamedTuple

from msgspec import structs

from ..plan import COORDINATOR
from .arrangements import Arrangement, Teams, fronts_of, lefts_of, place, place_at, place_in
from .bounds import least_bottleneck
from .candidates import Candidate, Costs, lefts_of_any, spans_of
from .changes import (
    LEAST_GAIN_OF_CHANGE,
    MOST_NEAR_PLAYED,
    descended,
    least_of,
    moved_layers,
    step_of,
    with_counts,
    with_moved_layers,
    with_moved_shares,
    with_other_turns,
    with_whole_optimizer,
)
from .costs import BOTH_HERE, Left
from .experts import best_apart
from .replica_teams import Tables
from .step_model import Speed
from .team_walk import TeamWalk
from .worker_orders import Orders, interchangeable

ALL_ORDERS_UP_TO = 5
"""Workers up to which all subsets in all orders are tried as lines, 325 arrangements; with more,
only the usual orders, and then a walk."""

ALL_TEAMS_UP_TO = 3
"""Workers up to which the search begins with all ordered teams."""

EXCHANGES_UP_TO = 10
"""Workers up to which small changes improve a plan with given workers."""

MOST_PLAYED = 24
"""The most candidates of one choice of devices to simulate."""

MOST_SPLIT, MOST_OF_MANY_PLAYED = 16, 4
"""With more workers: the most choices to split, and the most candidates to simulate at a time."""

NUM_STARTS = 8
"""The number of best candidates, with unlike devices, to begin small changes with."""

MOST_WORSE = 1.2
"""Factor by which the step of a start may be longer than the best line's."""

MOST_FILLED = 4
"""Processes up to which four times as many micro-batches in flight are tried."""

LEAST_GAIN = 0.02
"""Share of the step that a device must save, because each additional device can drift or fail. An
optimizer in parts, and replicas instead of the best line, must save as much."""

LEAST_GAIN_IN_FLIGHT = 0.005
"""Share of the step that more micro-batches in flight must save, because each keeps activations."""


class Effort(NamedTuple):
    """Limits of a search from some plans.

    Args:
        near_played: The most changes of one plan to simulate, the lowest bounds first.
        replicates: Whether changes make replicas.
        keeps_devices: Whether changes keep the workers.
        first_played: The most plans to simulate at the beginning, the lowest bounds first.
        starts: The number of best plans, with unlike teams, to begin small changes with.
        tried: The most changed arrangements to split, if changes make replicas.
    """

    near_played: int = MOST_NEAR_PLAYED
    replicates: bool = False
    keeps_devices: bool = False
    first_played: int = 24
    starts: int = 4
    tried: int = 400


LINES, SAME_DEVICES = Effort(), Effort(keeps_devices=True)
FEW_TEAMS = Effort(64, replicates=True, first_played=96, starts=8, tried=4000)
TEAMS = Effort(replicates=True)
"""For lines, for plans with given workers, and for teams of up to three workers and of more."""


@dataclass(frozen=True)
class Choice:
    """Devices and a number of micro-batches, with a lower bound and an estimate of the step."""

    least_seconds: float
    likely_seconds: float
    micro_batches: int
    workers: tuple[str, ...]


class Search:
    """Finds the candidate with the shortest simulated step.

    Args:
        costs: The costs of devices and links.
        micro_batches: Numbers of micro-batches to choose from.
        may_replicate: Whether several processes may hold the same stage; ignored with pins.
        counts_alone: Numbers of micro-batches for one device alone; left out, the same ones.

    Attributes:
        costs: The costs of devices and links.
        line: The best plan without replicas, once `best` has run and if one fits.
        knows_line: Whether `best` has run.
        fastest: The fastest plan found with replicas, also if a line is faster; None without one
            that fits and comes near.
    """

    def __init__(
        self,
        costs: Costs,
        micro_batches: Sequence[int],
        may_replicate: bool = True,
        counts_alone: Sequence[int] = (),
    ) -> None:
        self.costs = costs
        self._may_replicate = may_replicate and not costs.pins
        self.micro_batches = micro_batches
        self.counts_alone = counts_alone or micro_batches
        self._tables = Tables(costs)
        self._classes = interchangeable(costs)
        self._starts: list[Candidate] = []
        self._orders = Orders(costs, costs.size(max(micro_batches)))
        self.line: Candidate | None = None
        self.knows_line = False
        self.fastest: Candidate | None = None

    def best(self) -> Candidate | None:
        """The best candidate without devices of too little gain; None without one that fits."""
        found = line = self._best_line()
        self.line, self.knows_line = line, True
        may_replicate, is_many = self._may_replicate, len(self._classes) > EXCHANGES_UP_TO
        if not self._looks_at_all and (may_replicate or not is_many):
            found = self._walked(line, may_replicate)
            if found is not None and found.has_replicas and not is_many:
                self.line = self._walked(line, may_replicate=False)
        elif may_replicate and self._classes:
            found = self._best_of_teams(line) or line
        if found is not None and not found.has_replicas:
            self.line = found
        limit = math.inf if found is None else found.step_seconds * (1 - LEAST_GAIN)
        return self.apart if self.apart is not None and self.apart.is_below(limit) else found

    @cached_property
    def apart(self) -> Candidate | None:
        """The fastest plan with the experts of a mixture apart, if there is one."""
        return best_apart(self.costs, self._orders.by_speed, self.micro_batches)

    def replicated(self) -> Candidate | None:
        """The fastest plan with all layers on every process, if they fit."""
        team = (*self._orders.by_speed, COORDINATOR)
        ways = [Arrangement(self._tables, (team,), pieces) for pieces in self.micro_batches]
        placed = [candidate for way in ways for candidate in place(way)]
        placed.sort(key=least_of)
        if not placed:
            return None
        best = min(placed[:MOST_PLAYED], key=step_of)
        limit = best.step_seconds * (1 + LEAST_GAIN)
        return self._with_enough_in_flight(with_whole_optimizer(best, limit), limit)

    def at_once(self, num_batches: int) -> Search:
        """The search for plans for this many batches as one, each batch in as many micro-batches as
        now."""
        costs = self.costs
        pieces = [num_batches * count // costs.num_batches for count in self.micro_batches]
        profile = structs.replace(
            costs.profile,
            batch_size=costs.batch_size * num_batches,
            accumulate_grad_batches=1,
        )
        return Search(Costs(profile, costs.pins), pieces, self._may_replicate)

    def best_with(self, workers: Iterable[str], below: float = math.inf) -> Candidate | None:
        """The best line of exactly these workers, if its step is shorter than ``below``."""
        best = self._best_among([tuple(workers)], below)
        if best is None:
            return None
        if len(best.workers) <= EXCHANGES_UP_TO:
            best = self._descended([best], SAME_DEVICES)
        return self._with_enough_in_flight(best)

    def best_alone(self, name: str) -> Candidate | None:
        """The best candidate with all layers on one device; None if they do not fit."""
        workers = [] if name == COORDINATOR else [name]
        num = self.costs.num_layers
        ranges = spans_of([0, num, 0] if workers else [num, 0])
        placed = []
        for pieces, left in product(
            self.counts_alone, lefts_of(self.costs, [workers] if workers else [])
        ):
            way = Arrangement.line(self._tables, workers, pieces, left)
            placed += [
                way.with_ranges(ranges, min(in_flight, pieces))
                for in_flight in ((4, 2, 1) if workers else (1,))
                if math.isfinite(way.least_seconds(ranges, in_flight))
            ]
        return self._best_played(placed, math.inf, MOST_PLAYED)

    def one_of_each(self, workers: Sequence[str] | None = None) -> list[str]:
        """One of each class of interchangeable workers, among these or all workers."""
        first: dict[int, str] = {}
        for name in self._classes if workers is None else workers:
            first.setdefault(self._classes[name], name)
        return list(first.values())

    def are_alike(self, one: str, other: str) -> bool:
        """Whether two workers are interchangeable."""
        return self._classes[one] == self._classes[other]

    @property
    def _looks_at_all(self) -> bool:
        return len(self._classes) <= ALL_ORDERS_UP_TO

    def _best_line(self) -> Candidate | None:
        subsets = list(self._subsets())
        if self._looks_at_all:
            best = self._best_among(subsets, math.inf)
            if best is None:
                return None
            self._play_both_ends(best.step_seconds * MOST_WORSE)
            lowest = self._descended(self._starts, LINES)
            return self._with_enough_in_flight(self._without_idlers(lowest))
        placed = self._place_likely(self._choices(subsets))
        best = self._best_played(placed, math.inf, MOST_OF_MANY_PLAYED)
        return None if best is None else self._with_enough_in_flight(_fewest(placed, best))

    def _play_both_ends(self, below: float) -> None:
        """Play lines with the coordinator's layers at both ends, in the orders of the best lines
        and with each worker alone. They may be the best lines although the same workers do not gain
        with all of the coordinator's layers at one end."""
        lines = [(Arrangement.of(start, self._tables), start.in_flight) for start in self._starts]
        for name, pieces in product(self.one_of_each(), self.micro_batches):
            lines.append((Arrangement.line(self._tables, [name], pieces), min(4, pieces)))
        for way, in_flight in lines:
            staying, placed = replace(way, left=BOTH_HERE), []
            for front in range(1, self.costs.num_layers if way.teams else 0):
                if staying.own.front_seconds(front) * way.micro_batches >= below:
                    break
                placed += place_at(staying, in_flight, front, below)
            self._best_played(placed, below, MOST_NEAR_PLAYED)

    def _best_among(self, subsets: Sequence[tuple[str, ...]], below: float) -> Candidate | None:
        choices = [choice for choice in self._choices(subsets) if choice.least_seconds < below]
        if not self._looks_at_all:
            return self._best_played(self._place_likely(choices), below, MOST_OF_MANY_PLAYED)
        best: Candidate | None = None
        for choice in sorted(choices, key=lambda c: (c.least_seconds, len(c.workers))):
            if choice.least_seconds >= below:
                break
            for ways in self._lines(self._all_orders(choice.workers), choice.micro_batches):
                for front in fronts_of(ways[0]):
                    placed = place_in(ways, front, below * (1 - LEAST_GAIN_OF_CHANGE))
                    found = self._best_played(placed, below, MOST_PLAYED)
                    if found is not None:
                        best, below = found, found.step_seconds
        return best

    def _lines(
        self, orders: Sequence[Sequence[str]], pieces: int
    ) -> Iterator[Sequence[Arrangement]]:
        """Orders of the same workers, with each possible place of embedding and head."""
        lefts = {
            order: lefts_of(self.costs, [(name,) for name in order]) for order in map(tuple, orders)
        }
        for left in dict.fromkeys(left for some in lefts.values() for left in some):
            able = [order for order, some in lefts.items() if left in some]
            yield [Arrangement.line(self._tables, order, pieces, left) for order in able]

    def _best_played(
        self, placed: Iterable[Candidate], below: float, most: int
    ) -> Candidate | None:
        """Simulate the candidates with the lowest bounds; return the fastest one, if its step is
        shorter than ``below``."""
        best: Candidate | None = None
        for candidate in sorted(placed, key=least_of)[:most]:
            if candidate.least_seconds >= below:
                break
            self._note_start(candidate)
            if candidate.is_below(below):
                best, below = candidate, candidate.step_seconds
        return best

    def _note_start(self, candidate: Candidate) -> None:
        """Keep the candidate if it is among the best ones with unlike devices."""
        alike = [start for start in self._starts if _kin_of(start) == _kin_of(candidate)]
        others = [start for start in self._starts if start not in alike]
        ranked = alike or others[NUM_STARTS - 1 :]
        if ranked and not candidate.is_below(ranked[0].step_seconds):
            return
        self._starts = sorted([*others, candidate], key=step_of)[:NUM_STARTS]

    def _place_likely(self, choices: Iterable[Choice]) -> list[Candidate]:
        """Split the choices with the shortest estimated steps, until enough of them fit."""
        possible = [choice for choice in choices if math.isfinite(choice.likely_seconds)]
        placed: list[Candidate] = []
        num_split = 0
        for choice in sorted(possible, key=lambda c: c.likely_seconds):
            orders = self._orders.usual(choice.workers)
            lines = self._lines(orders, choice.micro_batches)
            found = [each for ways in lines for way in ways for each in place(way)]
            placed += found
            num_split += bool(found)
            if num_split == MOST_SPLIT:
                break
        return placed

    def _choices(self, subsets: Sequence[tuple[str, ...]]) -> Iterator[Choice]:
        for workers, pieces in product(subsets, self.micro_batches):
            speeds = speeds_of(self.costs, workers, pieces)
            slowest = least_bottleneck(speeds, self.costs.num_layers)
            yield Choice(pieces * slowest, (pieces + len(workers)) * slowest, pieces, workers)

    def _subsets(self) -> Iterator[tuple[str, ...]]:
        """Subsets of the workers; each has all pinned workers."""
        pinned = [name for name in self._orders.by_speed if name in self.costs.pins]
        free = [name for name in self._orders.by_speed if name not in self.costs.pins]
        if not self._looks_at_all:
            most = len(self.costs.profile.model.layers) - len(pinned)
            yield from ((*pinned, *free[:count]) for count in range(min(len(free), most) + 1))
            return
        chosen = (some for count in range(len(free) + 1) for some in combinations(free, count))
        sets: dict[tuple[int, ...], tuple[str, ...]] = {}
        for workers in chosen:
            sets.setdefault(tuple(sorted(self._classes[name] for name in workers)), workers)
        yield from ((*pinned, *workers) for workers in sets.values())

    def _all_orders(self, workers: Sequence[str]) -> list[tuple[str, ...]]:
        orders: dict[tuple[int, ...], tuple[str, ...]] = {}
        for order in permutations(workers):
            orders.setdefault(tuple(self._classes[name] for name in order), order)
        return list(orders.values())

    def _best_of_teams(self, line: Candidate | None) -> Candidate | None:
        """The best plan with replicas; None unless it is faster than the best line by
        `LEAST_GAIN`."""
        effort = FEW_TEAMS if len(self._classes) <= ALL_TEAMS_UP_TO else TEAMS
        starts = self._starts_of_teams(line, effort)
        best = self._descended(starts, effort) if starts else None
        self.fastest = best if best is not None and best.has_replicas else None
        limit = math.inf if line is None else line.step_seconds * (1 - LEAST_GAIN)
        if self.fastest is None or not self.fastest.is_below(limit):
            return None
        finished = self._finished(self.fastest)
        return finished if finished.is_below(limit) else self.fastest

    def _starts_of_teams(self, line: Candidate | None, effort: Effort) -> list[Candidate]:
        """The best plans of unlike teams to begin with, and the best line."""
        below = math.inf if line is None else line.step_seconds * MOST_WORSE
        ways = [
            Arrangement(self._tables, teams, pieces, left, kept)
            for teams, pieces in product(self._first_teams(), self._first_counts(line))
            for left in lefts_of(self.costs, teams)
            for kept in self._kept_by(teams)
        ]
        placed = [candidate for way in ways for candidate in self._placed(way, below)]
        placed.sort(key=least_of)
        found: dict[Hashable, Candidate] = {}
        for candidate in placed[: effort.first_played]:
            key = self._key(Arrangement.of(candidate, self._tables))
            if key not in found or candidate.is_below(found[key].step_seconds):
                found[key] = candidate
        best = sorted(found.values(), key=step_of)[: effort.starts]
        return best if line is None or not line.workers else [*best, line]

    def _first_counts(self, line: Candidate | None) -> Sequence[int]:
        """The numbers of micro-batches to begin with; with many workers, only near the line's."""
        if line is None or self._looks_at_all:
            return self.micro_batches
        pieces = line.micro_batches
        return [count for count in self.micro_batches if pieces <= 2 * count <= 4 * pieces]

    def _kept_by(self, teams: Teams) -> list[tuple[int, int]]:
        """How many layers to try for the coordinator alone, in front and at the end: 0, and, as a
        replica of the only stage of a few workers, as many as possible and half of them."""
        found = [(0, 0)]
        if len(teams) == 1 and COORDINATOR in teams[0] and len(self._classes) <= ALL_TEAMS_UP_TO:
            most = self.costs.num_layers - 1
            for count in (most, most // 2):
                half = count // 2
                found += [(count, 0), (0, count), (count - half, half)]
        return [*dict.fromkeys(found)]

    def _first_teams(self) -> list[Teams]:
        workers = tuple(self._orders.by_speed)
        if len(workers) <= ALL_TEAMS_UP_TO:
            return list(_all_teams(self._orders.slowest_first))
        found: list[Teams] = [((*workers, COORDINATOR),), (workers,)]
        if self._looks_at_all:
            found += [((name, COORDINATOR),) for name in workers]
        found += self._teams_of_equals()
        return list(dict.fromkeys(tuple(map(self._orders.ordered, teams)) for teams in found))

    def _teams_of_equals(self) -> Iterator[Teams]:
        """The workers with equal measurements as one team, as two, and as four."""
        kinds: dict[Hashable, list[str]] = {}
        for name in self._orders.by_speed:
            kinds.setdefault(self.costs.kinds[name], []).append(name)
        most = max(map(len, kinds.values()))
        for num in [n for n in (1, 2, 4) if n < most]:
            parts = (names[index::num] for names in kinds.values() for index in range(num))
            yield tuple(tuple(part) for part in parts if part)

    def _walked(self, line: Candidate | None, may_replicate: bool) -> Candidate | None:
        """The best plan of a walk from the best line and from some teams."""
        starts = [] if line is None else [line]
        if may_replicate:
            few = TEAMS._replace(first_played=NUM_STARTS)
            starts += self._starts_of_teams(line, few)
        orders = self._orders
        walk = TeamWalk(
            self._tables, self.micro_batches, orders.by_speed, orders.ordered, may_replicate
        )
        # In its outlines the coordinator shares no stage with workers.
        alone = [c for c in starts if all(s.name != COORDINATOR for s in c.seats[1:-1])]
        found = [each for each in (*starts, walk.best(alone)) if each is not None]
        if may_replicate:
            replicated = [each for each in found if each.has_replicas]
            self.fastest = min(replicated, key=step_of, default=None)
        best = min(found, key=step_of, default=None)
        return best and with_whole_optimizer(best, best.step_seconds * (1 + LEAST_GAIN))

    def _descended(self, starts: Sequence[Candidate], effort: Effort) -> Candidate:
        """The best candidate after small changes of each of some candidates.

        The simulator is the judge of each change. So this finds faster splits than the exact ones,
        such as when few micro-batches have to fill the pipeline.
        """
        played: set[Hashable] = set()
        tried: set[Hashable] = set()
        near = partial(self._near, effort=effort, tried=tried)
        found = [descended(start, near, effort.near_played, played) for start in starts]
        # The line is among the starts of a search for replicas, and does not count.
        replicated = [each for each in found if each.has_replicas] if effort.replicates else []
        return min(replicated or found, key=step_of)

    def _near(self, best: Candidate, effort: Effort, tried: set[Hashable]) -> Iterator[Candidate]:
        """The possibly faster candidates with one change."""
        way, below = Arrangement.of(best, self._tables), best.step_seconds
        if best.has_replicas or not effort.replicates:  # The line has had these changes already.
            yield from with_moved_layers(way, best)
            yield from with_moved_shares(best)
            yield from with_other_turns(best)
            yield from _with_other_in_flight(way, best)
        ways = [replace(way, micro_batches=n) for n in self.micro_batches]
        if way.hosted is None:
            ways += [replace(way, left=left) for left in lefts_of(self.costs, way.teams)]
        else:
            ways += self._with_other_kept(way)
        for teams in self._changed(way.teams, effort):
            ways += self._with_teams(way, teams, best)
        for each in ways:
            if not effort.replicates:
                yield from _with_counts(each, best)
                yield from self._placed_near(each, best)
            elif self._key(each) not in tried and len(tried) < effort.tried:
                tried.add(self._key(each))
                yield from self._placed(each, below)

    def _placed(self, way: Arrangement, below: float) -> list[Candidate]:
        """The arrangement with its layers split; empty if it does not fit or is not faster."""
        is_hopeful = len(way.teams) <= self.costs.num_layers and way.most_hopeful_seconds < below
        return place(way, below) if is_hopeful else []

    @staticmethod
    def _placed_near(way: Arrangement, best: Candidate) -> Iterator[Candidate]:
        """A line with its layers split; among the tries are the best line's micro-batches in flight
        and its number of the coordinator's layers in front."""
        num = len(way.workers) + 1
        levels = {best.in_flight, 2 * num, (4 if num <= MOST_FILLED else 2) * num}
        sizes = sorted({min(level, way.micro_batches) for level in levels if way.teams} or {1})
        for in_flight, front in product(sizes, _fronts_near(best, way)):
            yield from place_at(way, in_flight, front, best.step_seconds)

    def _with_other_kept(self, way: Arrangement) -> Iterator[Arrangement]:
        """Arrangements with one layer more or less for the coordinator, a replica, alone."""
        (front, behind), most = way.kept, self.costs.num_layers - len(way.teams)
        for one, other in [(1, 0), (0, 1), (-1, 0), (0, -1)]:
            kept = front + one, behind + other
            if min(kept) >= 0 and sum(kept) <= most:
                yield replace(way, kept=kept)

    def _with_teams(self, way: Arrangement, teams: Teams, best: Candidate) -> Iterator[Arrangement]:
        """The arrangement with other teams. If the coordinator becomes a replica, it has 0 layers
        alone, or keeps its present ones."""
        is_hosted = any(COORDINATOR in team for team in teams)
        changed = replace(way, teams=teams, kept=way.kept if is_hosted else (0, 0))
        if way.left not in lefts_of(self.costs, teams):
            stays = Left(way.left.embedding)
            changed = replace(
                changed, left=stays if stays in lefts_of(self.costs, teams) else BOTH_HERE
            )
        yield changed
        if is_hosted and way.hosted is None and not changed.left.embedding:
            own = best.seats[0].num_layers, best.seats[-1].num_layers
            yield replace(changed, kept=own)

    def _key(self, way: Arrangement) -> Hashable:
        """Equal for arrangements that differ only in interchangeable workers."""
        teams = tuple(
            tuple(sorted(self._classes.get(name, -1) for name in team)) for team in way.teams
        )
        return teams, way.micro_batches, way.left, way.kept

    def _changed(self, teams: Teams, effort: Effort) -> Iterator[Teams]:
        """The teams with one change of their members or their order."""
        for one, other in combinations(range(len(teams)), 2):
            order = [*teams]
            order[one], order[other] = order[other], order[one]
            if effort.replicates or not self.are_alike(teams[one][0], teams[other][0]):
                yield _checked(order)
        if effort.keeps_devices:
            return
        members = [name for team in teams for name in team if name != COORDINATOR]
        spare = self.one_of_each([n for n in self._orders.by_speed if n not in members])
        for name in self.one_of_each(members) if not effort.replicates else members:
            if name not in self.costs.pins:
                yield _without(teams, name)
        for name in [*spare, *(members if effort.replicates else [])]:
            others = _without(teams, name)
            for index in range(len(others) + 1):
                yield _checked([*others[:index], (name,), *others[index:]])
            for index, team in enumerate(others if effort.replicates else ()):
                joined = self._orders.ordered([*team, name])
                yield _checked([*others[:index], joined, *others[index + 1 :]])
        if effort.replicates:
            yield from self._merged(teams)
            yield from _with_coordinator(teams)

    def _merged(self, teams: Teams) -> Iterator[Teams]:
        """The teams after two of them are merged."""
        for one, other in permutations(range(len(teams)), 2):
            merged = [*teams]
            merged[one] = self._orders.ordered([*teams[one], *teams[other]])
            yield _checked([team for n, team in enumerate(merged) if n != other])

    def _finished(self, best: Candidate) -> Candidate:
        """The candidate without workers of little gain, with the whole optimizer on each replica if
        parts gain little, and with the fewest micro-batches in flight that are nearly as fast.

        All changes together may make the step longer by `LEAST_GAIN`.
        """
        limit = best.step_seconds * (1 + LEAST_GAIN)
        best = with_whole_optimizer(self._without_idlers(best), limit)
        return self._with_enough_in_flight(best, limit)

    def _without_idlers(self, best: Candidate) -> Candidate:
        limit = best.step_seconds * (1 + LEAST_GAIN)
        while True:
            way, trials = Arrangement.of(best, self._tables), list[Candidate]()
            for name in self.one_of_each(best.workers[::-1]):
                others = [worker for worker in best.workers if worker != name]
                if name in self.costs.pins:
                    continue
                if best.has_lone_seats:
                    found = self._best_among([tuple(others)], limit)
                    trials += [] if found is None else [found]
                elif others:
                    less = replace(way, teams=_without(way.teams, name))
                    trials += [each for each in self._placed(less, limit) if each.is_below(limit)]
            if not trials:
                return best
            best = min(trials, key=step_of)
            if best.has_lone_seats:
                best = self._descended([best], SAME_DEVICES)

    def _with_enough_in_flight(self, best: Candidate, limit: float = math.inf) -> Candidate:
        """Take the fewest micro-batches in flight that are nearly as fast as the best number.

        The tried numbers are one to four times the number of processes, or to five with replicas.
        """
        num, way = len(best.processes), Arrangement.of(best, self._tables)
        if num == 1:
            return best
        quarters = range(4, 21 if best.has_replicas else 17)
        counts = sorted({min(num * n // 4, best.micro_batches) for n in quarters})
        trials = []
        if best.has_replicas:
            trials += [replace(best, in_flight=n) for n in counts if n < best.in_flight]
        ranges = best.ranges_of_teams
        fitting = [n for n in counts if math.isfinite(way.least_seconds(ranges, n))]
        trials += [way.with_ranges(ranges, n) for n in fitting]
        if best.has_lone_seats:
            pairs = product(_fronts_near(best, way), counts)
            trials += [each for front, n in pairs for each in place_at(way, n, front)]
        # Of two with the same identity, the later one may recompute less.
        trials = [*{trial.identity: trial for trial in [*trials, best]}.values()]
        limit = min(limit, best.step_seconds * (1 + LEAST_GAIN_IN_FLIGHT))
        fast = [trial for trial in trials if trial is best or trial.is_below(limit)]
        limit = min(map(step_of, fast)) * (1 + LEAST_GAIN_IN_FLIGHT)
        fast = [candidate for candidate in fast if candidate.step_seconds <= limit]
        return min(fast, key=lambda candidate: (candidate.in_flight, candidate.step_seconds))


def speeds_of(costs: Costs, workers: Sequence[str], micro_batches: int) -> list[Speed]:
    """Speeds for a bound of all plans: the coordinator has the fewest ends of the model, and the
    other ends cost 0 seconds."""
    size = costs.size(micro_batches)
    # Its layers are in front if the embedding stays, and at the end if the head stays.
    every = [costs.both_ends(size, left).speed for left in lefts_of_any(costs, workers)]
    most_layers = max(speed.most_layers for speed in every)
    own = replace(every[-1], most_layers=most_layers)
    return [own, *(costs.holder(name, size).speed for name in workers)]


def _kin_of(candidate: Candidate) -> Hashable:
    """Equal for candidates that differ only in their splits and their micro-batches in flight, with
    the coordinator's layers at the same ends."""
    own = [candidate.seats[end].num_layers > 0 for end in (0, -1)]
    return candidate.workers, candidate.micro_batches, candidate.left, *own


def _fronts_near(candidate: Candidate, way: Arrangement) -> list[int | None]:
    """Numbers of the coordinator's layers in front that a change tries."""
    found = fronts_of(way)
    return found if len(found) < 2 else [None, *sorted({0, candidate.seats[0].num_layers})]


def _with_counts(way: Arrangement, best: Candidate) -> Iterator[Candidate]:
    """The candidates of a line with the same numbers of layers of its workers, and layers from one
    other seat for a new worker."""
    held = {seat.name: seat.num_layers for seat in best.seats}
    if len(way.workers) < len(best.workers):
        return
    own = [[best.seats[end].num_layers] for end in (0, -1)]
    counts = [*own[0], *(held.get(name, 0) for name in way.workers), *own[1]]
    found = [counts]
    if len(way.workers) > len(best.workers):
        new = next(index for index, name in enumerate(way.workers, start=1) if name not in held)
        found = [*moved_layers(counts, range(len(counts)), [new])]
    for each in found:
        yield from with_counts(way, each, best.in_flight, best.step_seconds)


def _with_other_in_flight(way: Arrangement, best: Candidate) -> Iterator[Candidate]:
    """Candidates with the same layers and other numbers of micro-batches in flight."""
    num, present = len(best.processes), best.in_flight
    counts = {1, present - 1, present + 1, present * 3 // 2, num, 2 * num, 3 * num, 4 * num}
    layers = [end - first for first, end in best.ranges_of_teams]
    for count in sorted({min(max(count, 1), best.micro_batches) for count in counts} - {present}):
        if best.workers:
            yield from with_counts(way, layers, count, best.step_seconds)


def _fewest(placed: Iterable[Candidate], best: Candidate) -> Candidate:
    """The candidate with the fewest workers that is nearly as fast as the best."""
    limit = best.step_seconds * (1 + LEAST_GAIN)
    fewer = [c for c in placed if len(c.workers) < len(best.workers) and c.least_seconds < limit]
    fewer.sort(key=lambda candidate: len(candidate.workers))
    return next((c for c in fewer[:MOST_OF_MANY_PLAYED] if c.step_seconds < limit), best)


def _without(teams: Teams, name: str) -> Teams:
    """The teams without a worker; a team of only the coordinator is left out."""
    others = [tuple(each for each in team if each != name) for team in teams]
    return _checked([team for team in others if team and team != (COORDINATOR,)])


def _checked(teams: Sequence[tuple[str, ...]]) -> Teams:
    """The teams with the coordinator in at most one of them, the first or the last."""
    last = len(teams) - 1
    return tuple(
        team
        if index in (0, last) and not (index == last > 0 and COORDINATOR in teams[0])
        else tuple(name for name in team if name != COORDINATOR)
        for index, team in enumerate(teams)
    )


def _with_coordinator(teams: Teams) -> Iterator[Teams]:
    """The teams without the coordinator, with it in the first, and with it in the last."""
    alone = [tuple(name for name in team if name != COORDINATOR) for team in teams]
    yield tuple(alone)
    for index in {0, len(teams) - 1}:
        yield tuple(
            (*team, COORDINATOR) if number == index else team for number, team in enumerate(alone)
        )


def _all_teams(names: Sequence[str]) -> Iterator[Teams]:
    """All ordered teams of some workers, without the coordinator, with it in the first, and with it
    in the last; lines are left out."""
    for count in range(1, len(names) + 1):
        for chosen in combinations(names, count):
            for teams in _ordered_teams(chosen):
                hosted = dict.fromkeys(_with_coordinator(teams))
                yield from (each for each in hosted if max(map(len, each)) > 1)


def _ordered_teams(names: Sequence[str]) -> Iterator[Teams]:
    if not names:
        yield ()
    for count in range(1, len(names) + 1):
        for first in combinations(names, count):
            others = [name for name in names if name not in first]
            yield from ((first, *behind) for behind in _ordered_teams(others))
