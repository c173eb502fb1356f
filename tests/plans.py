"""Plans of tests, by the number of layers of each process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan


def plan_of(
    workers: Sequence[str], layers: Sequence[int], micro_batches: int = 2, **options: Any
) -> Plan:
    """Make a line of stages from the number of layers of the coordinator and of each worker.

    The coordinator has no stage if its number is 0. The options are those of every stage.
    """
    stages, first = [], 0
    for name, count in zip(["coordinator", *workers], layers, strict=False):
        if count or name != "coordinator":
            stages.append(StagePlan([name], (first, first + count), **options))
        first += count
    return Plan(stages, micro_batches=micro_batches)


def strategy_of(
    workers: Sequence[str],
    layers: Sequence[int] = (1, 2, 2),
    micro_batches: int = 3,
    **options: Any,
) -> HeteroPipelineStrategy:
    """Make a strategy with a line of stages; the options are those of the strategy."""
    plan = plan_of(workers, layers, micro_batches)
    return HeteroPipelineStrategy(workers[: len(layers) - 1], plan, **options)
