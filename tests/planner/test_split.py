"""Splits: the published ones, and equal to brute force with caps and unlike layers."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.planner.simulation import Speed, least_bottleneck
from lightning_hetero.planner.solver import even_plan
from lightning_hetero.planner.split import Matrix, best_split, bottleneck

from .tables import TABLES, Row


def uniform(layer_seconds: float, num_layers: int) -> Matrix:
    points = np.arange(num_layers + 1)
    counts = points[None, :] - points[:, None]
    return np.where(counts > 0, counts * layer_seconds, np.inf)


@pytest.mark.parametrize("row", TABLES, ids=lambda row: row.name)
def test_the_published_splits_come_out_exactly(row: Row) -> None:
    split = best_split([uniform(time, row.num_layers) for time in row.layer_milliseconds])
    assert split is not None
    assert [end - first for first, end in split.ranges] == row.best_layers
    assert split.bottleneck_seconds == pytest.approx(row.bottleneck, rel=2e-3)


@pytest.mark.parametrize("row", TABLES, ids=lambda row: row.name)
def test_the_published_bounds_come_out(row: Row) -> None:
    times = row.layer_milliseconds
    bound = least_bottleneck([Speed(time) for time in times], row.num_layers)
    assert bound == pytest.approx(row.bound, rel=2e-3)
    assert min(times) * row.num_layers == pytest.approx(row.best_single, rel=1e-3)
    stages = even_plan(row.num_layers, [str(number) for number in range(1, len(times))]).stages
    # The coordinator of the even plan has the smaller share; here that is the slowest device.
    shares = sorted((len(stage.layer_indices) for stage in stages), reverse=True)
    assert max(map(float.__mul__, map(float, shares), times)) == pytest.approx(row.even, rel=1e-3)


def brute_force(stages: list[Matrix]) -> tuple[float, float]:
    """The least bottleneck, and of the splits that have it the least sum."""
    num_layers = len(stages[0]) - 1
    best = (np.inf, np.inf)
    for cuts in combinations([*range(num_layers + 1)] * 2, len(stages) - 1):
        ends = [*sorted(cuts), num_layers]
        times = [
            float(stage[first, end])
            for stage, first, end in zip(stages, [0, *ends[:-1]], ends, strict=True)
        ]
        best = min(best, (max(times), sum(times)))
    return best


@st.composite
def any_stages(draw: st.DrawFn) -> list[Matrix]:
    """Up to four stages and seven layers of unlike costs, with caps; the first may be empty."""
    num_layers, num_stages = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    stages = []
    for index in range(num_stages):
        costs = draw(st.lists(st.integers(1, 9), min_size=num_layers, max_size=num_layers))
        cap = draw(st.integers(0, num_layers))
        sums = np.concatenate([[0.0], np.cumsum(costs)])
        points = np.arange(num_layers + 1)
        counts = points[None, :] - points[:, None]
        is_stage = (counts >= (index > 0)) & (counts <= cap)
        stages.append(np.where(is_stage, sums[None, :] - sums[:, None], np.inf))
    return stages


@settings(max_examples=150, deadline=None)
@given(any_stages())
def test_a_split_is_what_brute_force_finds(stages: list[Matrix]) -> None:
    slowest, total = brute_force(stages)
    split = best_split(stages)
    assert bottleneck(stages) == slowest
    if split is None:
        assert np.isinf(slowest)
        return
    assert (split.bottleneck_seconds, split.total_seconds) == (slowest, total)
    covered = 0
    for stage, (first, end) in zip(stages, split.ranges, strict=True):
        assert first == covered
        assert np.isfinite(stage[first, end])
        covered = end
    assert covered == len(stages[0]) - 1


def test_below_a_floor_only_the_sum_counts() -> None:
    fast, slow = uniform(1, 4), uniform(2, 4)
    even = best_split([fast, slow])
    relaxed = best_split([fast, slow], floor_seconds=3)
    assert even is not None
    assert relaxed is not None
    assert even.ranges == relaxed.ranges == [(0, 3), (3, 4)]
    roomy = best_split([uniform(1, 4), uniform(1, 4), uniform(0.5, 4)], floor_seconds=10)
    assert roomy is not None
    assert roomy.ranges == [(0, 1), (1, 2), (2, 4)]
