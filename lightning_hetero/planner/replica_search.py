"""The search among plans with replicas: which teams of devices share which stages.

With up to three workers it begins with all ordered teams, and with more of them with data
parallelism, on the workers alone and with the coordinator, and with teams of equal devices. It also
begins with the best line. From the best of these it makes small changes while the simulated step
gets shorter: it merges two stages, moves a worker into another stage, out of the plan or into it,
lets the coordinator be a replica or not, moves layers, or changes the place of the embedding, the
number of micro-batches or of those in flight.

With more than ten workers there are too many changes to try them all: then it makes random ones
(`team_walk`).

Until then replicas step parts of the parameters, which is never slower. At the end the search tries
whether the plan is nearly as fast with fewer workers, with the whole optimizer on each replica, and
with fewer micro-batches in flight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from typing import NamedTuple

from ..plan import COORDINATOR
from .candidates import Candidate, Costs, Range, as_replicas, spans_of
from .feasibility import shortages
from .replica_teams import Tables, TeamArrangement
from .replicas import ReplicaPart
from .team_walk import TeamWalk

ALL_TEAMS_UP_TO = 3
"""Workers up to which the search begins with all ordered teams, with several splits of each. It
also tries fewer micro-batches in flight for the sake of memory, and other turns of each number."""

MOST_PAIRED = 5
"""Workers up to which the search also begins with each worker beside the coordinator."""

MOST_SPLITS = 4
"""Splits of one arrangement that are tried where few layers allow to compare all splits."""


class Effort(NamedTuple):
    """How much a search tries.

    Args:
        tried: Changes that are split.
        first_played: Plans to begin with that are simulated, those with the lowest bounds first.
        starts: The best plans with unlike teams, from which the search makes small changes.
        near_played: Changes of one plan that are simulated, those with the lowest bounds first.
    """

    tried: int
    first_played: int
    starts: int
    near_played: int


EFFORTS = {3: Effort(4000, 96, 8, 64), 5: Effort(400, 24, 4, 12), 10: Effort(60, 24, 4, 8)}
"""By the number of workers up to which it holds."""

COMPARED_ONLY = Effort(0, 4, 4, 0)
"""With more workers the search compares the plans with which it begins, and goes on by a walk."""

MOST_WORSE = 1.2
"""How much longer than that of the best line the step of a start may be."""

SHARES_MOVED = (1, 2)
"""Micro-batches that a change moves from one replica to another."""

LAYERS_MOVED = (1, 2, 4, 8)
"""Numbers of layers that a change moves from one stage to another."""

LEAST_GAIN_OF_CHANGE = 1e-9
"""Share of the step that a change must save; less is rounding of sums."""

LEAST_GAIN_OF_DEVICE = 0.02
"""Share of the step that a device must save, an optimizer in parts, and replicas against the best
line."""

LEAST_GAIN_IN_FLIGHT = 0.005
"""Share of the step that more micro-batches in flight must save, because each keeps activations."""

Teams = tuple[tuple[str, ...], ...]


@dataclass
class TeamSearch:
    """Finds the plan with replicas that has the shortest simulated step.

    Args:
        costs: The costs of devices and links.
        micro_batches: Numbers of micro-batches to choose from.
        classes: A number for each worker; interchangeable workers have the same number.
        by_speed: The workers, the fastest first.

    Attributes:
        fastest: The fastest plan with replicas that was found, also if a line is faster; None if
            none fits or comes near.
    """

    costs: Costs
    micro_batches: Sequence[int]
    classes: Mapping[str, int]
    by_speed: Sequence[str]

    def __post_init__(self) -> None:
        self._tables = Tables(self.costs)
        self.fastest: Candidate | None = None
        enough = (effort for most, effort in EFFORTS.items() if len(self.by_speed) <= most)
        self._effort = next(enough, COMPARED_ONLY)
        self._num_left = self._effort.tried
        size = self.costs.size(max(self.micro_batches))
        seconds = {
            name: self.costs.holder(name, size).speed.layer_seconds for name in self.by_speed
        }
        self._slowest_first = sorted(self.by_speed, key=lambda name: -seconds[name])
        self._tried: set[Hashable] = set()
        self._played: set[Hashable] = set()

    def best(self, line: Candidate | None) -> Candidate | None:
        """The best plan with replicas; None if none is faster than the best line by as much as a
        device has to be. With more than ten workers it may be a better line.

        Args:
            line: The best plan without replicas; None if none fits.
        """
        if not self.by_speed or self.costs.pins:
            return None
        if len(self.by_speed) > max(EFFORTS):
            return self._walked(line)
        starts = self._starts(line)
        found = [self._climbed(start) for start in starts]
        found = [each for each in (*starts, *found) if each.has_replicas]
        if not found:
            return None
        best = min(found, key=_step_of)
        self.fastest = best
        if line is not None and not _is_below(best, line, LEAST_GAIN_OF_DEVICE):
            return None
        finished = self._finished(best)
        is_fast = line is None or _is_below(finished, line, LEAST_GAIN_OF_DEVICE)
        return finished if is_fast else best

    def _walked(self, line: Candidate | None) -> Candidate | None:
        """The best plan that a walk finds, which may be a line."""
        starts = self._starts(line)
        walk = TeamWalk(self._tables, self.micro_batches, self.by_speed, self._ordered)
        # In its outlines the coordinator shares no stage with workers.
        alone = [each for each in starts if not _is_hosted(each)]
        found = [each for each in (*starts, walk.best(alone)) if each is not None]
        if not found:
            return None
        replicated = [each for each in found if each.has_replicas]
        self.fastest = min(replicated, key=_step_of, default=None)
        best = min(found, key=_step_of)
        return _with_whole_optimizer(best, best.step_seconds * (1 + LEAST_GAIN_OF_DEVICE))

    def replicated(self) -> Candidate | None:
        """The fastest plan in which every process holds all layers; None if none fits."""
        team = (*self.by_speed, COORDINATOR)
        ways = [TeamArrangement(self._tables, (team,), pieces) for pieces in self.micro_batches]
        placed = [candidate for way in ways for candidate in self._placed(way, math.inf)]
        placed.sort(key=lambda candidate: candidate.least_seconds)
        if not placed:
            return None
        best = min(placed[: self._effort.first_played], key=_step_of)
        limit = best.step_seconds * (1 + LEAST_GAIN_OF_DEVICE)
        return self._with_enough_in_flight(_with_whole_optimizer(best, limit), limit)

    def _starts(self, line: Candidate | None) -> list[Candidate]:
        """The best plans to begin with, of unlike teams."""
        below = math.inf if line is None else line.step_seconds * MOST_WORSE
        ways = [
            TeamArrangement(self._tables, teams, pieces, left)
            for teams, pieces in product(self._first_teams(), self._first_counts(line))
            for left in self._embeddings(teams)
        ]
        placed = [candidate for way in ways for candidate in self._placed(way, below)]
        if self._looks_at_all:
            limit = math.inf if line is None else line.step_seconds
            ways = [dataclasses.replace(w, kept=kept) for w in ways for kept in _kept_by(w)]
            placed += [candidate for way in ways for candidate in self._placed(way, limit)]
        placed.sort(key=lambda candidate: candidate.least_seconds)
        found: dict[Hashable, Candidate] = {}
        for candidate in placed[: self._effort.first_played]:
            key = self._key(TeamArrangement.of(candidate, self._tables))
            if key not in found or candidate.is_below(found[key].step_seconds):
                found[key] = candidate
        best = sorted(found.values(), key=_step_of)[: self._effort.starts]
        return best if line is None or not line.workers else [*best, line]

    def _embeddings(self, teams: Teams) -> tuple[bool, ...]:
        """Where the embedding may be."""
        may_leave = self.costs.profile.model.embedding_may_leave
        return (False, True) if may_leave and COORDINATOR not in teams[0] else (False,)

    def _first_counts(self, line: Candidate | None) -> Sequence[int]:
        """The numbers of micro-batches to begin with: with many workers those near the line's."""
        if line is None or len(self.by_speed) <= MOST_PAIRED:
            return self.micro_batches
        pieces = line.micro_batches
        return [count for count in self.micro_batches if pieces <= 2 * count <= 4 * pieces]

    @property
    def _looks_at_all(self) -> bool:
        return len(self.by_speed) <= ALL_TEAMS_UP_TO

    def _first_teams(self) -> list[Teams]:
        workers = tuple(self.by_speed)
        if self._looks_at_all:
            return list(_all_teams(self._slowest_first))
        found: list[Teams] = [((*workers, COORDINATOR),), (workers,)]
        if len(workers) <= MOST_PAIRED:
            found += [((name, COORDINATOR),) for name in workers]
        found += self._teams_of_equals()
        if MOST_PAIRED < len(workers) <= max(EFFORTS):
            found += self._dealt()
        return list(dict.fromkeys(tuple(map(self._ordered, teams)) for teams in found))

    def _teams_of_equals(self) -> Iterator[Teams]:
        """The workers with equal measurements as one team, as two, and as four."""
        kinds: dict[Hashable, list[str]] = {}
        for name in self.by_speed:
            kinds.setdefault(self.costs.kinds[name], []).append(name)
        most = max(map(len, kinds.values()))
        for num in [n for n in (1, 2, 4) if n < most]:
            parts = (names[index::num] for names in kinds.values() for index in range(num))
            yield tuple(tuple(part) for part in parts if part)

    def _dealt(self) -> Iterator[Teams]:
        """The workers dealt to two, three or four teams, by speed and by memory: teams that are
        about as fast, and teams whose workers hold about as many layers."""
        memory = {each.name: each.memory_bytes for each in self.costs.profile.devices}
        by_memory = sorted(self.by_speed, key=lambda name: memory[name])
        for num in [n for n in (2, 3, 4) if n < len(by_memory)]:
            yield tuple(tuple(self.by_speed[index::num]) for index in range(num))
            size = math.ceil(len(by_memory) / num)
            parts = (by_memory[start : start + size] for start in range(0, len(by_memory), size))
            yield tuple(self._ordered(part) for part in parts)

    def _placed(self, way: TeamArrangement, below: float) -> list[Candidate]:
        """The arrangement with its layers split; none if it does not fit or is not faster."""
        if len(way.teams) > self.costs.num_layers or way.most_hopeful_seconds >= below:
            return []
        self._num_left -= 1
        num = len(way.workers) + 1
        counts = {4 * num, 2 * num, num, math.ceil(num / 2), 1}
        levels = sorted({min(n, way.micro_batches) for n in counts}, reverse=True)
        placed: list[Candidate] = []
        for in_flight in levels:
            if self._looks_at_all and way.has_few_splits:
                found = way.place_many(in_flight, below, MOST_SPLITS)
            else:
                found = way.place(in_flight, below)
            placed += found or []
            # Fewer in flight may spare a stage its recomputation.
            is_fast = found is not None and not any(map(_recomputes, found))
            if is_fast and not (self._looks_at_all and way.is_limited(in_flight)):
                break
        return placed

    def _climbed(self, best: Candidate) -> Candidate:
        while self._num_left > 0:
            near = sorted(self._near(best), key=lambda each: each.least_seconds)
            found = best
            for candidate in near[: self._effort.near_played]:
                limit = found.step_seconds * (1 - LEAST_GAIN_OF_CHANGE)
                if candidate.least_seconds >= limit:
                    break
                if candidate.identity not in self._played and candidate.is_below(limit):
                    found = candidate
                self._played.add(candidate.identity)
            if found is best:
                return best
            best = found
        return best

    def _near(self, best: Candidate) -> Iterator[Candidate]:
        """The candidates with one change that may be faster."""
        way, below = TeamArrangement.of(best, self._tables), best.step_seconds
        if best.has_replicas:  # A line has been changed in these ways already.
            yield from _with_moved_layers(way, best)
            yield from with_moved_shares(best)
            yield from _with_other_turns(best)
            for other in self._with_other_in_flight(way, best, below):
                yield other
                if self._looks_at_all:
                    yield from _with_other_turns(other)
        ways = [dataclasses.replace(way, micro_batches=n) for n in self.micro_batches]
        for teams in self._changed(way.teams):
            left = way.embedding_left and COORDINATOR not in teams[0]
            is_hosted = any(COORDINATOR in team for team in teams)
            kept = way.kept if is_hosted else (0, 0)
            ways.append(dataclasses.replace(way, teams=teams, embedding_left=left, kept=kept))
            if is_hosted and way.hosted is None and not left:
                own = best.seats[0].num_layers, best.seats[-1].num_layers
                ways.append(dataclasses.replace(ways[-1], kept=own))
        if way.hosted is not None:
            front, behind = way.kept
            near = [
                (front + 1, behind),
                (front, behind + 1),
                (front - 1, behind),
                (front, behind - 1),
            ]
            most = self.costs.num_layers - len(way.teams)
            ways += [
                dataclasses.replace(way, kept=kept)
                for kept in near
                if min(kept) >= 0 and sum(kept) <= most
            ]
        if len(self._embeddings(way.teams)) > 1:
            ways.append(dataclasses.replace(way, embedding_left=not way.embedding_left))
        for each in ways:
            key = self._key(each)
            if key in self._tried or self._num_left <= 0:
                continue
            self._tried.add(key)
            yield from self._placed(each, below)

    def _key(self, way: TeamArrangement) -> Hashable:
        """Equal for arrangements that differ in interchangeable workers only."""
        teams = tuple(
            tuple(sorted(self.classes.get(name, -1) for name in team)) for team in way.teams
        )
        return teams, way.micro_batches, way.embedding_left, way.kept

    def _changed(self, teams: Teams) -> Iterator[Teams]:
        """The teams with one change of their members."""
        for one, other in permutations(range(len(teams)), 2):
            merged = [*teams]
            merged[one] = self._ordered([*teams[one], *teams[other]])
            yield _checked([team for n, team in enumerate(merged) if n != other])
        members = {name for team in teams for name in team}
        for name in self.by_speed:
            left = [tuple(each for each in team if each != name) for team in teams]
            left = [team for team in left if team and team != (COORDINATOR,)]
            if name in members and left:
                yield _checked(left)
            for index in range(len(left) + 1):
                yield _checked([*left[:index], (name,), *left[index:]])
            for index, team in enumerate(left):
                joined = self._ordered([*team, name])
                yield _checked([*left[:index], joined, *left[index + 1 :]])
        yield from _with_coordinator(teams)
        for one, other in permutations(range(len(teams)), 2):
            if one < other:
                order = [*teams]
                order[one], order[other] = order[other], order[one]
                yield _checked(order)

    def _ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        """The workers, the slowest first, and the coordinator last. The first of replicas has the
        first of their turns, and a slow one should not have the last of them."""
        members = {*names}
        known = [name for name in self._slowest_first if name in members]
        return (*known, *([COORDINATOR] if COORDINATOR in members else []))

    def _with_other_in_flight(
        self, way: TeamArrangement, best: Candidate, below: float
    ) -> Iterator[Candidate]:
        num, present = len(best.processes), best.in_flight
        counts = {1, present - 1, present + 1, present * 3 // 2, num, 2 * num, 3 * num, 4 * num}
        for count in sorted({min(max(count, 1), best.micro_batches) for count in counts}):
            if count != present and way.least_seconds(best.ranges_of_teams, count) < below:
                yield way.with_ranges(best.ranges_of_teams, count)
                same = dataclasses.replace(best, in_flight=count)
                if self._looks_at_all and not shortages(same):
                    yield same

    def _finished(self, best: Candidate) -> Candidate:
        """The candidate without workers that gain little, with the whole optimizer on each replica
        where parts gain little, and with as few micro-batches in flight as are nearly as fast.

        All of these together may make the step longer by `LEAST_GAIN_OF_DEVICE`.
        """
        limit = best.step_seconds * (1 + LEAST_GAIN_OF_DEVICE)
        best = _with_whole_optimizer(self._without_idlers(best, limit), limit)
        return self._with_enough_in_flight(best, limit)

    def _with_enough_in_flight(self, best: Candidate, limit: float) -> Candidate:
        way, ranges = TeamArrangement.of(best, self._tables), best.ranges_of_teams
        num = len(best.processes)
        counts = {min(num * quarters // 4, best.micro_batches) for quarters in range(4, 21)}
        trials = [
            dataclasses.replace(best, in_flight=count)
            for count in sorted(counts)
            if count < best.in_flight
        ]
        trials += [
            way.with_ranges(ranges, count)
            for count in sorted(counts)
            if way.least_seconds(ranges, count) < math.inf
        ]
        # Where both are alike, the second one may recompute less.
        trials = [*{trial.identity: trial for trial in trials}.values()]
        least = min([best.step_seconds, *map(_step_of, trials)])
        limit = min(limit, least * (1 + LEAST_GAIN_IN_FLIGHT))
        fast = [each for each in [*trials, best] if each.step_seconds <= limit]
        return min(fast, key=lambda each: (each.in_flight, each.step_seconds))

    def _without_idlers(self, best: Candidate, limit: float) -> Candidate:
        while len(best.workers) > 1:
            trials = []
            way = TeamArrangement.of(best, self._tables)
            for name in {self.classes[name]: name for name in best.workers}.values():
                left = [tuple(each for each in team if each != name) for team in way.teams]
                left = [team for team in left if team and team != (COORDINATOR,)]
                if left:
                    less = dataclasses.replace(way, teams=_checked(left))
                    trials += self._placed(less, limit)
            trials = [each for each in trials if each.is_below(limit)]
            if not trials:
                return best
            best = min(trials, key=_step_of)
        return best


def _checked(teams: Sequence[tuple[str, ...]]) -> Teams:
    """The teams, in which the coordinator may be in the first or the last one only, and in one."""
    last = len(teams) - 1
    return tuple(
        team
        if index in (0, last) and not (index == last > 0 and COORDINATOR in teams[0])
        else tuple(name for name in team if name != COORDINATOR)
        for index, team in enumerate(teams)
    )


def _with_coordinator(teams: Teams) -> Iterator[Teams]:
    """The teams with the coordinator in none, in the first one, and in the last one."""
    alone = [tuple(name for name in team if name != COORDINATOR) for team in teams]
    yield tuple(alone)
    for index in {0, len(teams) - 1}:
        yield tuple(
            (*team, COORDINATOR) if number == index else team for number, team in enumerate(alone)
        )


def _with_moved_layers(way: TeamArrangement, best: Candidate) -> Iterator[Candidate]:
    """Candidates in which one stage has some layers less and another one more."""
    ranges = best.ranges_of_teams
    last, is_hosted = len(ranges) - 1, way.hosted is not None
    places = range(1, last) if is_hosted else range(int(way.embedding_left), last + 1)
    counts, least = [end - first for first, end in ranges], [0, *[1] * (last - 1), 0]
    for moved in map(spans_of, moved_layers(counts, places, least)):
        if way.least_seconds(moved, best.in_flight) < best.step_seconds:
            yield way.with_ranges(moved, best.in_flight)


def moved_layers(
    counts: Sequence[int], places: Sequence[int], least: Sequence[int]
) -> Iterator[list[int]]:
    """Numbers of layers by stage after one of some stages has given layers to another one.

    Args:
        counts: The numbers before.
        places: The stages that give and take.
        least: How many layers each stage has to keep.
    """
    for (giver, taker), by in product(permutations(places, 2), LAYERS_MOVED):
        moved = list(counts)
        moved[giver] -= by
        moved[taker] += by
        if moved[giver] >= least[giver]:
            yield moved


def with_moved_shares(best: Candidate) -> Iterator[Candidate]:
    """Candidates in which one replica has one or two micro-batches less and another one more."""
    for index, team in enumerate(best.teams):
        shares = [seat.part.share for seat in team if seat.part is not None]
        for (giver, taker), by in product(permutations(range(len(shares)), 2), SHARES_MOVED):
            if shares[giver] > by:
                moved = list(shares)
                moved[giver] -= by
                moved[taker] += by
                changed = with_shares_of(best, index, moved)
                if not shortages(changed):
                    yield changed


def _with_other_turns(best: Candidate) -> Iterator[Candidate]:
    """Candidates in which two replicas change places in their stage's list, which decides who goes
    first."""
    for index, team in enumerate(best.teams):
        shares = [seat.part.share for seat in team if seat.part is not None]
        for one, other in combinations(range(len(shares)), 2):
            order = [*range(len(shares))]
            order[one], order[other] = other, one
            yield with_shares_of(best, index, [shares[n] for n in order], order)


def with_shares_of(
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


def _with_whole_optimizer(best: Candidate, limit: float) -> Candidate:
    """The candidate in which replicas on workers step all parameters each, if it fits and its step
    is shorter than the limit."""

    def changed(part: ReplicaPart | None) -> ReplicaPart | None:
        if part is None or part.optimizer is None:
            return part
        return dataclasses.replace(part, optimizer="each")

    seats = [dataclasses.replace(seat, part=changed(seat.part)) for seat in best.seats]
    whole = dataclasses.replace(best, seats=seats)
    return whole if whole.is_below(limit) and not shortages(whole) else best


def _kept_by(way: TeamArrangement) -> Iterator[Range]:
    """How many layers the coordinator may have for itself in front and behind, if it is a replica
    of the only stage: as many as possible, and half of these; in front, behind, and in halves."""
    if way.hosted is None or len(way.teams) > 1:
        return
    most = way.tables.costs.num_layers - len(way.teams)
    for count in sorted({most, most // 2} - {0}):
        half = count // 2
        yield from dict.fromkeys([(count, 0), (0, count), (count - half, half)])


def _all_teams(names: Sequence[str]) -> Iterator[Teams]:
    """All ordered teams of some workers, with the coordinator in none, in the first one, and in the
    last one; without lines."""
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


def _is_hosted(candidate: Candidate) -> bool:
    """Whether the coordinator is a replica beside workers."""
    return any(seat.name == COORDINATOR for seat in candidate.seats[1:-1])


def _recomputes(candidate: Candidate) -> bool:
    return any(seat.option.recompute for seat in candidate.seats)


def _is_below(one: Candidate, other: Candidate, gain: float) -> bool:
    return one.is_below(other.step_seconds * (1 - gain))


def _step_of(candidate: Candidate) -> float:
    return candidate.step_seconds
