"""The exact split: which consecutive layers each stage of an order takes.

A stage is a matrix of seconds: row `first`, column `end`, infinite where the stage cannot hold the
layers. So memory limits, pins and layers of different kinds need no special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

# Sums differ in their last digits; a stage that equals the bottleneck must not count as above it.
_TOLERANCE = 1 + 1e-12


@dataclass(frozen=True)
class Split:
    """Layers for each stage, and the seconds of one micro-batch.

    Args:
        ranges: Half-open ranges of layers, in the order of the stages.
        stage_seconds: The seconds of each stage.
    """

    ranges: list[tuple[int, int]]
    stage_seconds: list[float]

    @property
    def bottleneck_seconds(self) -> float:
        """The seconds of the slowest stage."""
        return max(self.stage_seconds)

    @property
    def total_seconds(self) -> float:
        """The sum over all stages."""
        return sum(self.stage_seconds)


def only(seconds: Matrix, layers: tuple[int, int]) -> Matrix:
    """The matrix of a stage that can hold only these layers."""
    kept = np.full_like(seconds, np.inf)
    kept[layers] = seconds[layers]
    return kept


def bottleneck(stages: Sequence[Matrix]) -> float:
    """The least possible seconds of the slowest stage; infinite if the layers do not fit."""
    best = _nothing_placed(stages)
    for seconds in stages:
        best = np.maximum(best[:, None], seconds).min(axis=0)
    return float(best[-1])


def best_split(stages: Sequence[Matrix], floor_seconds: float = 0.0) -> Split | None:
    """The split with the fastest slowest stage and, among those, with the least sum.

    Args:
        stages: One matrix per stage in the order of the layers.
        floor_seconds: A bottleneck elsewhere, such as a link; faster stages gain nothing below it.

    Returns:
        None if the layers do not fit.
    """
    slowest = max(bottleneck(stages), floor_seconds)
    if not np.isfinite(slowest):
        return None
    capped = np.stack(stages)
    capped[capped > slowest * _TOLERANCE] = np.inf
    totals = [_nothing_placed(stages)]
    for seconds in capped:
        totals.append((totals[-1][:, None] + seconds).min(axis=0))
    ranges = _trace_back(capped, totals)
    times = [float(seconds[span]) for seconds, span in zip(stages, ranges, strict=True)]
    return Split(ranges, times)


def _trace_back(capped: Matrix, totals: Sequence[Matrix]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    end = len(totals[0]) - 1
    for index in reversed(range(len(capped))):
        first = int(np.argmin(totals[index] + capped[index][:, end]))
        ranges.append((first, end))
        end = first
    return ranges[::-1]


def _nothing_placed(stages: Sequence[Matrix]) -> Matrix:
    best = np.full(stages[0].shape[0], np.inf)
    best[0] = 0.0
    return best
