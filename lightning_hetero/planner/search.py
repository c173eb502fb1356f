"""The search: which devices, in which order, and into how many micro-batches.

With up to five workers the search tries every subset in every order, and counts interchangeable
devices once. It begins with the lowest bound and stops at the best step simulated so far.

With more workers it tries the fastest one, two, three, … of them, each in order of speed and along
the fastest links. It splits those for which (micro-batches + processes - 1) times the bound per
micro-batch is least, and simulates the splits with the lowest bounds. With up to ten workers it
then exchanges two workers, removes or adds one, or changes the number of micro-batches, while that
helps.

The search tries all of the coordinator's layers in front of the workers' and all of them behind,
and keeps them in front on a tie. For one order of devices it takes the split with the fastest
slowest stage (`place`).

Where few micro-batches fill the pipeline, other splits and orders are faster. So with up to ten
workers the search then splits the best orders for each number of the coordinator's layers in front.
From the best of all it makes small changes while the simulated step gets shorter: it moves layers
between seats, exchanges, removes or adds a worker, or changes the place of the embedding, the
number of micro-batches or of those in flight.

At the end it takes as few micro-batches in flight as are nearly as fast. For a mixture in halves it
also tries the experts on one worker and all else on another (`experts`). Then it looks for plans
with replicas, and takes one if it is faster by as much as a device has to be (`replica_search`).
With more than ten workers that search goes on by random changes, of lines too (`team_walk`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, permutations, product

from msgspec import structs

from ..plan import COORDINATOR
from .bounds import least_bottleneck
from .candidates import Arrangement, Candidate, Costs, spans_of
from .experts import best_apart
from .replica_search import (
    LAYERS_MOVED,
    LEAST_GAIN_IN_FLIGHT,
    LEAST_GAIN_OF_CHANGE,
    TeamSearch,
    moved_layers,
)
from .step_model import Speed
from .worker_orders import (
    Orders,
    in_flight_of,
    interchangeable,
    place,
    place_all,
    place_at,
    place_behind,
)

ALL_ORDERS_UP_TO = 5
"""Workers up to which all subsets in all orders are tried: 325 arrangements."""

EXCHANGES_UP_TO = 10
"""Workers up to which the search makes small changes."""

MOST_PLAYED = 24
"""Candidates of one choice of devices that an exhaustive search simulates."""

MOST_SPLIT, MOST_OF_MANY_PLAYED = 16, 4
"""With more workers: choices that are split, and candidates that are simulated at a time."""

NUM_STARTS = 4
"""The best candidates with unlike devices, from which the search makes small changes."""

MOST_NEAR_PLAYED = 12
"""Small changes of one candidate that are simulated, those with the lowest bounds first."""

MOST_WORSE = 1.05
"""How much longer than the best step known the step of a split may be whose neighbors are played.
"""

LEAST_GAIN = 0.02
"""Share of the step that a device must save, because each additional device can drift or fail."""

LEAST_GAIN_BEHIND = 1e-9
"""Share of the step that the coordinator's layers behind must save; less is rounding of sums."""


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
        may_replicate: Whether several processes may hold the same stage.
        counts_alone: Numbers of micro-batches for one device alone; left out, the same ones.

    Attributes:
        costs: The costs of devices and links.
        line: The best plan without replicas, once `best` has run; None if none fits.
        knows_line: Whether `best` has run.
        teams: The search among plans with replicas.
    """

    def __init__(
        self,
        costs: Costs,
        micro_batches: Sequence[int],
        may_replicate: bool = True,
        counts_alone: Sequence[int] = (),
    ) -> None:
        self.costs = costs
        self._may_replicate = may_replicate
        self.micro_batches = micro_batches
        self.counts_alone = counts_alone or micro_batches
        self._classes = interchangeable(costs)
        self._starts: list[Candidate] = []
        self._orders = Orders(costs, costs.size(max(micro_batches)))
        self.teams = TeamSearch(costs, micro_batches, self._classes, self._orders.by_speed)
        self.line: Candidate | None = None
        self.knows_line = False

    def best(self) -> Candidate | None:
        """The best candidate without devices that gain too little; None if nothing fits."""
        best = self._best_devices()
        found = None if best is None else self._with_enough_in_flight(best)
        self.line, self.knows_line = found, True
        if self._may_replicate:
            found = self.teams.best(found) or found
            if found is not None and not found.has_replicas:
                self.line = found
        limit = math.inf if found is None else found.step_seconds * (1 - LEAST_GAIN)
        return self.apart if self.apart is not None and self.apart.is_below(limit) else found

    @cached_property
    def apart(self) -> Candidate | None:
        """The fastest plan with the experts of a mixture apart; None if there is none."""
        return best_apart(self.costs, self._orders.by_speed, self.micro_batches)

    def _best_devices(self) -> Candidate | None:
        subsets = list(self._subsets())
        if self._looks_at_all:
            best = self._best_among(subsets, math.inf)
            if best is None:
                return None
            starts = [*self._starts, *self._with_both_ends(self._starts)]
            starts += self._around_one_worker(best.step_seconds)
            return self._without_idlers(self._descend(starts))
        placed = self._place_likely(self._choices(subsets))
        best = self._best_played(placed, math.inf, MOST_OF_MANY_PLAYED)
        if best is None:
            return None
        if len(best.workers) > EXCHANGES_UP_TO:
            return _fewest(placed, best)
        improved = self._improve(best)
        starts = [improved, *self._with_both_ends([improved])]
        return self._without_idlers(self._descend(starts))

    def at_once(self, num_batches: int) -> Search:
        """The search among plans for so many batches that come as one, in as many micro-batches
        each."""
        costs = self.costs
        pieces = [num_batches * count // costs.num_batches for count in self.micro_batches]
        profile = structs.replace(
            costs.profile,
            batch_size=costs.batch_size * num_batches,
            accumulate_grad_batches=1,
        )
        return Search(Costs(profile, costs.pins), pieces, self._may_replicate)

    def best_with(self, workers: Iterable[str], below: float = math.inf) -> Candidate | None:
        """The best candidate with exactly these workers, if its step is shorter than ``below``."""
        best = self._best_among([tuple(workers)], below)
        if best is None:
            return None
        return self._with_enough_in_flight(self._descend([best], keeps_devices=True))

    def best_alone(self, name: str) -> Candidate | None:
        """The best candidate with all layers on one device; None if they do not fit."""
        num_layers = self.costs.num_layers
        workers = [] if name == COORDINATOR else [name]
        ranges = spans_of([0, num_layers, 0] if workers else [num_layers, 0])
        placed = []
        for pieces, left in product(self.counts_alone, self._embeddings if workers else (False,)):
            way = Arrangement(self.costs, workers, pieces, left)
            placed += [
                way.with_ranges(ranges, min(in_flight, pieces))
                for in_flight in ((4, 2, 1) if workers else (1,))
                if math.isfinite(way.slowest_seconds(ranges, in_flight))
            ]
        return self._best_played(placed, math.inf, MOST_PLAYED)

    @property
    def _embeddings(self) -> tuple[bool, ...]:
        """Whether a worker has the embedding: what may be."""
        return (False, True) if self.costs.profile.model.embedding_may_leave else (False,)

    def one_of_each(self, workers: Sequence[str] | None = None) -> list[str]:
        """One worker of each class of interchangeable ones, among these or all workers."""
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

    def _best_among(self, subsets: Sequence[tuple[str, ...]], below: float) -> Candidate | None:
        choices = [choice for choice in self._choices(subsets) if choice.least_seconds < below]
        if not self._looks_at_all:
            return self._best_played(self._place_likely(choices), below, MOST_OF_MANY_PLAYED)
        best: Candidate | None = None
        for choice in sorted(choices, key=lambda c: (c.least_seconds, len(c.workers))):
            if choice.least_seconds >= below:
                break
            found = self._best_order(choice, below)
            if found is not None:
                best, below = found, found.step_seconds
        return best

    def _best_played(
        self, placed: Iterable[Candidate], below: float, most: int
    ) -> Candidate | None:
        """Simulate the candidates with the lowest bounds; the shortest step below ``below``."""
        best: Candidate | None = None
        for candidate in sorted(placed, key=lambda candidate: candidate.least_seconds)[:most]:
            if candidate.least_seconds >= below:
                break
            self._note_start(candidate)
            if candidate.is_below(below):
                best, below = candidate, candidate.step_seconds
        return best

    def _note_start(self, candidate: Candidate) -> None:
        """Keep the candidate if it is among the best ones with unlike devices."""
        alike = [start for start in self._starts if _is_akin(start, candidate)]
        others = [start for start in self._starts if start not in alike]
        ranked = alike or others[NUM_STARTS - 1 :]
        if ranked and not candidate.is_below(ranked[0].step_seconds):
            return
        self._starts = sorted([*others, candidate], key=_step_of)[:NUM_STARTS]

    def _place_likely(self, choices: Sequence[Choice]) -> list[Candidate]:
        """Split the choices with the shortest estimated steps, until enough of them have fit."""
        possible = [choice for choice in choices if math.isfinite(choice.likely_seconds)]
        placed: list[Candidate] = []
        num_split = 0
        for choice in sorted(possible, key=lambda c: c.likely_seconds):
            found = [
                candidate
                for order in self._orders.usual(choice.workers)
                for candidate in place_all(Arrangement(self.costs, order, choice.micro_batches))
            ]
            placed += found
            num_split += bool(found)
            if num_split == MOST_SPLIT:
                break
        return placed

    def _choices(self, subsets: Sequence[tuple[str, ...]]) -> list[Choice]:
        return [
            self._choice(workers, pieces) for workers in subsets for pieces in self.micro_batches
        ]

    def _choice(self, workers: tuple[str, ...], pieces: int) -> Choice:
        speeds = speeds_of(self.costs, workers, pieces)
        slowest = least_bottleneck(speeds, len(self.costs.profile.model.layers))
        return Choice(pieces * slowest, (pieces + len(workers)) * slowest, pieces, workers)

    def _best_order(self, choice: Choice, below: float) -> Candidate | None:
        orders, pieces = self._all_orders(choice.workers), choice.micro_batches
        ways = [Arrangement(self.costs, order, pieces) for order in orders]
        first = self._best_played(place(ways, None, below), below, MOST_PLAYED)
        if not choice.workers:
            return first
        below = (below if first is None else first.step_seconds) * (1 - LEAST_GAIN_BEHIND)
        return self._best_played(place_behind(ways, below), below, MOST_PLAYED) or first

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

    def _improve(self, best: Candidate) -> Candidate:
        """Exchange, remove or add a worker, or change the micro-batches, while that helps."""
        while True:
            climbed = self._climb(best)
            placed = [climbed, *self._changed(climbed)]
            for pieces in self.micro_batches:
                placed += place_all(Arrangement(self.costs, climbed.workers, pieces))
            found = self._best_played(placed, best.step_seconds, MOST_OF_MANY_PLAYED)
            if found is None:
                return best
            best = found

    def _descend(self, starts: Sequence[Candidate], keeps_devices: bool = False) -> Candidate:
        """The best candidate to which small changes lead from the given ones.

        The simulator is the judge of each change. So this finds splits that are faster than the
        ones with the fastest slowest stage, as where few micro-batches have to fill the pipeline.
        With more than `EXCHANGES_UP_TO` workers it changes nothing, because simulations take long.
        """
        if len(starts[0].workers) > EXCHANGES_UP_TO:
            return min(starts, key=_step_of)
        played: set[Hashable] = set()
        return min((self._descended(each, keeps_devices, played) for each in starts), key=_step_of)

    def _descended(self, best: Candidate, keeps_devices: bool, played: set[Hashable]) -> Candidate:
        while True:
            before = best
            near = [*_with_moved_layers(best, best.step_seconds), *_with_other_in_flight(best)]
            near += self._rearranged(best, keeps_devices)
            best = _best_near(best, near, played)
            if best is before:
                return best

    def _with_both_ends(self, starts: Sequence[Candidate]) -> list[Candidate]:
        """Candidates in which the coordinator has other numbers of its layers in front, for the
        orders of some candidates; all layers are split anew."""
        found = []
        for start in starts:
            way = replace(Arrangement.of(start), embedding_left=False)
            found += self._at_both_ends(way, start.in_flight, start.step_seconds)
        return found

    def _around_one_worker(self, below: float) -> list[Candidate]:
        """Candidates with the coordinator at both ends of one worker. They may be the best ones
        although the same worker gains nothing behind or before all of the coordinator's layers."""
        found = []
        for name, pieces in product(self.one_of_each(), self.micro_batches):
            way = Arrangement(self.costs, [name], pieces)
            found += self._at_both_ends(way, min(4, pieces), below)
        return found

    def _at_both_ends(self, way: Arrangement, in_flight: int, below: float) -> list[Candidate]:
        """The best candidate of an arrangement with layers in front; none if it is not faster.

        The split with the fastest slowest stage need not fill the pipeline soonest. So for each
        number of layers in front the neighbors of that split are played too, if it comes near.
        """
        placed = []
        for front in range(1, self.costs.num_layers if way.workers else 0):
            if way.own.front_seconds(front) * way.micro_batches >= below:
                break
            candidate = place_at(way, in_flight, front, below)
            placed += [] if candidate is None else [candidate]
        best: Candidate | None = None
        for split in sorted(placed, key=lambda each: each.least_seconds)[:MOST_NEAR_PLAYED]:
            if not split.is_below(below * MOST_WORSE):
                continue
            near = [split, *_with_moved_layers(split, below)]
            found = self._best_played(near, below, MOST_NEAR_PLAYED)
            if found is not None:
                best, below = found, found.step_seconds
        return [] if best is None else [best]

    def _rearranged(self, best: Candidate, keeps_devices: bool) -> Iterator[Candidate]:
        """Candidates with another order, place of the embedding or number of micro-batches, or a
        worker more or less.

        Each seat keeps its number of layers if the devices stay; the layers are also split anew.
        """
        way = Arrangement.of(best)
        own, counts = _own_counts(best), _counts_of(best)
        ways = [replace(way, workers=order) for order in self._exchanged(best.workers)]
        ways += [replace(way, embedding_left=left) for left in self._embeddings if best.workers]
        ways += [replace(way, micro_batches=pieces) for pieces in self.micro_batches]
        for each in ways:
            yield from _with_counts(each, own, counts, best)
        if not keeps_devices:
            for order in self._one_more_anywhere(best.workers):
                longer = replace(way, workers=order)
                yield from _with_one_more(longer, own, counts, best)
                ways.append(longer)
            for order in self._one_less(best.workers):
                left = bool(order) and way.embedding_left
                ways.append(replace(way, workers=order, embedding_left=left))
        for each in ways:
            levels = {best.in_flight, *in_flight_of(len(each.names))} if each.workers else {1}
            sizes = sorted({min(level, each.micro_batches) for level in levels})
            is_same_order = each.workers and each.workers == best.workers
            fronts = _fronts_of(best) if is_same_order else [_front_of(best)]
            for in_flight, front in product(sizes, fronts if each.workers else [None]):
                placed = place_at(each, in_flight, front, best.step_seconds)
                yield from [] if placed is None else [placed]

    def _one_more_anywhere(self, workers: Sequence[str]) -> Iterator[list[str]]:
        """The workers with another one, in each place."""
        spare = [name for name in self._orders.by_speed if name not in workers]
        for name, index in product(self.one_of_each(spare), range(len(workers) + 1)):
            yield [*workers[:index], name, *workers[index:]]

    def _climb(self, best: Candidate) -> Candidate:
        """Exchange, remove or add a worker while the bound falls, without a simulation."""
        while True:
            found = min(self._changed(best), key=lambda c: c.least_seconds, default=best)
            if found.least_seconds >= best.least_seconds * (1 - 1e-9):
                return best
            best = found

    def _changed(self, best: Candidate) -> list[Candidate]:
        orders = [*self._exchanged(best.workers), *self._one_less(best.workers)]
        orders += self._one_more(best.workers)
        way = Arrangement.of(best)
        placed = []
        for order in orders:
            left = bool(order) and way.embedding_left
            other = replace(way, workers=order, embedding_left=left)
            front = _front_of(best) if order else None
            placed.append(place_at(other, best.in_flight, front))
        return [candidate for candidate in placed if candidate is not None]

    def _exchanged(self, workers: Sequence[str]) -> Iterator[list[str]]:
        for one, other in combinations(range(len(workers)), 2):
            if self._classes[workers[one]] != self._classes[workers[other]]:
                order = list(workers)
                order[one], order[other] = order[other], order[one]
                yield order

    def _one_less(self, workers: Sequence[str]) -> Iterator[list[str]]:
        """The workers without one of each class; pinned workers stay."""
        for name in self.one_of_each(workers[::-1]):
            if name not in self.costs.pins:
                yield [other for other in workers if other != name]

    def _one_more(self, workers: Sequence[str]) -> Iterator[list[str]]:
        spare = [name for name in self._orders.by_speed if name not in workers]
        for name in self.one_of_each(spare):
            yield self._orders.by_speed_and_pins([*workers, name])

    def _without_idlers(self, best: Candidate) -> Candidate:
        limit = best.step_seconds * (1 + LEAST_GAIN)
        while True:
            trials = [
                self._best_among([tuple(less)], limit) for less in self._one_less(best.workers)
            ]
            found = [trial for trial in trials if trial is not None]
            if not found:
                return best
            best = self._descend([min(found, key=_step_of)], keeps_devices=True)

    def _with_enough_in_flight(self, best: Candidate) -> Candidate:
        """Take the fewest micro-batches in flight that are nearly as fast as the best number.

        The numbers are one to four times that of the processes.
        """
        processes = len(best.processes)
        if processes == 1:
            return best
        counts = {min(processes * quarters // 4, best.micro_batches) for quarters in range(4, 17)}
        trials = [_with_in_flight(best, count) for count in counts]
        trials += [
            place_at(Arrangement.of(best), count, front)
            for front in _fronts_of(best)
            for count in counts
        ]
        found = {trial.identity: trial for trial in trials if trial is not None}
        found[best.identity] = best
        limit = best.step_seconds * (1 + LEAST_GAIN_IN_FLIGHT)
        fast = [trial for trial in found.values() if trial is best or trial.is_below(limit)]
        limit = min(map(_step_of, fast)) * (1 + LEAST_GAIN_IN_FLIGHT)
        fast = [candidate for candidate in fast if candidate.step_seconds <= limit]
        return min(fast, key=lambda candidate: (candidate.in_flight, candidate.step_seconds))


def speeds_of(costs: Costs, workers: Sequence[str], micro_batches: int) -> list[Speed]:
    """Speeds for a bound that holds for every plan: the coordinator has the fewest ends of the
    model, and the other ends cost nothing."""
    size = costs.size(micro_batches)
    may_leave = costs.profile.model.embedding_may_leave and bool(workers)
    own = costs.both_ends(size, may_leave).speed
    if may_leave:
        # Its layers may be in front if the embedding stays.
        most_layers = costs.both_ends(size, embedding_left=False).speed.most_layers
        own = replace(own, most_layers=max(own.most_layers, most_layers))
    return [own, *(costs.holder(name, size).speed for name in workers)]


def _step_of(candidate: Candidate) -> float:
    return candidate.step_seconds


def _best_near(best: Candidate, near: Iterable[Candidate], played: set[Hashable]) -> Candidate:
    """The best one of some candidates, of which those with the lowest bounds are simulated."""
    for candidate in sorted(near, key=lambda near: near.least_seconds)[:MOST_NEAR_PLAYED]:
        limit = best.step_seconds * (1 - LEAST_GAIN_OF_CHANGE)
        if candidate.least_seconds >= limit:
            break
        if candidate.identity not in played and candidate.is_below(limit):
            best = candidate
        played.add(candidate.identity)
    return best


def _is_akin(one: Candidate, other: Candidate) -> bool:
    """Whether candidates differ at most in their splits and in flight."""
    return _kin_of(one) == _kin_of(other)


def _kin_of(candidate: Candidate) -> Hashable:
    own = [count > 0 for count in _own_counts(candidate)]
    return candidate.workers, candidate.micro_batches, candidate.embedding_left, *own


def _front_of(candidate: Candidate) -> int | None:
    """The coordinator's layers in front; None if it has no others."""
    front, behind = _own_counts(candidate)
    return None if front and not behind else front


def _fronts_of(candidate: Candidate) -> list[int | None]:
    """Numbers of the coordinator's layers in front that a change tries."""
    if candidate.embedding_left or not Arrangement.of(candidate).own.speed.most_layers:
        return [0]
    return [None, *sorted({0, _own_counts(candidate)[0]})]


def _own_counts(candidate: Candidate) -> tuple[int, int]:
    """The numbers of the coordinator's layers in front and behind."""
    return candidate.seats[0].num_layers, candidate.seats[-1].num_layers


def _counts_of(candidate: Candidate) -> dict[str, int]:
    """The number of layers of each worker."""
    return {seat.name: seat.num_layers for seat in candidate.seats[1:-1]}


def _with_moved_layers(best: Candidate, below: float) -> Iterator[Candidate]:
    """Candidates in which one seat has some layers less and another one more; the seats between
    them keep their number."""
    way, counts = Arrangement.of(best), [seat.num_layers for seat in best.seats]
    least = [0, *[1] * (len(counts) - 2), 0]
    for moved in moved_layers(counts, range(len(counts)), least):
        yield from _with_spans(way, moved, best.in_flight, below)


def _with_counts(
    way: Arrangement, own: tuple[int, int], counts: dict[str, int], best: Candidate
) -> Iterator[Candidate]:
    """The candidate in which these devices keep their numbers of layers, if they can."""
    front, behind = own
    in_order = [front, *(counts[name] for name in way.workers), behind]
    yield from _with_spans(way, in_order, best.in_flight, best.step_seconds)


def _with_spans(
    way: Arrangement, counts: Sequence[int], most_in_flight: int, below: float
) -> Iterator[Candidate]:
    """The candidate with these numbers of layers, if they fit the devices and the pins, and if the
    slowest process alone takes less than ``below``."""
    front, *of_workers, behind = counts
    if min(front, behind) < 0 or min(of_workers, default=1) < 1:
        return
    if not of_workers and behind or way.embedding_left and front:
        return
    ranges, in_flight = spans_of(counts), min(most_in_flight, way.micro_batches)
    least_seconds = way.micro_batches * way.slowest_seconds(ranges, in_flight)
    if least_seconds < below and way.keeps_pins(ranges):
        yield way.with_ranges(ranges, in_flight)


def _with_one_more(
    way: Arrangement, own: tuple[int, int], counts: dict[str, int], best: Candidate
) -> Iterator[Candidate]:
    """Candidates in which a new worker takes layers from one other seat."""
    new = next(name for name in way.workers if name not in counts)
    for by in LAYERS_MOVED:
        yield from _with_counts(way, (own[0] - by, own[1]), {**counts, new: by}, best)
        yield from _with_counts(way, (own[0], own[1] - by), {**counts, new: by}, best)
        for giver in counts:
            taken = {**counts, giver: counts[giver] - by, new: by}
            yield from _with_counts(way, own, taken, best)


def _with_other_in_flight(candidate: Candidate) -> Iterator[Candidate]:
    """Candidates with the same layers and other numbers of micro-batches in flight."""
    if candidate.workers:
        num, present = len(candidate.processes), candidate.in_flight
        counts = {1, present - 1, present + 1, num, 2 * num, 3 * num, 4 * num}
        for count in sorted({min(max(count, 1), candidate.micro_batches) for count in counts}):
            other = _with_in_flight(candidate, count)
            if other is not None:
                yield other


def _with_in_flight(candidate: Candidate, in_flight: int) -> Candidate | None:
    """The same layers with this number in flight; None if they do not fit."""
    way, ranges = Arrangement.of(candidate), candidate.ranges
    fits = math.isfinite(way.slowest_seconds(ranges, in_flight))
    return way.with_ranges(ranges, in_flight) if fits else None


def _fewest(placed: Iterable[Candidate], best: Candidate) -> Candidate:
    """The candidate with the fewest workers among those nearly as fast as the best."""
    limit = best.step_seconds * (1 + LEAST_GAIN)
    fewer = [c for c in placed if len(c.workers) < len(best.workers) and c.least_seconds < limit]
    fewer.sort(key=lambda candidate: len(candidate.workers))
    for candidate in fewer[:MOST_OF_MANY_PLAYED]:
        if candidate.step_seconds < limit:
            return candidate
    return best
