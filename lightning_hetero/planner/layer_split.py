"""The exact split of consecutive layers over the workers of an order, for many orders at once.

A stage is a matrix of seconds: row `first`, column `end`, infinite where the stage cannot hold the
layers. This covers memory limits, pins and layers of different kinds. The coordinator is two
vectors: its seconds by the first layer of the workers, and by the end of their layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Choice = npt.NDArray[np.bool_]

Matrix = Numbers
"""The seconds of every stage, [first, end]."""

# Sums differ in their last digits; a stage that equals the bottleneck must not count as above it.
_TOLERANCE = 1 + 1e-12


@dataclass(frozen=True)
class Splits:
    """A split for each order of workers.

    Args:
        cuts: For each order, the first layer of each worker and the end of the last one's layers.
        stage_seconds: For each order, the seconds of each worker.
        own_seconds: For each order, the coordinator's seconds; infinite if the layers do not fit.
    """

    cuts: Indices
    stage_seconds: Numbers
    own_seconds: Numbers

    @property
    def bottleneck_seconds(self) -> Numbers:
        """The seconds of the slowest process of each order."""
        slowest: Numbers = self.stage_seconds.max(axis=1, initial=0.0)
        return np.maximum(self.own_seconds, slowest)


def only(seconds: Matrix, layers: tuple[int, int]) -> Matrix:
    """The matrix of a stage restricted to these layers."""
    kept = np.full_like(seconds, np.inf)
    kept[layers] = seconds[layers]
    return kept


def nowhere_but(index: int, size: int) -> Numbers:
    """The vector of a coordinator with 0 seconds at one place; infinite everywhere else."""
    vector = np.full(size, np.inf)
    vector[index] = 0.0
    return vector


def bottlenecks(stages: Sequence[Numbers], before: Numbers, behind: Numbers) -> Numbers:
    """For each order the least possible seconds of the slowest process; infinite if the layers do
    not fit. The arguments are as for `best_splits`."""
    best = before[None]
    for seconds in stages:
        best = np.maximum(best[:, :, None], seconds).min(axis=1)
    return np.asarray(np.maximum(best, behind).min(axis=1))


def best_splits(
    stages: Sequence[Numbers],
    before: Numbers,
    behind: Numbers,
    floor_seconds: float | Numbers = 0.0,
) -> Splits:
    """For each order the split with the fastest slowest process; of several, with the least sum.

    Args:
        stages: For each place in the order of the layers, the matrices of its workers, one of each
            order.
        before: The coordinator's seconds, or a part of them, by the first layer of the workers.
        behind: Its other seconds, by the end of their layers; one of the two parts is 0 where it is
            not infinite.
        floor_seconds: A bottleneck elsewhere, such as a link; stages need not be faster.
    """
    slowest = np.maximum(bottlenecks(stages, before, behind), floor_seconds) * _TOLERANCE
    limit = slowest[:, None, None]
    capped = [np.where(seconds > limit, np.inf, seconds) for seconds in stages]
    totals = [np.where(before > slowest[:, None], np.inf, before)]
    for seconds in capped:
        totals.append((totals[-1][:, :, None] + seconds).min(axis=1))
    last = totals[-1] + np.where(behind > slowest[:, None], np.inf, behind)
    orders, cuts = np.arange(len(slowest)), [np.argmin(last, axis=1)]
    times = []
    for index in reversed(range(len(capped))):
        end = cuts[-1]
        cuts.append(np.argmin(totals[index] + capped[index][orders, :, end], axis=1))
        times.append(stages[index][orders, cuts[-1], end])
    own = np.where(np.isfinite(last.min(axis=1)), before[cuts[-1]] + behind[cuts[0]], np.inf)
    of_stages = np.array(times[::-1]).reshape(len(times), len(slowest)).T
    return Splits(np.stack(cuts[::-1], axis=1), of_stages, own)
