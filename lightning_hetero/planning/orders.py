"""Orders of many workers to begin the search with, and which workers stand in for each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..plan import COORDINATOR
from .candidates import Costs, hops_between

EXCHANGES_UP_TO = 10
"""Workers that are exchanged, left out or added one by one in search of something better."""


class Orders:
    """Makes orders to begin with.

    Args:
        costs: What everything takes.
        size: Samples in the micro-batch by which speeds are compared.
    """

    def __init__(self, costs: Costs, size: int) -> None:
        self._costs = costs
        workers = costs.profile.workers
        self._seconds = {name: costs.holder(name, size).speed.layer_seconds for name in workers}
        self.by_speed = sorted(workers, key=lambda name: self._seconds[name])

    def usual(self, workers: Sequence[str]) -> list[list[str]]:
        """Fast devices first; and where links differ, along the fastest links."""
        usual = self.by_speed_and_pins(workers)
        are_pinned = any(name in self._costs.pins for name in workers)
        if are_pinned or len(workers) > EXCHANGES_UP_TO or not self._costs.profile.links:
            return [usual]
        chained = self._chained(usual)
        return [usual] if chained == usual else [usual, chained]

    def by_speed_and_pins(self, workers: Sequence[str]) -> list[str]:
        """Fast devices first; between pins, so many as the layers there ask for."""
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
        """The free devices for each gap of so many layers: each goes where most is left."""
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
