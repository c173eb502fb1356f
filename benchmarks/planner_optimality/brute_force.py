"""The shortest step over all subsets, orders, splits and numbers of micro-batches.

The coordinator may have layers at both ends, and the embedding may be on the first worker. Each
worker has one seat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, permutations, product

import numpy as np
import numpy.typing as npt

from lightning_hetero.plan import COORDINATOR, most_started
from lightning_hetero.planner import replica_teams
from lightning_hetero.planner.arrangements import Arrangement
from lightning_hetero.planner.bounds import least_bottleneck
from lightning_hetero.planner.candidates import Candidate, Costs, boundary_hops
from lightning_hetero.planner.costs import BothEnds, Holder, Left
from lightning_hetero.planner.profile import HEAD, Profile
from lightning_hetero.planner.search import speeds_of
from lightning_hetero.planner.step_model import busy_seconds_of_media

Numbers = npt.NDArray[np.float64]
Spans = npt.NDArray[np.int64]

CLOSE = 1e-3
"""Share of the step by which a better plan must be better. So the result is exact to this share."""


@dataclass(frozen=True)
class Tables:
    """The seconds of all stages of a holder; entry [first, end], infinite if it does not fit.

    The coordinator has the layers before ``first`` and those from ``end`` on; ``forward`` and
    ``backward`` are those before, and ``behind`` those behind.
    """

    forward: Numbers
    backward: Numbers
    optimizer: Numbers
    behind: Numbers | float = 0.0


class BruteForce:
    """Tries every contiguous plan of a profile; a device uses its fastest option that fits.

    A lower bound of each plan's step is computed first, and only plans whose bound is below the
    best known step are simulated.

    Args:
        profile: A profile with a batch size.
        known: A step that is known to be possible; infinite if none is.
        uses_bounds: Whether bounds exclude plans; without, every plan is simulated.
    """

    def __init__(self, profile: Profile, known: float = math.inf, uses_bounds: bool = True) -> None:
        self._costs = Costs(profile, {})
        self._of_teams = replica_teams.Tables(self._costs)
        self._profile = profile
        self._tables: dict[tuple[int, int], Tables] = {}
        self._best: Candidate | None = None
        self._seconds = known
        self._uses_bounds = uses_bounds
        self.num_simulated = 0

    def best(self) -> Candidate | None:
        """The plan with the shortest step; None if none is shorter than the known one."""
        for way, in_flight in self._ways():
            self._try_splits(way, in_flight)
        return self._best

    def _ways(self) -> Iterator[tuple[Arrangement, int]]:
        batch_size = self._profile.batch_size or 1
        counts = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
        for num_workers in range(len(self._profile.workers) + 1):
            for workers in combinations(self._profile.workers, num_workers):
                for pieces in counts:
                    if self._may_be_better(workers, pieces):
                        for order in permutations(workers):
                            yield from self._ways_of(order, pieces)

    def _may_be_better(self, workers: Sequence[str], pieces: int) -> bool:
        if not self._uses_bounds:
            return True
        speeds = speeds_of(self._costs, workers, pieces)
        slowest = least_bottleneck(speeds, len(self._profile.model.layers))
        return pieces * slowest < self._seconds * (1 - CLOSE)

    def _ways_of(self, order: Sequence[str], pieces: int) -> Iterator[tuple[Arrangement, int]]:
        num = len(order) + 1
        counts = {1, 2, math.ceil(num / 2), num, 2 * num, 3 * num} if order else {1}
        model = self._profile.model
        may_leave = model.embedding_may_leave and bool(order)
        head_may_leave = model.head_may_leave and bool(order) and self._has_head(order[-1])
        for left in product({False, may_leave}, {False, head_may_leave}):
            way = Arrangement.line(self._of_teams, order, pieces, Left(*left))
            for in_flight in sorted({min(count, pieces) for count in counts}):
                yield way, in_flight

    def _has_head(self, name: str) -> bool:
        return any(timing.part == HEAD for timing in self._profile.device(name).timings)

    def _try_splits(self, way: Arrangement, in_flight: int) -> None:
        spans = all_splits(len(self._profile.model.layers), len(way.workers))
        tables = [self._own_table(way.own, in_flight)]
        tables += [self._table(holder, in_flight) for holder in _holders(way)]
        fits = [
            np.isfinite(table.forward[each[:, 0], each[:, 1]])
            for table, each in zip(tables, of_devices(spans), strict=True)
        ]
        spans = spans[np.all(fits, axis=0) & math.isfinite(way.own.end_seconds)]
        least = Bounds(way, in_flight, tables, spans).least_seconds
        for index in np.argsort(least):
            if self._uses_bounds and least[index] >= self._seconds * (1 - CLOSE):
                return
            ranges = [(int(first), int(end)) for first, end in spans[index]]
            candidate = way.with_ranges(ranges, in_flight)
            self.num_simulated += 1
            if candidate.step_seconds < self._seconds:
                self._best, self._seconds = candidate, candidate.step_seconds

    def _table(self, holder: Holder, in_flight: int) -> Tables:
        key = id(holder), in_flight
        if key not in self._tables:
            self._tables[key] = self._make_table(holder, in_flight)
        return self._tables[key]

    def _own_table(self, own: BothEnds, in_flight: int) -> Tables:
        key = id(own), in_flight
        if key not in self._tables:
            self._tables[key] = self._make_own_table(own, in_flight)
        return self._tables[key]

    def _make_own_table(self, own: BothEnds, in_flight: int) -> Tables:
        layers = self._profile.model.layers
        num = len(layers)
        tables = Tables(*(np.full((num + 1, num + 1), np.inf) for _ in range(4)))
        steps = own.front.device.optimizer_seconds
        for first, end in np.argwhere(np.isfinite(own.matrix(in_flight))):
            before, behind = own.options_for(first, end, in_flight)
            tables.forward[first, end] = before.forward[first]
            tables.backward[first, end] = before.backward[first]
            sums = behind.forward + behind.backward
            tables.behind[first, end] = sums[num] - sums[end]
            held = [*layers[:first], *layers[end:]]
            tables.optimizer[first, end] = sum(steps.get(kind, 0) for kind in held)
        return tables

    def _make_table(self, holder: Holder, in_flight: int) -> Tables:
        layers = self._profile.model.layers
        num = len(layers)
        tables = Tables(*(np.full((num + 1, num + 1), np.inf) for _ in range(3)))
        steps = holder.device.optimizer_seconds
        for first, end in np.argwhere(np.isfinite(holder.matrix(in_flight))):
            option = holder.option_for(first, end, in_flight)
            tables.forward[first, end] = option.forward[end] - option.forward[first]
            tables.backward[first, end] = option.backward[end] - option.backward[first]
            tables.optimizer[first, end] = sum(steps.get(kind, 0) for kind in layers[first:end])
        return tables


class Bounds:
    """Lower bounds of the steps of all splits of one arrangement.

    Args:
        way: Devices in an order.
        in_flight: The most micro-batches in flight.
        tables: The tables of each device, the coordinator first.
        spans: The layers of each seat in each split, with the shape (splits, seats, 2).
    """

    def __init__(
        self, way: Arrangement, in_flight: int, tables: Sequence[Tables], spans: Spans
    ) -> None:
        self._way, self._count, self._in_flight = way, way.micro_batches, in_flight
        triples = [
            (table, each[:, 0], each[:, 1])
            for table, each in zip(tables, of_devices(spans), strict=True)
        ]
        forward = [table.forward[first, end] for table, first, end in triples]
        backward = [table.backward[first, end] for table, first, end in triples]
        optimizer = [table.optimizer[first, end] for table, first, end in triples]
        own, first, end = triples[0]
        self._loss = way.own.behind.end_seconds(HEAD) + np.asarray(own.behind)[first, end]
        self._own = []
        holders = [way.own.front, *_holders(way)]
        for holder, ahead, behind in zip(holders, forward, backward, strict=True):
            of_ends = holder.before_layers, holder.behind_layers
            seconds = sum(each.forward_seconds + each.backward_seconds for each in of_ends)
            self._own.append(ahead + behind + seconds)
        of_ends = [[*way.own.front.ends.values(), *way.own.behind.ends.values()]]
        of_ends += [[*holder.ends.values()] for holder in _holders(way)]
        self._optimizer = np.max(
            [
                seconds + sum(end.optimizer_seconds for end in ends)
                for ends, seconds in zip(of_ends, optimizer, strict=True)
            ],
            axis=0,
        )

    @cached_property
    def least_seconds(self) -> Numbers:
        """The bounds; infinite for splits that do not fit."""
        if len(self._own) == 1:
            return np.asarray(self._count * (self._own[0] + self._loss) + self._optimizer)
        way, count = self._way, self._count
        there, back = boundary_hops(way.costs, [COORDINATOR, *way.workers], way.size, way.left)
        passing = [hop.busy_seconds + hop.latency_seconds for hop in (*there, *back)]
        whole = sum(self._own) + self._loss + sum(passing)
        busiest = max(busy_seconds_of_media([*there, *back]).values())
        started = most_started(self._in_flight, sends_token_ids=way.left.embedding)
        bounds = [
            math.ceil(count / started) * whole,
            count * (self._own[0] + self._loss),
            whole + (count - 1) * self._loss,
            np.full(len(whole), count * busiest),
        ]
        before: Numbers | float = 0.0
        for index in range(1, len(self._own)):
            before = before + self._own[index - 1] + passing[index - 1]
            before = before + passing[len(there) + index]
            bounds.append(math.ceil(count / self._in_flight) * (whole - before))
            bounds.append(before + count * self._own[index])
        return np.asarray(np.max(bounds, axis=0) + self._optimizer)


def _holders(way: Arrangement) -> list[Holder]:
    """The workers of a line."""
    return [way.tables.holders(request)[0] for request in way.requests(in_flight=1)]


def of_devices(spans: Spans) -> list[Spans]:
    """The splits by devices, the coordinator first with the range that it leaves to the workers."""
    left = np.stack([spans[:, 0, 1], spans[:, -1, 0]], axis=1)
    return [left, *spans[:, 1:-1].transpose(1, 0, 2)]


@lru_cache
def all_splits(num_layers: int, num_workers: int) -> Spans:
    """All splits; the coordinator has the first and the last seat, which may have no layers."""
    found = []
    for cuts in combinations(range(num_layers + 1), num_workers + 1):
        bounds = [0, *cuts, num_layers]
        if num_workers or cuts[0] == num_layers:
            found.append(list(zip(bounds, bounds[1:], strict=False)))
    return np.array(found, dtype=np.int64).reshape(-1, num_workers + 2, 2)
