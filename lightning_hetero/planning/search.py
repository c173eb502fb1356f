"""The search: which devices, in which order, and into how many micro-batches.

Up to five workers, every subset in every order is looked at, devices that stand in for each other
counted as one; first where the bound is lowest, and no further than the best step that the
simulator has shown.

With more, it looks at the fastest one, two, three, … of them, each fastest first. Those for which
(micro-batches + processes - 1) times the bound per micro-batch is least are split, those of them
with the lowest bounds are simulated. Up to ten workers, two are exchanged then, or one is left out
or added, as long as that helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from ..plan import COORDINATOR
from .bounds import least_bottleneck
from .candidates import Candidate, Costs, place, place_at, with_ranges

ALL_ORDERS_UP_TO = 5
"""Workers of which all subsets in all orders are looked at: 325 arrangements."""

MOST_PLAYED = 24
"""Candidates of one choice of devices that are simulated where everything is looked at."""

MOST_SPLIT, MOST_OF_MANY_PLAYED = 24, 4
"""With more workers: choices that are split, and candidates that are simulated at a time."""

LEAST_GAIN = 0.02
"""A device has to shorten the step by this share: each one more can drift, or fail."""


EXCHANGES_UP_TO = 10
"""Workers that are exchanged, left out or added one by one in search of something better."""


@dataclass(frozen=True)
class Choice:
    """Devices and a cut of the batch, with a bound on the step and a guess that is above it."""

    least_seconds: float
    likely_seconds: float
    micro_batches: int
    workers: tuple[str, ...]


class Search:
    """Finds the candidate with the shortest simulated step.

    Args:
        costs: What everything takes.
        micro_batches: Numbers to choose from.
    """

    def __init__(self, costs: Costs, micro_batches: Sequence[int]) -> None:
        self._costs = costs
        self.micro_batches = micro_batches
        self._classes = interchangeable(costs)
        size = costs.size(max(micro_batches))
        seconds = {name: costs.holder(name, size).speed.layer_seconds for name in self._classes}
        self._by_speed = sorted(self._classes, key=lambda name: seconds[name])
        self._seconds = seconds

    def best(self) -> Candidate | None:
        """The best of all, less the devices that bring too little; None where nothing fits."""
        subsets = list(self._subsets())
        if self._looks_at_all:
            best = self._best_among(subsets, math.inf)
            return None if best is None else self._without_idlers(best)
        placed = self._place_likely(self._choices(subsets))
        best = _best_played(placed, math.inf, MOST_OF_MANY_PLAYED)
        if best is None:
            return None
        if len(best.workers) > EXCHANGES_UP_TO:
            return _fewest(placed, best)
        return self._without_idlers(self._improve(best))

    def best_with(self, workers: Iterable[str], below: float = math.inf) -> Candidate | None:
        """The best candidate of just these workers, if its step is below."""
        return self._best_among([tuple(workers)], below)

    def best_alone(self, name: str) -> Candidate | None:
        """All layers on one device, the coordinator's ends where they are; None if unfit."""
        layers = len(self._costs.profile.model.layers)
        alone = name == COORDINATOR
        names = [name] if alone else [COORDINATOR, name]
        ranges = [(0, layers)] if alone else [(0, 0), (0, layers)]
        placed = [
            with_ranges(self._costs, names, ranges, pieces, min(in_flight, pieces))
            for pieces in self.micro_batches
            for in_flight in ((1,) if alone else (4, 2, 1))
            if all(
                math.isfinite(
                    self._costs.holder(each, self._costs.size(pieces)).matrix(in_flight)[span]
                )
                for each, span in zip(names, ranges, strict=True)
            )
        ]
        return _best_played(placed, math.inf, MOST_PLAYED)

    def one_of_each(self, workers: Sequence[str] | None = None) -> list[str]:
        """One of those workers, or of all, for each class of interchangeable ones."""
        first: dict[int, str] = {}
        for name in self._classes if workers is None else workers:
            first.setdefault(self._classes[name], name)
        return list(first.values())

    def are_alike(self, one: str, other: str) -> bool:
        """Whether the two can stand in for each other."""
        return self._classes[one] == self._classes[other]

    @property
    def _looks_at_all(self) -> bool:
        return len(self._classes) <= ALL_ORDERS_UP_TO

    def _best_among(self, subsets: Sequence[tuple[str, ...]], below: float) -> Candidate | None:
        choices = [choice for choice in self._choices(subsets) if choice.least_seconds < below]
        if not self._looks_at_all:
            return _best_played(self._place_likely(choices), below, MOST_OF_MANY_PLAYED)
        best: Candidate | None = None
        for choice in sorted(choices, key=lambda c: (c.least_seconds, len(c.workers))):
            if choice.least_seconds >= below:
                break
            found = self._best_order(choice, below)
            if found is not None:
                best, below = found, found.step_seconds
        return best

    def _place_likely(self, choices: Sequence[Choice]) -> list[Candidate]:
        possible = [choice for choice in choices if math.isfinite(choice.likely_seconds)]
        return [
            candidate
            for choice in sorted(possible, key=lambda c: c.likely_seconds)[:MOST_SPLIT]
            for candidate in place(
                self._costs, self._usual_order(choice.workers), choice.micro_batches
            )
        ]

    def _choices(self, subsets: Sequence[tuple[str, ...]]) -> list[Choice]:
        return [
            self._choice(workers, pieces) for workers in subsets for pieces in self.micro_batches
        ]

    def _choice(self, workers: tuple[str, ...], pieces: int) -> Choice:
        size = self._costs.size(pieces)
        speeds = [self._costs.holder(name, size).speed for name in (COORDINATOR, *workers)]
        slowest = least_bottleneck(speeds, len(self._costs.profile.model.layers))
        return Choice(pieces * slowest, (pieces + len(workers)) * slowest, pieces, workers)

    def _best_order(self, choice: Choice, below: float) -> Candidate | None:
        placed = [
            candidate
            for workers in self._orders(choice.workers)
            for candidate in place(self._costs, workers, choice.micro_batches)
        ]
        return _best_played(placed, below, MOST_PLAYED)

    def _subsets(self) -> Iterator[tuple[str, ...]]:
        """Each with all pinned workers."""
        pinned = [name for name in self._by_speed if name in self._costs.pins]
        free = [name for name in self._by_speed if name not in self._costs.pins]
        if not self._looks_at_all:
            yield from ((*pinned, *free[:count]) for count in range(len(free) + 1))
            return
        seen = set()
        for count in range(len(free) + 1):
            for chosen in combinations(free, count):
                classes = tuple(sorted(self._classes[name] for name in chosen))
                if classes not in seen:
                    seen.add(classes)
                    yield (*pinned, *chosen)

    def _orders(self, workers: Sequence[str]) -> Iterator[Sequence[str]]:
        seen = set()
        for order in permutations(workers):
            classes = tuple(self._classes[name] for name in order)
            if classes not in seen:
                seen.add(classes)
                yield order

    def _usual_order(self, workers: Sequence[str]) -> list[str]:
        """Fast devices first; between pins, so many as the layers there ask for."""
        pins = {name: self._costs.pins[name] for name in workers if name in self._costs.pins}
        free = [name for name in self._by_speed if name in workers and name not in pins]
        fixed = sorted(pins, key=lambda name: pins[name])
        start = self._costs.pins.get(COORDINATOR, (0, 0))[1]
        starts = [start, *(pins[name][1] for name in fixed)]
        ends = [*(pins[name][0] for name in fixed), len(self._costs.profile.model.layers)]
        left = [float(end - start) for start, end in zip(starts, ends, strict=True)]
        gaps: list[list[str]] = [[] for _ in left]
        speeds = {name: 1 / max(self._seconds[name], 1e-12) for name in free}
        per_speed = sum(left) / (sum(speeds.values()) or 1)
        for name in free:
            gap = left.index(max(left))
            gaps[gap].append(name)
            left[gap] -= speeds[name] * per_speed
        order = gaps[0]
        for name, gap_after in zip(fixed, gaps[1:], strict=True):
            order = [*order, name, *gap_after]
        return order

    def _improve(self, best: Candidate) -> Candidate:
        """Exchange two, leave one out, or add one, while that helps."""
        while True:
            orders = [*self._exchanged(best.workers), *self._one_less(best.workers)]
            orders += self._one_more(best.workers)
            placed = [
                place_at(self._costs, order, best.micro_batches, best.in_flight) for order in orders
            ]
            found = _best_played(filter(None, placed), best.step_seconds, MOST_OF_MANY_PLAYED)
            if found is None:
                return best
            best = found

    def _exchanged(self, workers: Sequence[str]) -> Iterator[list[str]]:
        for one, other in combinations(range(len(workers)), 2):
            if self._classes[workers[one]] != self._classes[workers[other]]:
                order = list(workers)
                order[one], order[other] = order[other], order[one]
                yield order

    def _one_less(self, workers: Sequence[str]) -> Iterator[list[str]]:
        """Without one of each class; those with a pin stay."""
        for name in self.one_of_each(workers[::-1]):
            if name not in self._costs.pins:
                yield [other for other in workers if other != name]

    def _one_more(self, workers: Sequence[str]) -> Iterator[list[str]]:
        spare = [name for name in self._by_speed if name not in workers]
        for name in self.one_of_each(spare):
            yield self._usual_order([*workers, name])

    def _without_idlers(self, best: Candidate) -> Candidate:
        limit = best.step_seconds * (1 + LEAST_GAIN)
        while True:
            trials = [self.best_with(less, limit) for less in self._one_less(best.workers)]
            found = [trial for trial in trials if trial is not None]
            if not found:
                return best
            best = min(found, key=lambda trial: trial.step_seconds)


def _best_played(placed: Iterable[Candidate], below: float, most: int) -> Candidate | None:
    """The shortest step below that, among so many candidates with the lowest bounds."""
    best: Candidate | None = None
    for candidate in sorted(placed, key=lambda candidate: candidate.least_seconds)[:most]:
        if candidate.least_seconds >= below:
            break
        if candidate.step_seconds < below:
            best, below = candidate, candidate.step_seconds
    return best


def _fewest(placed: Iterable[Candidate], best: Candidate) -> Candidate:
    """Of the candidates that are nearly as good as the best, the one with the fewest workers."""
    limit = best.step_seconds * (1 + LEAST_GAIN)
    fewer = [c for c in placed if len(c.workers) < len(best.workers) and c.least_seconds < limit]
    fewer.sort(key=lambda candidate: len(candidate.workers))
    for candidate in fewer[:MOST_OF_MANY_PLAYED]:
        if candidate.step_seconds < limit:
            return candidate
    return best


def interchangeable(costs: Costs) -> dict[str, int]:
    """A number for each worker, equal for those that can stand in for each other."""
    workers = costs.profile.workers
    members: list[list[str]] = []
    for name in workers:
        for known in members:
            if _are_alike(costs, known[0], name):
                known.append(name)
                break
        else:
            members.append([name])
    return {name: number for number, names in enumerate(members) for name in names}


def _are_alike(costs: Costs, one: str, other: str) -> bool:
    if costs.kind(one) != costs.kind(other) or {one, other} & set(costs.pins):
        return False
    others = [d.name for d in costs.profile.devices if d.name not in (one, other)]
    pairs = [((one, name), (other, name)) for name in others]
    pairs += [((name, one), (name, other)) for name in others]
    pairs += [((one, other), (other, one))]
    return all(_speed(costs, *first) == _speed(costs, *second) for first, second in pairs)


def _speed(costs: Costs, source: str, target: str) -> tuple[float, float, str | None]:
    link = costs.link(source, target)
    return link.latency_seconds, link.bytes_per_second, link.shared
