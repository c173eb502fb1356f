"""Plans of every shape that tests run: who holds which layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hetero import Plan, StagePlan

# The layers of each stage, by the name of its process: C is the coordinator, a and b are workers.
SHAPES: dict[str, list[tuple[str, int, int]]] = {
    "both ends": [("C", 0, 1), ("a", 1, 3), ("C", 3, 5)],
    "both ends, two workers": [("C", 0, 1), ("a", 1, 2), ("b", 2, 4), ("C", 4, 5)],
    "a worker in two stages": [("a", 0, 2), ("b", 2, 4), ("a", 4, 5)],
    "a worker in three stages": [(who, n, n + 1) for n, who in enumerate("Cabaa")],
    "turn by turn": [(who, n, n + 1) for n, who in enumerate("ababa")],
    "twice in a row": [("a", 0, 2), ("a", 2, 4), ("C", 4, 5)],
    "line": [("C", 0, 1), ("a", 1, 3), ("b", 3, 5)],
    "the other way round": [("b", 0, 3), ("a", 3, 5)],
}


def shaped(
    workers: Sequence[str], stages: Sequence[tuple[str, int, int]], pieces: int, **options: Any
) -> Plan:
    names = dict(zip("Cab", ["coordinator", *workers], strict=False))
    found = [StagePlan([names[who]], (first, end), **options) for who, first, end in stages]
    return Plan(found, micro_batches=pieces)
