"""Splits: the published ones, and equal to brute force with caps and unlike layers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.planner.bounds import least_bottleneck
from lightning_hetero.planner.layer_split import (
    Matrix,
    Splits,
    best_splits,
    bottlenecks,
    nowhere_but,
)
from lightning_hetero.planner.solver import even_plan
from lightning_hetero.planner.step_model import Speed

from .tables import TABLES, Row


def uniform(layer_seconds: float, num_layers: int) -> Matrix:
    points = np.arange(num_layers + 1)
    counts = points[None, :] - points[:, None]
    return np.where(counts > 0, counts * layer_seconds, np.inf)


def without_coordinator(num_layers: int) -> tuple[Matrix, Matrix]:
    """The vectors of a coordinator that has no layers and takes no time."""
    return nowhere_but(0, num_layers + 1), nowhere_but(num_layers, num_layers + 1)


def split_of(*stages: Matrix, floor_seconds: float = 0.0) -> Splits:
    ends = without_coordinator(len(stages[0]) - 1)
    return best_splits([stage[None] for stage in stages], *ends, floor_seconds)


def shares(splits: Splits) -> list[int]:
    """The numbers of layers in the first order."""
    return [int(count) for count in np.diff(splits.cuts[0])]


@pytest.mark.parametrize("row", TABLES, ids=lambda row: row.name)
def test_the_published_splits_come_out_exactly(row: Row) -> None:
    found = split_of(*(uniform(time, row.num_layers) for time in row.layer_milliseconds))
    assert shares(found) == row.best_layers
    assert found.bottleneck_seconds[0] == pytest.approx(row.bottleneck, rel=2e-3)


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


def brute_force(before: Matrix, stages: list[Matrix], behind: Matrix) -> tuple[float, float]:
    """The least bottleneck, and of the splits that have it the least sum."""
    best = (np.inf, np.inf)
    for cuts in combinations_with_replacement(range(len(before)), len(stages) + 1):
        own = float(before[cuts[0]] + behind[cuts[-1]])
        spans = zip(stages, cuts, cuts[1:], strict=False)
        times = [own, *(float(stage[first, end]) for stage, first, end in spans)]
        best = min(best, (max(times), sum(times)))
    return best


@dataclass(frozen=True)
class Case:
    """Orders of the same devices, and a coordinator in front of them or behind them."""

    orders: list[list[Matrix]]
    before: Matrix
    behind: Matrix


def sums(draw: st.DrawFn, num_layers: int) -> Matrix:
    costs = draw(st.lists(st.integers(1, 9), min_size=num_layers, max_size=num_layers))
    return np.concatenate([[0.0], np.cumsum(costs)])


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    """Up to three workers and seven layers of unlike costs, with caps."""
    num_layers, num_workers = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    counts = np.arange(num_layers + 1)[None, :] - np.arange(num_layers + 1)[:, None]
    workers = []
    for _ in range(num_workers):
        cap, each = draw(st.integers(0, num_layers)), sums(draw, num_layers)
        fits = (counts >= 1) & (counts <= cap)
        workers.append(np.where(fits, each[None, :] - each[:, None], np.inf))
    own, fixed = sums(draw, num_layers), draw(st.integers(0, 9))
    before, behind = fixed + own, nowhere_but(num_layers, num_layers + 1)
    if draw(st.booleans()):
        front = draw(st.integers(0, num_layers))
        before = nowhere_but(front, num_layers + 1)
        behind = fixed + own[front] + own[-1] - own
    return Case([list(order) for order in permutations(workers)], before, behind)


@settings(max_examples=150, deadline=None)
@given(any_case())
def test_every_split_is_what_brute_force_finds(case: Case) -> None:
    stages = [np.stack(column) for column in zip(*case.orders, strict=True)]
    found = best_splits(stages, case.before, case.behind)
    least = bottlenecks(stages, case.before, case.behind)
    for index, order in enumerate(case.orders):
        slowest, total = brute_force(case.before, order, case.behind)
        assert least[index] == slowest
        if np.isinf(slowest):
            assert np.isinf(found.own_seconds[index])
            continue
        assert found.bottleneck_seconds[index] == slowest
        assert found.own_seconds[index] + found.stage_seconds[index].sum() == total
        cuts = found.cuts[index]
        for stage, span, seconds in zip(
            order, pairwise(cuts), found.stage_seconds[index], strict=True
        ):
            assert stage[span] == seconds


def test_below_a_floor_only_the_sum_counts() -> None:
    fast, slow = uniform(1, 4), uniform(2, 4)
    assert shares(split_of(fast, slow)) == [3, 1]
    assert shares(split_of(fast, slow, floor_seconds=3)) == [3, 1]
    roomy = split_of(uniform(1, 4), uniform(1, 4), uniform(0.5, 4), floor_seconds=10)
    assert shares(roomy) == [1, 1, 2]


def test_each_order_has_its_own_floor() -> None:
    fast, slow = uniform(1, 6), uniform(1.5, 6)
    stages = [np.stack([fast, fast]), np.stack([slow, slow])]
    found = best_splits(stages, *without_coordinator(6), np.array([0.0, 5.0]))
    assert [list(np.diff(cuts)) for cuts in found.cuts] == [[4, 2], [5, 1]]
