"""The walk among teams for many workers, and the estimate that it goes by."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.planner_fleets.fleets import draw_fleet
from benchmarks.planner_fleets.main import BOUND, compare
from lightning_hetero.planner.arrangements import Arrangement, place_at
from lightning_hetero.planner.candidates import Costs
from lightning_hetero.planner.feasibility import shortages
from lightning_hetero.planner.replica_teams import Tables
from lightning_hetero.planner.replicas import whole_counts
from lightning_hetero.planner.solver import solve
from lightning_hetero.planner.team_estimate import Estimates, Outline, dealt


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_dealt_as_the_tables_of_teams_deal_them(seed: int) -> None:
    draw = random.Random(seed)
    seconds = [draw.uniform(0.1, 8) for _ in range(draw.randint(1, 9))]
    count = draw.randint(len(seconds), 64)
    exact = whole_counts(np.array(seconds), count, np.zeros(len(seconds)))
    shares = dealt(seconds, count)
    assert sum(shares) == count
    assert min(shares) >= 1
    assert max(np.array(shares) * seconds) == pytest.approx(max(exact * seconds))


def test_the_estimate_is_near_the_simulated_step() -> None:
    """With all micro-batches in flight, for random teams; a median, as some teams fit badly."""
    costs = Costs(draw_fleet(2, 16), {})
    tables, draw = Tables(costs), random.Random(0)
    estimates, names, ratios = Estimates(tables), list(costs.profile.workers), []
    for num_teams in (2, 3, 5, 8, 15):
        draw.shuffle(names)
        teams = tuple(tuple(names[index::num_teams]) for index in range(num_teams))
        way = Arrangement(tables, teams, 32)
        for found in [*place_at(way, 32, None), *place_at(way, 32, 0)]:
            counts = tuple(end - first for first, end in found.ranges_of_teams)
            seconds = estimates.step_seconds(Outline(teams, counts, 32, 32))
            ratios.append(seconds / found.step_seconds)
    assert len(ratios) > 2
    assert np.median(ratios) == pytest.approx(1, abs=0.1)


def test_random_changes_find_no_plan_that_is_much_faster() -> None:
    assert compare(seed=1, num_devices=12, num_tries=200).gap <= BOUND


def test_plans_of_many_workers_fit_and_are_the_same_each_time() -> None:
    given = draw_fleet(0, 12)
    chosen = solve(given).chosen
    assert not shortages(chosen)
    assert solve(given).chosen.plan() == chosen.plan()
