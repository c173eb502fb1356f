"""The pure parts of the benchmark of replicas: bounds, goals, what trains. Nothing is measured."""

from __future__ import annotations

import pytest

from benchmarks.peers.splits import Costs
from benchmarks.peers.workload import WORKLOADS
from benchmarks.replicas import sleeping, two_cores
from benchmarks.replicas.slowed import Shift


@pytest.mark.parametrize(
    ("count", "speed", "own", "bound"),
    [(16, 1, 7, 140 / 72), (8, 1, 4, 70 / 38), (16, 0.5, 10, 140 / 96), (16, 0.25, 13, 140 / 116)],
)
def test_bound_of_replicas(count: int, speed: float, own: int, bound: float) -> None:
    """A head of 0.75 of a layer, in quarters of layers: a micro-batch has 8.75 layers."""
    costs = Costs(layer_seconds=count, rest_seconds=0.75 * count, num_layers=8)
    assert costs.replicas_bound(own, count, speed) == pytest.approx(bound)
    best = costs.balanced_share(count, speed)
    assert costs.replicas_bound(best, count, speed) == pytest.approx(bound)


@pytest.mark.parametrize("case", two_cores.CASES, ids=lambda case: case.name)
def test_goals_are_below_the_bounds(case: two_cores.Case) -> None:
    costs = Costs(
        layer_seconds=case.micro_batches, rest_seconds=0.75 * case.micro_batches, num_layers=8
    )
    assert case.goal < costs.replicas_bound(case.own, case.micro_batches, case.speed)
    assert {*case.peers} <= {*case.splits}


@pytest.mark.parametrize("name", [name for name in WORKLOADS if "tiny" in name])
def test_adapters_alone_train(name: str) -> None:
    workload = WORKLOADS[name]
    trained = [name for name, p in workload.model().named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in trained) == workload.has_adapters
    assert len(trained) >= 8


def test_bound_of_sleeping_replicas() -> None:
    """A layer takes 3 units for a micro-batch at speed 1."""
    shared = sleeping.Case((1, 2, 1, 1), "C1 ab3 c1", 3)
    # Worker c has three of them, behind the coordinator's layer and worker a's three at speed 2.
    assert sleeping.bound_seconds(shared, 1.0) == 3 + 3 * 3 / 2 + 3 * 3
    assert sleeping.bound_seconds(sleeping.FOUR_REPLICAS[4], 1.0) == 4 * 3
    for count, gain in ((4, 7 / 4), (8, 11 / 8)):
        line, replicas = sleeping.LINE_OF_FOUR[count], sleeping.FOUR_REPLICAS[count]
        bounds = [sleeping.bound_seconds(case, 1.0) for case in (line, replicas)]
        assert bounds[0] / bounds[1] == gain


def test_steps_of_a_shift() -> None:
    """Three steps of 1 s, two slow ones, then the new shares; the bound allows 2 s."""
    seconds = [1.0, 1.0, 1.0, 3.0, 3.0, 2.5, 2.1, 2.1, 2.1]
    shift = Shift(10, seconds, 0, new_bound=0.5, allowed=1.0)
    assert (shift.before, shift.slow, shift.after) == (1.0, 3.0, 2.1)
    assert shift.num_steps_to_goal == 4
    assert shift.reached == pytest.approx(2 / 2.1)
    assert Shift(10, [4.0] * 9, 0, new_bound=0.5, allowed=1.0).num_steps_to_goal is None
