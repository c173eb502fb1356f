"""Plans of every shape: the coordinator at both ends, a worker in several stages, turn by turn,
replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hetero import Plan, StagePlan

Shape = Sequence[tuple[str, int, int] | tuple[str, int, int, list[int]]]
"""The processes and the layers of each stage: C is the coordinator, a and b are workers. Several
processes are replicas, with these shares or equal ones."""


def one_each(processes: str) -> Shape:
    """One layer for each stage."""
    return [(who, number, number + 1) for number, who in enumerate(processes)]


SHAPES: dict[str, Shape] = {
    "both ends": [("C", 0, 1), ("a", 1, 3), ("C", 3, 5)],
    "both ends, two workers": [("C", 0, 1), ("a", 1, 2), ("b", 2, 4), ("C", 4, 5)],
    "a worker in two stages": [("a", 0, 2), ("b", 2, 4), ("a", 4, 5)],
    "a worker in three stages": one_each("Cabaa"),
    "turn by turn": one_each("ababa"),
    "twice in a row": [("a", 0, 2), ("a", 2, 4), ("C", 4, 5)],
    "line": [("C", 0, 1), ("a", 1, 3), ("b", 3, 5)],
    "the other way round": [("b", 0, 3), ("a", 3, 5)],
}

REPLICAS: dict[str, Shape] = {
    "replicas between layers of the coordinator": [("C", 0, 1), ("ab", 1, 4, [2, 1]), ("C", 4, 5)],
    "replicas behind a worker": [("a", 0, 2), ("ba", 2, 5, [1, 2])],
    "two stages of replicas": [("ab", 0, 2), ("ba", 2, 5, [2, 1])],
    "a warm spare": [("C", 0, 1), ("ab", 1, 5, [1, 0])],
}

HOSTED: dict[str, Shape] = {
    "the coordinator beside a worker": [("aC", 0, 5, [2, 1])],
    "the coordinator beside a worker, between its own layers": [
        *(("C", 0, 1), ("Ca", 1, 4, [1, 2]), ("C", 4, 5))
    ],
    "the coordinator in the first of two stages": [("aC", 0, 3), ("b", 3, 5)],
    "the coordinator in the last of two stages": [("b", 0, 2), ("aC", 2, 5)],
}
"""The coordinator is one of the replicas."""

ONE_OF_EACH_KIND = (
    "both ends, two workers",
    "a worker in three stages",
    "two stages of replicas",
    "a warm spare",
    "the coordinator beside a worker, between its own layers",
)

RING: Shape = one_each("CabaC")
"""Both ends, and the workers linked both ways."""


def shaped(workers: Sequence[str], stages: Shape, pieces: int, **options: Any) -> Plan:
    """The plan of a shape; the options are those of every stage."""
    names = dict(zip("Cab", ["coordinator", *workers], strict=False))
    found = []
    for who, first, end, *rest in stages:
        shares = rest[0] if rest else None
        held_by = [names[each] for each in who]
        found.append(StagePlan(held_by, (first, end), shares=shares, **options))
    return Plan(found, micro_batches=pieces)
