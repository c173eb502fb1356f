"""The search: which devices, in which order, and into how many micro-batches.

With up to five workers the search tries every subset in every order, and counts interchangeable
devices once. It begins with the lowest bound and stops at the best step simulated so far.

With more workers it tries the fastest one, two, three, … of them, each in order of speed and along
the fastest links. It splits those for which (micro-batches + processes - 1) times the bound per
micro-batch is least, and simulates the splits with the lowest bounds. With up to ten workers it
then exchanges two workers, removes or adds one, or changes the number of micro-batches, while that
helps.

The search tries the coordinator first and last (see `Form`), and keeps it first on a tie. For one
order of devices it takes the split with the fastest slowest stage (`Arrangement`).

Where few micro-batches fill the pipeline, other splits and orders are faster. So with up to ten
workers the search then makes small changes to the best candidates, while the simulated step gets
shorter: it moves layers between stages, exchanges, removes or adds a worker, or changes the form,
the number of micro-batches or of those in flight.

At the end it takes as few micro-batches in flight as are nearly as fast.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, combinations, pairwise, permutations, product

from ..plan import COORDINATOR
from .candidates import (
    Arrangement,
    Candidate,
    Costs,
    Form,
    forms_for,
    hops_between,
    lightest_form,
    place_both,
    place_last,
)
from .simulation import Speed, least_bottleneck

ALL_ORDERS_UP_TO = 5
"""Workers up to which all subsets in all orders are tried: 325 arrangements."""

EXCHANGES_UP_TO = 10
"""Workers up to which the search makes small changes."""

MOST_PLAYED = 24
"""Candidates of one choice of devices that an exhaustive search simulates."""

MOST_SPLIT, MOST_OF_MANY_PLAYED = 16, 4
"""With more workers: choices that are split, and candidates that are simulated at a time."""

NUM_STARTS = 4
"""The best candidates with unlike devices or forms, from which the search makes small changes."""

MOST_NEAR_PLAYED = 12
"""Small changes of one candidate that are simulated, those with the lowest bounds first."""

LAYERS_MOVED = (1, 2, 4, 8)
"""Numbers of layers that a small change moves from one stage to another."""

LEAST_GAIN_OF_CHANGE = 1e-9
"""Share of the step that a small change must save; less is rounding of sums."""

LEAST_GAIN = 0.02
"""Share of the step that a device must save, because each additional device can drift or fail."""

LEAST_GAIN_OF_FORM = 1e-9
"""Share of the step that a coordinator in the last place must save; less is rounding of sums."""

LEAST_GAIN_IN_FLIGHT = 0.005
"""Share of the step that more micro-batches in flight must save, because each keeps activations."""


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
    """

    def __init__(self, costs: Costs, micro_batches: Sequence[int]) -> None:
        self._costs = costs
        self.micro_batches = micro_batches
        self._classes = interchangeable(costs)
        self._starts: list[Candidate] = []
        self._orders = Orders(costs, costs.size(max(micro_batches)))

    def best(self) -> Candidate | None:
        """The best candidate without devices that gain too little; None if nothing fits."""
        best = self._best_devices()
        return None if best is None else self._with_enough_in_flight(best)

    def _best_devices(self) -> Candidate | None:
        subsets = list(self._subsets())
        if self._looks_at_all:
            best = self._best_among(subsets, math.inf)
            return None if best is None else self._without_idlers(self._descend(self._starts))
        placed = self._place_likely(self._choices(subsets))
        best = self._best_played(placed, math.inf, MOST_OF_MANY_PLAYED)
        if best is None:
            return None
        if len(best.workers) > EXCHANGES_UP_TO:
            return _fewest(placed, best)
        return self._without_idlers(self._descend([self._improve(best)]))

    def best_with(self, workers: Iterable[str], below: float = math.inf) -> Candidate | None:
        """The best candidate with exactly these workers, if its step is shorter than ``below``."""
        best = self._best_among([tuple(workers)], below)
        if best is None:
            return None
        return self._with_enough_in_flight(self._descend([best], keeps_devices=True))

    def best_alone(self, name: str) -> Candidate | None:
        """The best candidate with all layers on one device; None if they do not fit."""
        model = self._costs.profile.model
        layers, alone = len(model.layers), name == COORDINATOR
        placed = []
        forms = (Form.FIRST,) if alone else forms_for(model)
        for form, pieces in product(forms, self.micro_batches):
            way = Arrangement(self._costs, [] if alone else [name], pieces, form)
            ranges = [(0, layers)] if alone else [form.no_layers(layers), (0, layers)]
            placed += [
                way.with_ranges(ranges, min(in_flight, pieces))
                for in_flight in ((1,) if alone else (4, 2, 1))
                if way.fits(ranges, in_flight)
            ]
        return self._best_played(placed, math.inf, MOST_PLAYED)

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
            if candidate.step_seconds < below:
                best, below = candidate, candidate.step_seconds
        return best

    def _note_start(self, candidate: Candidate) -> None:
        """Keep the candidate if it is among the best ones with unlike devices or forms."""
        alike = [start for start in self._starts if _is_akin(start, candidate)]
        others = [start for start in self._starts if start not in alike]
        ranked = sorted([*others, min([*alike, candidate], key=_step_of)], key=_step_of)
        self._starts = ranked[:NUM_STARTS]

    def _place_likely(self, choices: Sequence[Choice]) -> list[Candidate]:
        """Split the choices with the shortest estimated steps, until enough of them have fit."""
        possible = [choice for choice in choices if math.isfinite(choice.likely_seconds)]
        placed: list[Candidate] = []
        num_split = 0
        for choice in sorted(possible, key=lambda c: c.likely_seconds):
            found = [
                candidate
                for order in self._orders.usual(choice.workers)
                for candidate in place_both(self._costs, order, choice.micro_batches)
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
        speeds = speeds_of(self._costs, workers, pieces)
        slowest = least_bottleneck(speeds, len(self._costs.profile.model.layers))
        return Choice(pieces * slowest, (pieces + len(workers)) * slowest, pieces, workers)

    def _best_order(self, choice: Choice, below: float) -> Candidate | None:
        orders, pieces = self._all_orders(choice.workers), choice.micro_batches
        placed = [
            c for order in orders for c in Arrangement(self._costs, order, pieces).place(below)
        ]
        first = self._best_played(placed, below, MOST_PLAYED)
        below = (below if first is None else first.step_seconds) * (1 - LEAST_GAIN_OF_FORM)
        placed = [c for order in orders for c in place_last(self._costs, order, pieces, below)]
        return self._best_played(placed, below, MOST_PLAYED) or first

    def _subsets(self) -> Iterator[tuple[str, ...]]:
        """Subsets of the workers; each has all pinned workers."""
        pinned = [name for name in self._orders.by_speed if name in self._costs.pins]
        free = [name for name in self._orders.by_speed if name not in self._costs.pins]
        if not self._looks_at_all:
            most = len(self._costs.profile.model.layers) - len(pinned)
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
                placed += place_both(self._costs, climbed.workers, pieces)
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
            near = [*_with_moved_layers(best), *_with_other_in_flight(best)]
            near += self._rearranged(best, keeps_devices)
            for candidate in sorted(near, key=lambda near: near.least_seconds)[:MOST_NEAR_PLAYED]:
                limit = best.step_seconds * (1 - LEAST_GAIN_OF_CHANGE)
                if candidate.least_seconds >= limit:
                    break
                if candidate.identity not in played and candidate.step_seconds < limit:
                    best = candidate
                played.add(candidate.identity)
            if best is before:
                return best

    def _rearranged(self, best: Candidate, keeps_devices: bool) -> Iterator[Candidate]:
        """Candidates with another order, form or number of micro-batches, or a worker more or less.

        Each device keeps its number of layers if the devices stay; the layers are also split anew.
        """
        costs, pieces, below = self._costs, best.micro_batches, best.step_seconds
        counts = _counts_of(best)
        orders = [*self._exchanged(best.workers)]
        forms = forms_for(costs.profile.model) if best.workers else ()
        ways = [Arrangement(costs, order, pieces, best.form) for order in orders]
        ways += [Arrangement(costs, best.workers, pieces, form) for form in forms]
        ways += [Arrangement(costs, best.workers, n, best.form) for n in self.micro_batches]
        for way in ways:
            yield from _with_counts(way, counts, best.in_flight)
        if not keeps_devices:
            fewer, more = self._one_less(best.workers), self._one_more_anywhere(best.workers)
            longer = [Arrangement(costs, order, pieces, best.form) for order in more]
            for way in longer:
                yield from _with_one_more(way, counts, best.in_flight)
            forms_of_fewer = ((order, best.form if order else Form.FIRST) for order in fewer)
            ways += [*longer, *(Arrangement(costs, o, pieces, form) for o, form in forms_of_fewer)]
        for way in ways:
            levels = {best.in_flight, 2 * len(way.names)} if way.workers else {1}
            for in_flight in sorted({min(level, way.micro_batches) for level in levels}):
                placed = way.place_at(in_flight, below)
                if placed is not None:
                    yield placed

    def _one_more_anywhere(self, workers: Sequence[str]) -> Iterator[list[str]]:
        """The workers with another one, in each place."""
        spare = [name for name in self._orders.by_speed if name not in workers]
        for name, place in product(self.one_of_each(spare), range(len(workers) + 1)):
            yield [*workers[:place], name, *workers[place:]]

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
        placed = (
            Arrangement(self._costs, order, best.micro_batches, best.form).place_at(best.in_flight)
            for order in orders
            if order or best.form is Form.FIRST
        )
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
            if name not in self._costs.pins:
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

        The numbers are one to three times that of the processes. An exhaustive search also tries
        every form.
        """
        processes = len(best.workers) + 1
        if processes == 1:
            return best
        counts = {min(processes * quarters // 4, best.micro_batches) for quarters in range(4, 13)}
        forms = forms_for(self._costs.profile.model) if self._looks_at_all else (best.form,)
        trials = [
            Arrangement(self._costs, best.workers, best.micro_batches, form).place_at(count)
            for form in forms
            for count in counts
        ]
        trials += [_with_in_flight(best, count) for count in counts]
        found = [best, *(trial for trial in trials if trial is not None)]
        limit = min(c.step_seconds for c in found) * (1 + LEAST_GAIN_IN_FLIGHT)
        fast = [candidate for candidate in found if candidate.step_seconds <= limit]
        return min(fast, key=lambda candidate: (candidate.in_flight, candidate.step_seconds))


def speeds_of(costs: Costs, workers: Sequence[str], micro_batches: int) -> list[Speed]:
    """Speeds for a bound that holds in every form: the coordinator has the fewest ends of the
    model, and the other ends cost nothing."""
    form = lightest_form(costs.profile.model, workers)
    size = costs.size(micro_batches)
    own = costs.holder(COORDINATOR, size, form.role(0)).speed
    return [own, *(costs.holder(name, size).speed for name in workers)]


def _step_of(candidate: Candidate) -> float:
    return candidate.step_seconds


def _is_akin(one: Candidate, other: Candidate) -> bool:
    """Whether candidates differ at most in their splits and in flight."""
    return (one.workers, one.micro_batches, one.form) == (
        other.workers,
        other.micro_batches,
        other.form,
    )


def _with_moved_layers(candidate: Candidate) -> Iterator[Candidate]:
    """Candidates in which one stage has some layers less and another one more; the stages between
    them keep their number."""
    way, counts = _way_of(candidate), _counts_of(candidate)
    for (giver, taker), by in product(permutations(counts, 2), LAYERS_MOVED):
        moved = {**counts, giver: counts[giver] - by, taker: counts[taker] + by}
        yield from _with_counts(way, moved, candidate.in_flight)


def _counts_of(candidate: Candidate) -> dict[str, int]:
    """The number of layers of each device."""
    spans = zip(candidate.names, candidate.ranges, strict=True)
    return {name: end - first for name, (first, end) in spans}


def _with_counts(
    way: Arrangement, counts: Mapping[str, int], in_flight: int
) -> Iterator[Candidate]:
    """The candidate with these numbers of layers, if they fit the devices and the pins."""
    if any(counts[name] < (name != COORDINATOR) for name in way.names):
        return
    in_layer_order = [counts[name] for name in way.form.in_layer_order(way.names)]
    spans = list(pairwise(accumulate(in_layer_order, initial=0)))
    ranges = way.form.coordinator_first(spans)
    in_flight = min(in_flight, way.micro_batches)
    if way.keeps_pins(ranges) and way.fits(ranges, in_flight):
        yield way.with_ranges(ranges, in_flight)


def _with_one_more(
    way: Arrangement, counts: Mapping[str, int], in_flight: int
) -> Iterator[Candidate]:
    """Candidates in which a new worker takes layers from one other stage."""
    new = next(name for name in way.workers if name not in counts)
    for giver, by in product(counts, LAYERS_MOVED):
        taken = {**counts, giver: counts[giver] - by, new: by}
        yield from _with_counts(way, taken, in_flight)


def _with_other_in_flight(candidate: Candidate) -> Iterator[Candidate]:
    """Candidates with the same layers and other numbers of micro-batches in flight."""
    if candidate.workers:
        num, present = len(candidate.names), candidate.in_flight
        counts = {1, present - 1, present + 1, num, 2 * num, 3 * num}
        for count in sorted({min(max(count, 1), candidate.micro_batches) for count in counts}):
            other = _with_in_flight(candidate, count)
            if other is not None:
                yield other


def _with_in_flight(candidate: Candidate, in_flight: int) -> Candidate | None:
    """The same layers with this number in flight; None if they do not fit."""
    way, ranges = _way_of(candidate), candidate.ranges
    return way.with_ranges(ranges, in_flight) if way.fits(ranges, in_flight) else None


def _way_of(candidate: Candidate) -> Arrangement:
    return Arrangement(candidate.costs, candidate.workers, candidate.micro_batches, candidate.form)


def _fewest(placed: Iterable[Candidate], best: Candidate) -> Candidate:
    """The candidate with the fewest workers among those nearly as fast as the best."""
    limit = best.step_seconds * (1 + LEAST_GAIN)
    fewer = [c for c in placed if len(c.workers) < len(best.workers) and c.least_seconds < limit]
    fewer.sort(key=lambda candidate: len(candidate.workers))
    for candidate in fewer[:MOST_OF_MANY_PLAYED]:
        if candidate.step_seconds < limit:
            return candidate
    return best


class Orders:
    """Orders of workers with which the search begins.

    Args:
        costs: The costs of devices and links.
        size: Samples in the micro-batch at which speeds are compared.
    """

    def __init__(self, costs: Costs, size: int) -> None:
        self._costs = costs
        workers = costs.profile.workers
        self._seconds = {name: costs.holder(name, size).speed.layer_seconds for name in workers}
        self.by_speed = sorted(workers, key=lambda name: self._seconds[name])

    def usual(self, workers: Sequence[str]) -> list[list[str]]:
        """The order by speed and, if links were measured, the order along the fastest links."""
        usual = self.by_speed_and_pins(workers)
        are_pinned = any(name in self._costs.pins for name in workers)
        if are_pinned or len(workers) > EXCHANGES_UP_TO or not self._costs.profile.links:
            return [usual]
        chained = self._chained(usual)
        return [usual] if chained == usual else [usual, chained]

    def by_speed_and_pins(self, workers: Sequence[str]) -> list[str]:
        """Order workers by speed; each gap between pins gets workers for its layers."""
        pins = {name: self._costs.pins[name] for name in workers if name in self._costs.pins}
        fixed = sorted(pins, key=lambda name: pins[name])
        free = [name for name in self.by_speed if name in workers and name not in pins]
        start, end = self._free_layers()
        starts = [start, *(pins[name][1] for name in fixed)]
        ends = [*(pins[name][0] for name in fixed), end]
        gaps = self._filled([end - first for first, end in zip(starts, ends, strict=True)], free)
        order = gaps[0]
        for name, gap_after in zip(fixed, gaps[1:], strict=True):
            order = [*order, name, *gap_after]
        return order

    def _free_layers(self) -> tuple[int, int]:
        """The layers that no pin gives to the coordinator."""
        num_layers = len(self._costs.profile.model.layers)
        start, end = self._costs.pins.get(COORDINATOR, (0, 0))
        return (end, num_layers) if start == 0 else (0, start)

    def _filled(self, num_layers: Sequence[int], free: Sequence[str]) -> list[list[str]]:
        """Distribute free devices over gaps of layers: each goes where most layers are left."""
        left = [float(count) for count in num_layers]
        gaps: list[list[str]] = [[] for _ in left]
        speeds = {name: 1 / max(self._seconds[name], 1e-12) for name in free}
        layers_per_speed = sum(left) / (sum(speeds.values()) or 1)
        for name in free:
            gap = left.index(max(left))
            gaps[gap].append(name)
            left[gap] -= speeds[name] * layers_per_speed
        return gaps

    def _chained(self, workers: Sequence[str]) -> list[str]:
        chain, left = [COORDINATOR], list(workers)
        while left:
            nearest = min(left, key=partial(self._travel_seconds, chain[-1]))
            left.remove(nearest)
            chain.append(nearest)
        return chain[1:]

    def _travel_seconds(self, one: str, other: str) -> float:
        there, back = hops_between(self._costs, [one, other], self._costs.batch_size)
        return sum(hop.busy_seconds + hop.latency_seconds for hop in (there[0], back[1]))


def interchangeable(costs: Costs) -> dict[str, int]:
    """A number for each worker; interchangeable workers have the same number."""
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
    if costs.kinds[one] != costs.kinds[other] or {one, other} & set(costs.pins):
        return False
    others = [d.name for d in costs.profile.devices if d.name not in (one, other)]
    pairs = [((one, name), (other, name)) for name in others]
    pairs += [((name, one), (name, other)) for name in others]
    pairs += [((one, other), (other, one))]
    return all(_speed(costs, *first) == _speed(costs, *second) for first, second in pairs)


def _speed(costs: Costs, source: str, target: str) -> tuple[float, float, str | None]:
    link = costs.link(source, target)
    return link.latency_seconds, link.bytes_per_second, link.shared
