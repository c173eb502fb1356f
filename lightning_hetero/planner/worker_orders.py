"""Orders of workers for the start of a search, and the classes of interchangeable workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from ..plan import COORDINATOR
from .candidates import Costs, boundary_hops

MOST_WORKERS_CHAINED = 10
"""Workers up to which the search also begins with an order along the fastest links."""


class Orders:
    """Orders of workers for the start of a search.

    Args:
        costs: The costs of devices and links.
        size: Samples in the micro-batch at which speeds are compared.
    """

    def __init__(self, costs: Costs, size: int) -> None:
        self._costs = costs
        workers = costs.profile.workers
        self._seconds = {name: costs.holder(name, size).speed.layer_seconds for name in workers}
        self.by_speed = sorted(workers, key=lambda name: self._seconds[name])
        self.slowest_first = sorted(self.by_speed, key=lambda name: -self._seconds[name])

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        """The processes of a team, the slowest worker first, and the coordinator last. The first
        replica has the first turn, and a slow one should not have the last."""
        members = {*names}
        known = [name for name in self.slowest_first if name in members]
        return (*known, *([COORDINATOR] if COORDINATOR in members else []))

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
        """The layers without the coordinator's pin."""
        num_layers = len(self._costs.profile.model.layers)
        start, end = self._costs.pins.get(COORDINATOR, (0, 0))
        return (end, num_layers) if start == 0 else (0, start)

    def _filled(self, num_layers: Sequence[int], free: Sequence[str]) -> list[list[str]]:
        """Distribute free devices over gaps of layers: each goes to the gap with most layers
        left."""
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
        return there[0].seconds + back[1].seconds


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
