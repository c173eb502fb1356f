"""Bounds: equal to what dividing layers to the last crumb gives, and to the textbook's."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.planner.bounds import least_bottleneck, least_seconds
from lightning_hetero.planner.step_model import (
    Hop,
    Pipeline,
    Speed,
    StageTimes,
    busy_seconds_of_media,
)


def test_speeds_add_up() -> None:
    assert least_bottleneck([Speed(1), Speed(2), Speed(2)], 10) == pytest.approx(5)


def test_a_cap_leaves_more_to_the_others() -> None:
    assert least_bottleneck([Speed(1, most_layers=4), Speed(2)], 10) == pytest.approx(12)


def test_fixed_work_of_the_coordinator_counts_first() -> None:
    assert least_bottleneck([Speed(1, fixed_seconds=3), Speed(1)], 7) == pytest.approx(5)
    assert least_bottleneck([Speed(1, fixed_seconds=9), Speed(1)], 7) == 9


def test_layers_that_do_not_fit_have_no_bound() -> None:
    assert least_bottleneck([Speed(1, most_layers=4), Speed(1, most_layers=5)], 10) == math.inf


def test_layers_that_cost_nothing_take_no_time() -> None:
    assert least_bottleneck([Speed(0), Speed(1)], 10) == pytest.approx(0, abs=1e-9)


speeds = st.builds(Speed, st.floats(0.1, 9), st.floats(0, 9), st.integers(1, 9).map(float))


@given(st.lists(speeds, min_size=1, max_size=5), st.integers(1, 20))
def test_the_bound_is_the_least_time_for_all_layers(
    given_speeds: list[Speed], num_layers: int
) -> None:
    seconds = least_bottleneck(given_speeds, num_layers)

    def layers_within(limit: float) -> float:
        done = [(limit - s.fixed_seconds) / s.layer_seconds for s in given_speeds]
        pairs = zip(done, given_speeds, strict=True)
        return sum(min(max(layers, 0), speed.most_layers) for layers, speed in pairs)

    if math.isinf(seconds):
        assert sum(speed.most_layers for speed in given_speeds) < num_layers
        return
    assert layers_within(seconds * (1 + 1e-6)) >= num_layers * (1 - 1e-6)
    longest_fixed = max(speed.fixed_seconds for speed in given_speeds)
    assert seconds == longest_fixed or layers_within(seconds * (1 - 1e-6)) <= num_layers


@pytest.mark.parametrize(("count", "workers"), [(16, 3), (4, 1), (1, 5)])
def test_equal_stages_lose_what_the_textbook_says(count: int, workers: int) -> None:
    stages = [StageTimes(0, 0), *[StageTimes(1, 2)] * workers]
    hops = [Hop(str(index), 0) for index in range(workers + 1)]
    pipeline = Pipeline(stages, 0, hops, hops, count, max_in_flight=count)
    ideal = count * 3
    assert ideal / least_seconds(pipeline) == pytest.approx(count / (count + workers - 1))


def test_a_shared_medium_carries_both_ways() -> None:
    hops = [Hop("card", 1), Hop("card", 2), Hop("other", 4)]
    assert busy_seconds_of_media(hops) == {"card": 3, "other": 4}
    stages = [StageTimes(0.1, 0.1), StageTimes(0.1, 0.1)]
    pipeline = Pipeline(stages, 0, hops[:2], [Hop("card", 3), Hop("x", 0)], 10, 10)
    assert least_seconds(pipeline) == pytest.approx(60)


def test_few_in_flight_are_a_bound_of_their_own() -> None:
    hops = [Hop("a", 5), Hop("b", 5)]
    pipeline = Pipeline([StageTimes(1, 1), StageTimes(1, 1)], 1, hops, hops, 4, max_in_flight=1)
    assert least_seconds(pipeline) == 4 * (5 + 20)
