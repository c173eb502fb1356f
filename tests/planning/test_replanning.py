"""Re-planning: the same devices in the same order, and other layers."""

from __future__ import annotations

import pytest

from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planning.profile import Profile
from lightning_hetero.planning.replanning import Replanned, expected_seconds, replan
from lightning_hetero.planning.watching import StageSeconds

from .profiles import coordinator, device, ends, profile, timing


def plan_of(*shares: int, with_coordinator: bool = True) -> Plan:
    names = [COORDINATOR, "a", "b"] if with_coordinator else ["a", "b"]
    stages, first = [], 0
    for name, count in zip(names, shares, strict=True):
        stages.append(StagePlan([name], (first, first + count), recompute=name == "b"))
        first += count
    return Plan(stages, micro_batches=4, in_flight=3)


def shares(found: Replanned | None) -> list[int]:
    assert found is not None
    return [len(stage.layer_indices) for stage in found.plan.stages]


def seconds(**stages: float) -> dict[str, StageSeconds]:
    return {name: StageSeconds(value) for name, value in stages.items()}


def test_without_a_profile_the_layers_follow_the_seconds() -> None:
    times = {COORDINATOR: StageSeconds(1.0, 2.0), **seconds(a=4, b=16)}
    found = replan(plan_of(2, 4, 4), None, times)
    # Half a second a layer here besides the head, one on a, four on b.
    assert shares(found) == [5, 4, 1]
    assert found is not None
    assert found.gain == pytest.approx(1 - 4.5 / 16)
    assert found.is_worth_it


def test_all_else_of_the_plan_stays() -> None:
    plan = plan_of(2, 4, 4)
    found = replan(plan, None, {COORDINATOR: StageSeconds(2.0), **seconds(a=4, b=16)})
    assert found is not None
    assert [stage.recompute for stage in found.plan.stages] == [False, False, True]
    assert (found.plan.micro_batches, found.plan.in_flight) == (4, 3)
    assert [stage.worker for stage in found.plan.stages] == [COORDINATOR, "a", "b"]


@pytest.mark.parametrize("is_timed", [True, False], ids=["no layers", "not timed"])
def test_a_coordinator_whose_layers_are_not_known_keeps_what_it_has(is_timed: bool) -> None:
    own = {COORDINATOR: StageSeconds(0, 0.1)} if is_timed else {}
    plan = plan_of(5, 5, with_coordinator=False) if is_timed else plan_of(2, 4, 4)
    found = replan(plan, None, {**own, **seconds(a=4, b=16)})
    assert shares(found) == ([8, 2] if is_timed else [2, 7, 1])


def line_of(*shares: int) -> Plan:
    """Layers of a, of b and of the coordinator, the embedding on a."""
    stages, first = [], 0
    for name, count in zip(["a", "b", COORDINATOR], shares, strict=False):
        stages.append(StagePlan([name], (first, first + count), embedding=name == "a"))
        first += count
    return Plan(stages, micro_batches=4, in_flight=3)


def test_a_coordinator_with_the_last_layers_keeps_them_without_a_profile() -> None:
    # What its layers take cannot be told from the head.
    found = replan(line_of(4, 4, 2), None, {COORDINATOR: StageSeconds(0, 9), **seconds(a=4, b=16)})
    assert shares(found) == [7, 1, 2]
    assert found is not None
    assert [stage.embedding for stage in found.plan.stages] == [True, False, False]


@pytest.mark.parametrize("own", [0, 4])
def test_with_a_profile_the_last_layers_move(own: int) -> None:
    plan, measured = line_of(5 - own // 2, 5 - own // 2, *[own] if own else []), cluster()
    expected = expected_seconds(plan, measured)
    assert expected is not None
    assert expected[COORDINATOR] == pytest.approx(0.25 + 0.5 + 3 * own)
    now = {name: StageSeconds(value) for name, value in expected.items()}
    found = replan(plan, measured, {**now, "b": StageSeconds(6 * expected["b"])})
    assert found is not None
    assert found.is_worth_it
    found.plan.check(10, ["a", "b"])
    *_, last = found.plan.stages
    assert last.is_local
    assert len(last.layer_indices) > own
    assert found.plan.stages[0].embedding


def test_a_worker_keeps_a_layer() -> None:
    found = replan(plan_of(1, 1, 1), None, {COORDINATOR: StageSeconds(1), **seconds(a=1, b=99)})
    assert shares(found)[2] == 1
    assert found is not None
    assert not found.is_worth_it


def cluster(**memory: int) -> Profile:
    """Workers that are alike, and a coordinator that takes a second for its ends."""
    own = coordinator([timing("layer", 1, 2), *ends(0.25, 0.25)])
    workers = [device("a", 1, 2, **memory), device("b", 1, 2)]
    return profile(10, workers, own, batch_size=4)


def test_memory_is_kept_to() -> None:
    plan = plan_of(2, 4, 4)
    # A layer saves a byte for each of the three in flight.
    measured = cluster(memory_bytes=17)
    expected = expected_seconds(plan, measured)
    assert expected is not None
    slow = {name: StageSeconds(3 * value) for name, value in expected.items()}
    slow["a"] = StageSeconds(expected["a"])
    assert shares(replan(plan, cluster(), slow))[1] > 5
    assert shares(replan(plan, measured, slow))[1] == 5


def test_a_profile_of_other_devices_says_nothing() -> None:
    plan = Plan([StagePlan(["c"], (0, 10))], 4)
    assert expected_seconds(plan, cluster()) is None
    found = replan(plan, cluster(), {COORDINATOR: StageSeconds(0, 1), "c": StageSeconds(4)})
    assert shares(found) == [10]


def test_with_a_profile_its_times_are_scaled() -> None:
    # The best one: 10, 12 and, with recomputation, 12 seconds.
    measured, plan = cluster(), plan_of(3, 4, 3)
    expected = expected_seconds(plan, measured)
    assert expected == pytest.approx({COORDINATOR: 10, "a": 12, "b": 12})
    assert expected is not None
    now = {name: StageSeconds(value) for name, value in expected.items()}
    same = replan(plan, measured, now)
    assert same is not None
    assert not same.is_worth_it
    slow = {**now, "b": StageSeconds(3 * expected["b"])}
    found = replan(plan, measured, slow)
    assert found is not None
    assert found.is_worth_it
    assert shares(found) == [4, 5, 1]
    # What the devices take now is what is expected of the new plan.
    assert found.profile is not None
    after = expected_seconds(found.plan, found.profile)
    assert after is not None
    assert after == pytest.approx({COORDINATOR: 13, "a": 15, "b": 12})
