"""The even plan: every layer once, shares that differ by at most one, the coordinator first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import PlanError
from lightning_hetero.plan import Plan
from lightning_hetero.planner.solver import even_plan

num_layers_and_workers = st.integers(0, 200).flatmap(
    lambda num_layers: st.tuples(st.just(num_layers), st.integers(0, min(num_layers, 40)))
)


def names(num_workers: int) -> list[str]:
    return [f"worker-{index}:9999" for index in range(num_workers)]


def shares(plan: Plan) -> list[int]:
    return [len(stage.layer_indices) for stage in plan.stages]


@given(num_layers_and_workers)
def test_every_layer_is_in_one_stage_and_the_order_is_kept(case: tuple[int, int]) -> None:
    num_layers, num_workers = case
    plan = even_plan(num_layers, names(num_workers))
    layers = [index for stage in plan.stages for index in stage.layer_indices]
    assert layers == list(range(num_layers))


@given(num_layers_and_workers)
def test_shares_differ_by_at_most_one_and_every_worker_has_a_layer(case: tuple[int, int]) -> None:
    coordinator, *workers = shares(even_plan(case[0], names(case[1])))
    assert max([coordinator, *workers]) - min([coordinator, *workers]) <= 1
    assert all(workers)


@given(num_layers_and_workers)
def test_the_coordinator_is_first_and_has_the_smallest_share(case: tuple[int, int]) -> None:
    plan = even_plan(case[0], names(case[1]))
    assert [stage.worker for stage in plan.stages] == ["coordinator", *names(case[1])]
    assert shares(plan)[0] == min(shares(plan))


@given(num_layers_and_workers)
def test_an_even_plan_fits_its_model_and_workers(case: tuple[int, int]) -> None:
    num_layers, num_workers = case
    even_plan(num_layers, names(num_workers)).check(num_layers, names(num_workers))


def test_seven_layers_on_two_workers() -> None:
    plan = even_plan(7, ["a:1", "b:1"])
    assert [stage.layers for stage in plan.stages] == [(0, 2), (2, 4), (4, 7)]


@given(num_layers=st.integers(0, 50), excess=st.integers(1, 50))
def test_more_workers_than_layers_are_refused_with_both_numbers(
    num_layers: int, excess: int
) -> None:
    num_workers = num_layers + excess
    expected = f"has {num_layers} layers, too few for {num_workers} workers"
    with pytest.raises(PlanError, match=expected):
        even_plan(num_layers, names(num_workers))
