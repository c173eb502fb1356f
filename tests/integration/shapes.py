"""Plans of every shape: the coordinator at both ends, a worker in several stages, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hetero import Plan, StagePlan

Shape = list[tuple[str, int, int]]
"""The process and the layers of each stage: C is the coordinator, a and b are workers."""

SHAPES: dict[str, Shape] = {
    "both ends": [("C", 0, 1), ("a", 1, 3), ("C", 3, 5)],
    "both ends, two workers": [("C", 0, 1), ("a", 1, 2), ("b", 2, 4), ("C", 4, 5)],
    "a worker in two stages": [("a", 0, 2), ("b", 2, 4), ("a", 4, 5)],
    "a worker in three stages": [(who, n, n + 1) for n, who in enumerate("Cabaa")],
    "turn by turn": [(who, n, n + 1) for n, who in enumerate("ababa")],
    "twice in a row": [("a", 0, 2), ("a", 2, 4), ("C", 4, 5)],
    "line": [("C", 0, 1), ("a", 1, 3), ("b", 3, 5)],
    "the other way round": [("b", 0, 3), ("a", 3, 5)],
}

RING: Shape = [(who, n, n + 1) for n, who in enumerate("CabaC")]
"""Both ends, and the workers linked both ways."""


def shaped(workers: Sequence[str], stages: Shape, pieces: int, **options: Any) -> Plan:
    """The plan of a shape; the options are those of every stage."""
    names = dict(zip("Cab", ["coordinator", *workers], strict=False))
    found = [StagePlan([names[who]], (first, end), **options) for who, first, end in stages]
    return Plan(found, micro_batches=pieces)
