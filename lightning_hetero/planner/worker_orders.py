"""Orders of workers: the exact splits of many at once, those to begin with, and which are alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from ..plan import COORDINATOR
from .candidates import Arrangement, Candidate, Costs, boundary_hops
from .costs import BothEnds
from .layer_split import (
    Choice,
    Indices,
    Matrix,
    Numbers,
    Splits,
    best_splits,
    bottlenecks,
    nowhere_but,
    only,
)
from .step_model import busy_seconds_of_media

MOST_AT_ONCE = 2**20
"""Numbers of a batch of matrices, which bounds its memory."""

MOST_KEPT = 24
"""Orders whose splits become candidates, those with the lowest bounds."""

MOST_FILLED = 4
"""Processes up to which four times as many micro-batches in flight are tried."""

MOST_WORKERS_CHAINED = 10
"""Workers up to which the search also begins with an order along the fastest links."""


def place(
    ways: Sequence[Arrangement], front: int | None, below: float = math.inf
) -> list[Candidate]:
    """Split the layers of some arrangements exactly, for several numbers in flight.

    Twice as many micro-batches in flight as processes hide the transfers. Fewer are tried if they
    leave memory for a better split.

    Args:
        ways: Orders of the same workers, with as many micro-batches and the embedding alike.
        front: How many layers the coordinator has before those of the workers; None if it has no
            others.
        below: Without the candidates whose step cannot be shorter.
    """
    num, pieces = len(ways[0].names), ways[0].micro_batches
    batch = _Batch(ways, front)
    least = batch.bottlenecks(1)
    is_possible = pieces * least < below
    batch, least = batch.among(is_possible), least[is_possible]
    found: list[Candidate] = []
    levels = {2 * num, num, math.ceil(num / 2), 1} if num > 1 else {1}
    for in_flight in sorted({min(level, pieces) for level in levels}, reverse=True):
        if not batch.ways:
            break
        splits = batch.splits(in_flight)
        found += batch.candidates(splits, in_flight, below)
        # The two sum in different orders, so their last digits may differ.
        is_slower = splits.bottleneck_seconds > least * (1 + 1e-9)
        batch, least = batch.among(is_slower), least[is_slower]
    return found


def in_flight_of(num_processes: int) -> set[int]:
    """Numbers of micro-batches in flight that hide most transfers: twice as many as processes, and
    with few processes also four times as many, which hide those of slow links."""
    twice = 2 * num_processes
    return {twice, 2 * twice} if num_processes <= MOST_FILLED else {twice}


def place_at(
    way: Arrangement, in_flight: int, front: int | None, below: float = math.inf
) -> Candidate | None:
    """Split the layers exactly for this number in flight; None if they do not fit, or if the step
    cannot be shorter than ``below``."""
    batch = _Batch([way], front)
    return next(iter(batch.candidates(batch.splits(in_flight), in_flight, below)), None)


def place_behind(ways: Sequence[Arrangement], below: float = math.inf) -> list[Candidate]:
    """Split the layers with the coordinator's layers behind those of the workers.

    The embedding leaves where it may, because the links carry less then. It stays where a worker
    with it would be a slower stage or link.
    """
    # A coordinator without layers was tried in front.
    may_have_layers = ways[0].own.speed.most_layers > 0
    if not ways[0].costs.profile.model.embedding_may_leave:
        return place(ways, 0, below) if may_have_layers else []
    lines = [replace(way, embedding_left=True) for way in ways]
    found = place(lines, 0, below)
    if not may_have_layers:
        return found
    slowest, slowest_in_line = (
        np.maximum(batch.bottlenecks(1), batch.busiest_seconds)
        for batch in (_Batch(ways, 0), _Batch(lines, 0))
    )
    staying = _Batch(ways, 0).among(slowest < slowest_in_line).ways
    return found + (place(staying, 0, below) if staying else [])


def place_all(way: Arrangement) -> list[Candidate]:
    """Split the layers with the coordinator's first and, if there are workers, also with them
    last."""
    found = place([way], None)
    return found + (place_behind([way]) if way.workers else [])


@dataclass(frozen=True)
class _Batch:
    """Orders of the same workers, with as many of the coordinator's layers in front."""

    ways: Sequence[Arrangement]
    front: int | None

    def among(self, chosen: Choice) -> _Batch:
        """The batch without the orders that are not chosen."""
        pairs = zip(self.ways, chosen, strict=True)
        return _Batch([way for way, is_chosen in pairs if is_chosen], self.front)

    def bottlenecks(self, in_flight: int) -> Numbers:
        """The least possible bottleneck of each order."""
        ends = self._ends(in_flight)
        found = [bottlenecks(self._stages(ways, in_flight), *ends) for ways in self._parts()]
        return np.concatenate(found)

    def splits(self, in_flight: int) -> Splits:
        """The best split of each order: that with the fastest slowest stage, or, with one
        micro-batch in flight, that with the least sum, because stages take turns then."""
        ends, floors = self._ends(in_flight), self.busiest_seconds
        if in_flight == 1:
            floors = np.full_like(floors, np.inf)
        found, done = [], 0
        for ways in self._parts():
            floor_seconds = floors[done : done + len(ways)]
            found.append(best_splits(self._stages(ways, in_flight), *ends, floor_seconds))
            done += len(ways)
        return Splits(
            np.concatenate([each.cuts for each in found]),
            np.concatenate([each.stage_seconds for each in found]),
            np.concatenate([each.own_seconds for each in found]),
        )

    def candidates(self, splits: Splits, in_flight: int, below: float) -> Iterator[Candidate]:
        """The candidates of splits whose step may be shorter."""
        fit = np.flatnonzero(np.isfinite(splits.own_seconds))
        least = self._least_seconds(splits, fit, in_flight)
        likely = np.argsort(least, kind="stable")[:MOST_KEPT]
        for index in fit[likely[least[likely] < below]]:
            cuts = splits.cuts[index].tolist()
            bounds = [0, *cuts, self._num_layers]
            ranges = list(zip(bounds, bounds[1:], strict=False))
            yield self.ways[index].with_ranges(ranges, in_flight)

    @cached_property
    def busiest_seconds(self) -> Numbers:
        """For each order the seconds of a micro-batch on the link or shared medium that it occupies
        longest."""
        hops = ([*way.hops[0], *way.hops[1]] if way.workers else [] for way in self.ways)
        return np.array([max(busy_seconds_of_media(each).values(), default=0.0) for each in hops])

    @property
    def _own(self) -> BothEnds:
        return self.ways[0].own

    @property
    def _num_layers(self) -> int:
        return self.ways[0].costs.num_layers

    def _parts(self) -> Iterator[Sequence[Arrangement]]:
        size = max(1, MOST_AT_ONCE // (self._num_layers + 1) ** 2)
        for start in range(0, len(self.ways), size):
            yield self.ways[start : start + size]

    def _stages(self, ways: Sequence[Arrangement], in_flight: int) -> list[Numbers]:
        """For each place the matrices of the workers that have it in each order."""
        found: dict[tuple[str, bool], int] = {}
        matrices: list[Matrix] = []
        numbers = []
        for way in ways:
            row = []
            for place, name in enumerate(way.workers):
                key = name, way.embedding_left and place == 0
                if key not in found:
                    found[key] = len(matrices)
                    matrices.append(_worker_matrix(way, place, in_flight))
                row.append(found[key])
            numbers.append(row)
        if len(ways) < 2:
            return [matrix[None] for matrix in matrices]
        every = np.stack(matrices)
        return [every[list(column)] for column in zip(*numbers, strict=True)]

    def _ends(self, in_flight: int) -> tuple[Numbers, Numbers]:
        """The coordinator's seconds before the workers' layers and behind them."""
        seconds = self._own_matrix(in_flight)
        size = len(seconds)
        if self.front is None:
            return seconds[:, -1], nowhere_but(size - 1, size)
        return nowhere_but(self.front, size), seconds[self.front]

    def _own_matrix(self, in_flight: int) -> Matrix:
        seconds, pin = self._own.matrix(in_flight), self.ways[0].costs.pins.get(COORDINATOR)
        if pin is None:
            return seconds
        return only(seconds, (pin[1], len(seconds) - 1) if pin[0] == 0 else (0, pin[0]))

    def _least_seconds(self, splits: Splits, fit: Indices, in_flight: int) -> Numbers:
        """The bounds of `least_seconds` by each process's work, without making candidates."""
        own, count = splits.own_seconds[fit], self.ways[0].micro_batches
        cuts = splits.cuts[fit]
        front = self._own.front_matrix(in_flight)[cuts[:, 0], cuts[:, -1]]
        most, before = count * own, np.zeros(len(fit))
        travel = np.array([self.ways[index].travel_seconds for index in fit])
        stages = np.concatenate([front[:, None], splits.stage_seconds[fit]], axis=1)
        for index in range(stages.shape[1]):
            most = np.maximum(most, before + count * stages[:, index])
            before = before + stages[:, index]
            if travel.size:
                before = before + travel[:, index]
        return np.asarray(np.maximum(most, before + count * (own - front)))


def _worker_matrix(way: Arrangement, place: int, in_flight: int) -> Matrix:
    seconds, pins = way.holders[place].matrix(in_flight), way.costs.pins
    name = way.workers[place]
    return only(seconds, pins[name]) if name in pins else seconds


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
        if are_pinned or len(workers) > MOST_WORKERS_CHAINED or not self._costs.profile.links:
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
        there, back = boundary_hops(self._costs, [one, other], self._costs.batch_size)
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
