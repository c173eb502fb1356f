"""The walk: random small changes of teams, for clusters with too many workers to try every change.

The walk begins with different numbers of teams, makes small changes, and keeps a change if the
estimated step is shorter, at first also if it is slightly longer. Then it makes the best outlines
into candidates, and goes on from the best candidate with the simulator as the judge of each change.
The draws begin with a fixed seed, so one profile has one plan.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from ..plan import COORDINATOR
from .arrangements import Arrangement, lefts_of
from .candidates import Candidate, spans_of
from .changes import LEAST_GAIN_OF_CHANGE, step_of
from .replica_teams import Tables
from .team_estimate import Estimates, Outline

LAYERS_MOVED = (1, 1, 1, 2, 2, 4, 8)
"""Numbers of layers that a change moves; more frequent numbers are more likely."""

FLIGHTS = (0.5, 0.75, 0.9, 1.1, 1.5, 2)
"""Factors by which a change multiplies the micro-batches in flight."""

PRICE_OF_WORKERS = 0.02
"""Share of the step that all workers together must save, each an equal part."""


class Steps(NamedTuple):
    """How far a walk goes.

    Args:
        first: Changes of each outline at the beginning.
        more: Changes of each of the best outlines.
        kept: How many of the best outlines go on.
        last: Changes of the best candidate.
        played: The least number of simulations, if enough changes are worth it.
        passed: The least number, for each pair of workers, of passes of a micro-batch through a
            stage in all simulations: many short steps take as long as few long ones.
        passed_in_all: A number of passes that suffices for any number of workers.
    """

    first: int = 100
    more: int = 1500
    kept: int = 3
    last: int = 4000
    played: int = 40
    passed: int = 190
    passed_in_all: int = 480_000


WARMTH = 0.02
"""Share of the step by which a change may make the estimate longer at the beginning of a walk."""

NEAR = 1.05
"""Factor by which the estimate of a simulated change may be longer than the best candidate's."""

Ordered = Callable[[Iterable[str]], tuple[str, ...]]


@dataclass
class TeamWalk:
    """Walks among teams.

    Args:
        tables: The tables of teams.
        micro_batches: Numbers of micro-batches to choose from.
        by_speed: The workers, the fastest first.
        ordered: Puts the workers of a team in order.
        may_replicate: Whether teams may have several workers.
        steps: How far it goes.
    """

    tables: Tables
    micro_batches: Sequence[int]
    by_speed: Sequence[str]
    ordered: Ordered
    may_replicate: bool = True
    steps: Steps = Steps()

    def __post_init__(self) -> None:
        self._estimates = Estimates(self.tables)
        self._draw = random.Random(0)  # noqa: S311
        self._price = PRICE_OF_WORKERS / max(1, len(self.by_speed))

    def best(self, starts: Sequence[Candidate]) -> Candidate | None:
        """The best candidate found; None without one that fits.

        Args:
            starts: Candidates to begin with, besides the walk's own.
        """
        outlines = [*map(_outline_of, starts), *(self._first() if self.may_replicate else [])]
        walked = [self._walked(outline, self.steps.first) for outline in outlines]
        walked = sorted(dict.fromkeys(walked), key=self._cost)[: self.steps.kept]
        walked += [self._walked(outline, self.steps.more) for outline in walked]
        found = [each for outline in walked for each in self._candidates(outline)]
        found += starts
        if not found:
            return None
        return self._played(min(found, key=step_of))

    def _cost(self, outline: Outline) -> float:
        """The estimated step plus the price of its workers."""
        seconds = self._estimates.step_seconds(outline)
        return seconds * (1 + self._price * len(outline.workers))

    def _first(self) -> Iterator[Outline]:
        """Different numbers of about equally fast teams: of workers with similar memory, and of
        workers dealt by speed."""
        memory = {each.name: each.memory_bytes for each in self.tables.costs.profile.devices}
        by_memory = sorted(self.by_speed, key=lambda name: memory[name])
        most, num = min(len(self.by_speed), self.tables.costs.num_layers), 1
        while num <= most:
            size = len(by_memory) / num
            cuts = [round(index * size) for index in range(num + 1)]
            alike: list[Sequence[str]] = [
                by_memory[first:end] for first, end in zip(cuts, cuts[1:], strict=False)
            ]
            dealt: list[Sequence[str]] = [self.by_speed[index::num] for index in range(num)]
            for workers, pieces in product([alike, dealt], self.micro_batches[-3:]):
                teams = tuple(self.ordered(team) for team in workers)
                found = self._split(teams, pieces)
                yield from [] if found is None else [found]
            num = max(num + 1, num * 3 // 2)

    def _split(self, teams: tuple[tuple[str, ...], ...], pieces: int) -> Outline | None:
        """These teams with layers by speed and memory, and with the most micro-batches in flight
        for their memory; None if it is too small. Ends of the model leave the coordinator if it is
        too small for them."""
        lefts = lefts_of(self.tables.costs, teams)
        levels = dict.fromkeys([pieces, min(2 * len(teams) + 2, pieces), 1])
        for left, in_flight in product(dict.fromkeys([lefts[0], lefts[-1]]), levels):
            empty = Outline(teams, (0, *[0] * len(teams), 0), pieces, in_flight, left)
            counts = self._estimates.counts_by_speed(empty)
            if counts is not None:
                return replace(empty, counts=counts)
        return None

    def _walked(self, best: Outline, num: int) -> Outline:
        """The best outline on a walk of this many changes."""
        here, least = best, self._cost(best)
        seconds = least
        for number in range(num):
            changed = self._changed(here)
            if changed is None:
                continue
            cost = self._cost(changed)
            warmth = WARMTH * self._draw.random() * max(0.0, 1 - 1.25 * number / num)
            if cost < seconds * (1 + warmth):
                here, seconds = changed, cost
            if cost < least:
                best, least = changed, cost
        return best

    def _played(self, best: Candidate) -> Candidate:
        """The best candidate on a walk with the simulator as the judge."""
        here = _outline_of(best)
        limit = self._estimates.step_seconds(here) * NEAR
        num_played, num_passed, tried = 0, 0, {here}
        enough = min(self.steps.passed * len(self.by_speed) ** 2, self.steps.passed_in_all)
        for _ in range(self.steps.last):
            changed = self._changed(here)
            if changed is None or changed in tried:
                continue
            tried.add(changed)
            if self._estimates.step_seconds(changed) >= limit:
                continue
            for candidate in self._candidates(changed, best.step_seconds):
                num_played += 1
                num_passed += candidate.micro_batches * len(changed.teams)
                if candidate.is_below(best.step_seconds * (1 - LEAST_GAIN_OF_CHANGE)):
                    best, here = candidate, changed
                    limit = self._estimates.step_seconds(here) * NEAR
            if num_played >= self.steps.played and num_passed >= enough:
                break
        return best

    def _candidates(self, outline: Outline, below: float = math.inf) -> list[Candidate]:
        """The outline as a candidate, if it fits and may be faster."""
        if self._least_seconds(outline) >= below:
            return []
        ranges, in_flight = spans_of(outline.counts), outline.in_flight
        found = self._way_of(outline).with_ranges(ranges, in_flight)
        return [found] if found.least_seconds < below else []

    def _changed(self, outline: Outline) -> Outline | None:
        """The outline with one random change; None if this change is not possible."""
        changes = (
            self._with_moved_layers,
            self._with_moved_layers,
            self._with_moved_layers,
            self._with_moved_worker,
            self._with_moved_worker,
            self._with_exchanged_workers,
            self._with_exchanged_teams,
            self._with_joined_teams,
            self._with_cut_team,
            self._with_others,
        )
        found = self._draw.choice(changes)(outline)
        return found if found is not None and self._is_possible(found) else None

    def _is_possible(self, outline: Outline) -> bool:
        """Whether each team has layers, the embedding is at the first layer and the head after the
        last one, and `may_replicate` and the pins hold."""
        front, *of_teams, behind = outline.counts
        if min(of_teams) < 1 or min(front, behind) < 0 or outline.left.embedding and front:
            return False
        may_hold_head = behind == 0 and self.tables.costs.may_hold_head(outline.teams[-1])
        if outline.left.head and not may_hold_head:
            return False
        if not self.may_replicate and max(map(len, outline.teams)) > 1:
            return False
        pinned = {*self.tables.costs.pins} - {COORDINATOR}
        is_kept = pinned <= {*outline.workers}
        return is_kept and (not self.tables.costs.pins or self._least_seconds(outline) < math.inf)

    def _least_seconds(self, outline: Outline) -> float:
        ranges, in_flight = spans_of(outline.counts), outline.in_flight
        return self._way_of(outline).least_seconds(ranges, in_flight)

    def _way_of(self, outline: Outline) -> Arrangement:
        return Arrangement(self.tables, outline.teams, outline.micro_batches, outline.left)

    def _slowest(self, outline: Outline) -> int:
        """The index of the busiest team."""
        counts = outline.counts[1:-1]
        busy = [
            self._estimates.team_seconds(team, counts[index], outline, outline.ends_of(index)).busy
            for index, team in enumerate(outline.teams)
        ]
        return busy.index(max(busy))

    def _place(self, outline: Outline) -> int:
        """A team: any, or the slowest one."""
        if self._draw.random() < 0.5:
            return self._slowest(outline)
        return self._draw.randrange(len(outline.teams))

    def _with_moved_layers(self, outline: Outline) -> Outline | None:
        counts = list(outline.counts)
        giver = self._place(outline) + 1
        taker = self._draw.randrange(len(counts))
        if self._draw.random() < 0.2:
            giver, taker = taker, giver
        by = self._draw.choice(LAYERS_MOVED)
        counts[giver] -= by
        counts[taker] += by
        return replace(outline, counts=tuple(counts))

    def _with_moved_worker(self, outline: Outline) -> Outline | None:
        """A worker joins another team, leaves, or becomes a team by itself."""
        name = self._draw.choice(self.by_speed)
        teams = [tuple(each for each in team if each != name) for team in outline.teams]
        counts, kind = list(outline.counts), self._draw.random()
        if kind < 0.6:
            index = self._place(outline)
            teams[index] = self.ordered([*teams[index], name])
        elif kind < 0.8:
            index = self._draw.randrange(len(teams) + 1)
            giver = min(max(index, 1), len(teams))
            by = min(self._draw.choice(LAYERS_MOVED), counts[giver] - 1)
            teams.insert(index, (name,))
            counts[giver] -= by
            counts.insert(index + 1, by)
        return self._with_teams(outline, teams, counts)

    def _with_exchanged_workers(self, outline: Outline) -> Outline | None:
        one, other = self._draw.sample(self.by_speed, 2)
        names = {one: other, other: one}
        teams = [tuple(names.get(name, name) for name in team) for team in outline.teams]
        return self._with_teams(outline, map(self.ordered, teams), list(outline.counts))

    def _with_exchanged_teams(self, outline: Outline) -> Outline | None:
        num = len(outline.teams)
        if num < 2:
            return None
        one, other = self._draw.sample(range(num), 2)
        teams, counts = list(outline.teams), list(outline.counts)
        teams[one], teams[other] = teams[other], teams[one]
        counts[one + 1], counts[other + 1] = counts[other + 1], counts[one + 1]
        return replace(outline, teams=tuple(teams), counts=tuple(counts))

    def _with_joined_teams(self, outline: Outline) -> Outline | None:
        num = len(outline.teams)
        if num < 2:
            return None
        one, other = self._draw.sample(range(num), 2)
        teams, counts = list(outline.teams), list(outline.counts)
        teams[one] = self.ordered([*teams[one], *teams[other]])
        counts[one + 1] += counts[other + 1]
        del teams[other], counts[other + 1]
        return self._with_teams(outline, teams, counts)

    def _with_cut_team(self, outline: Outline) -> Outline | None:
        """One team becomes two, with layers by their numbers of workers."""
        index = self._draw.randrange(len(outline.teams))
        team, layers = outline.teams[index], outline.counts[index + 1]
        if len(team) < 2 or layers < 2:
            return None
        names = self._draw.sample(team, len(team))
        cut = self._draw.randrange(1, len(names))
        first = min(max(1, round(layers * cut / len(names))), layers - 1)
        teams, counts = list(outline.teams), list(outline.counts)
        teams[index : index + 1] = [self.ordered(names[:cut]), self.ordered(names[cut:])]
        counts[index + 1 : index + 2] = [first, layers - first]
        return self._with_teams(outline, teams, counts)

    def _with_others(self, outline: Outline) -> Outline | None:
        """Other micro-batches, others in flight, or an end of the model elsewhere."""
        kind = self._draw.random()
        if kind < 0.5:
            count = max(1, round(outline.in_flight * self._draw.choice(FLIGHTS)))
            return replace(outline, in_flight=min(count, outline.micro_batches))
        if kind < 0.8:
            pieces = self._draw.choice(self.micro_batches)
            in_flight = max(1, round(outline.in_flight * pieces / outline.micro_batches))
            return replace(outline, micro_batches=pieces, in_flight=in_flight)
        model, left = self.tables.costs.profile.model, outline.left
        if model.head_may_leave and (not model.embedding_may_leave or kind < 0.9):
            return replace(outline, left=left._replace(head=not left.head))
        if not model.embedding_may_leave:
            return None
        return replace(outline, left=left._replace(embedding=not left.embedding))

    @staticmethod
    def _with_teams(
        outline: Outline, teams: Iterable[tuple[str, ...]], counts: list[int]
    ) -> Outline | None:
        """The outline with other teams; a team without workers gives its layers to another."""
        found, kept = [], [counts[0]]
        spare = 0
        for team, layers in zip(teams, counts[1:-1], strict=True):
            if team:
                found.append(team)
                kept.append(layers + spare)
                spare = 0
            else:
                spare += layers
        if not found:
            return None
        kept[-1] += spare
        return replace(outline, teams=tuple(found), counts=(*kept, counts[-1]))


def _outline_of(candidate: Candidate) -> Outline:
    teams = tuple(tuple(seat.name for seat in team) for team in candidate.teams)
    counts = tuple(end - first for first, end in candidate.ranges_of_teams)
    return Outline(teams, counts, candidate.micro_batches, candidate.in_flight, candidate.left)
