"""Re-planning: the same devices in the same order, and other layers."""

from __future__ import annotations

import pytest

from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.drift import (
    StageSeconds,
)
from lightning_hetero.planner.drift import StageSeconds as S
from lightning_hetero.planner.feasibility import candidate_of
from lightning_hetero.planner.profile import Profile
from lightning_hetero.planner.replan import Known, Replanned, expected_seconds, replan

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
    found = replan(plan_of(2, 4, 4), Known(), times)
    # Half a second a layer here besides the head, one on a, four on b.
    assert shares(found) == [6, 3, 1]
    assert found is not None
    assert found.gain > 0.6
    assert found.is_worth_it


def test_replan_changes_only_the_layers() -> None:
    plan = plan_of(2, 4, 4)
    found = replan(plan, Known(), {COORDINATOR: StageSeconds(2.0), **seconds(a=4, b=16)})
    assert found is not None
    assert [stage.recompute for stage in found.plan.stages] == [False, False, True]
    assert (found.plan.micro_batches, found.plan.in_flight) == (4, 3)
    assert [stage.worker for stage in found.plan.stages] == [COORDINATOR, "a", "b"]


@pytest.mark.parametrize("is_timed", [True, False], ids=["no layers", "not timed"])
def test_a_coordinator_without_times_keeps_its_layers(is_timed: bool) -> None:
    own = {COORDINATOR: StageSeconds(0, 0.1)} if is_timed else {}
    plan = plan_of(5, 5, with_coordinator=False) if is_timed else plan_of(2, 4, 4)
    found = replan(plan, Known(), {**own, **seconds(a=4, b=16)})
    assert shares(found) == ([9, 1] if is_timed else [2, 7, 1])


def line_of(*shares: int) -> Plan:
    """Layers of a, of b and of the coordinator, the embedding on a."""
    stages, first = [], 0
    for name, count in zip(["a", "b", COORDINATOR], shares, strict=False):
        stages.append(StagePlan([name], (first, first + count), embedding=name == "a"))
        first += count
    return Plan(stages, micro_batches=4, in_flight=3)


def test_a_coordinator_with_the_last_layers_keeps_them_without_a_profile() -> None:
    # What its layers take cannot be told from the head.
    found = replan(
        line_of(4, 4, 2), Known(), {COORDINATOR: StageSeconds(0, 9), **seconds(a=4, b=16)}
    )
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
    found = replan(plan, Known(measured), {**now, "b": StageSeconds(6 * expected["b"])})
    assert found is not None
    assert found.is_worth_it
    found.plan.check(10, ["a", "b"])
    *_, last = found.plan.stages
    assert last.is_local
    assert len(last.layer_indices) > own
    assert found.plan.stages[0].embedding


def test_a_worker_keeps_a_layer() -> None:
    found = replan(plan_of(1, 1, 1), Known(), {COORDINATOR: StageSeconds(1), **seconds(a=1, b=99)})
    assert shares(found)[2] == 1
    assert found is not None
    assert not found.is_worth_it


def cluster(**memory: int) -> Profile:
    """Workers that are alike, and a coordinator that takes a second for its ends."""
    own = coordinator([timing("layer", 1, 2), *ends(0.25, 0.25)])
    workers = [device("a", 1, 2, **memory), device("b", 1, 2)]
    return profile(10, workers, own, batch_size=4)


def test_replan_respects_the_memory() -> None:
    plan = plan_of(2, 4, 4)
    # A layer saves a byte for each of the three in flight.
    measured = cluster(memory_bytes=17)
    expected = expected_seconds(plan, measured)
    assert expected is not None
    slow = {name: StageSeconds(3 * value) for name, value in expected.items()}
    slow["a"] = StageSeconds(expected["a"])
    assert shares(replan(plan, Known(cluster()), slow))[1] > 5
    assert shares(replan(plan, Known(measured), slow))[1] == 5


def test_a_profile_of_other_devices_is_ignored() -> None:
    plan = Plan([StagePlan(["c"], (0, 10))], 4)
    assert expected_seconds(plan, cluster()) is None
    found = replan(plan, Known(cluster()), {COORDINATOR: StageSeconds(0, 1), "c": StageSeconds(4)})
    assert shares(found) == [10]


def held(plan: Plan, name: str) -> int:
    return sum(len(stage.layer_indices) for stage in plan.stages if stage.worker == name)


def test_with_a_profile_its_times_are_scaled() -> None:
    measured, plan = cluster(), plan_of(3, 4, 3)
    expected = expected_seconds(plan, measured)
    assert expected == pytest.approx({COORDINATOR: 10, "a": 12, "b": 12})
    assert expected is not None
    slow = {name: StageSeconds(value) for name, value in expected.items()}
    slow["b"] = StageSeconds(3 * expected["b"])
    found = replan(plan, Known(measured), slow)
    assert found is not None
    assert found.is_worth_it
    assert held(found.plan, "b") == 1
    # What the devices take now is what is expected of the new plan; b recomputes.
    assert found.profile is not None
    after = expected_seconds(found.plan, found.profile)
    assert after == pytest.approx(
        {
            COORDINATOR: 1 + 3 * held(found.plan, COORDINATOR),
            "a": 3 * held(found.plan, "a"),
            "b": 12,
        }
    )
    assert candidate_of(found.plan, found.profile).step_seconds == pytest.approx(
        (1 - found.gain) * candidate_of(plan, found.profile).step_seconds
    )


@pytest.mark.parametrize("shares", [(3, 4, 3), (0, 5, 5), (1, 1, 8)])
def test_a_replanned_plan_is_not_replanned_again(shares: tuple[int, int, int]) -> None:
    plan = plan_of(*shares)
    for _ in range(2):
        expected = expected_seconds(plan, cluster())
        assert expected is not None
        now = {name: StageSeconds(value) for name, value in expected.items()}
        found = replan(plan, Known(cluster()), now)
        assert found is not None
        assert found.gain >= 0
        plan = found.plan
        plan.check(10, ["a", "b"])
    assert not found.is_worth_it


def stages_of(*stages: tuple[str, int, int]) -> Plan:
    return Plan([StagePlan([name], (first, end)) for name, first, end in stages], 4, 3)


TURNS = stages_of(("a", 0, 2), ("b", 2, 4), ("a", 4, 6), ("b", 6, 8), (COORDINATOR, 8, 10))


def test_layers_move_between_the_stages_of_workers_with_several() -> None:
    expected = expected_seconds(TURNS, cluster())
    assert expected == pytest.approx({COORDINATOR: 7, "a": 12, "b": 12})
    assert expected is not None
    slow = {name: StageSeconds(value) for name, value in expected.items()}
    slow["b"] = StageSeconds(5 * expected["b"])
    found = replan(TURNS, Known(cluster()), slow)
    assert found is not None
    assert found.is_worth_it
    found.plan.check(10, ["a", "b"])
    assert [stage.worker for stage in found.plan.remote_stages] == ["a", "b", "a", "b"]
    assert held(found.plan, "b") == 2


def test_without_a_profile_all_stages_of_a_worker_count_together() -> None:
    times = {COORDINATOR: StageSeconds(0, 1), "a": StageSeconds(4), "b": StageSeconds(16)}
    found = replan(TURNS, Known(), times)
    assert found is not None
    found.plan.check(10, ["a", "b"])
    # A second a layer on a and four on b; the coordinator's two layers stay.
    assert [held(found.plan, name) for name in ("a", "b", COORDINATOR)] == [6, 2, 2]
    assert found.gain == pytest.approx(1 - 8 / 16, abs=0.02)


BOTH = stages_of((COORDINATOR, 0, 2), ("a", 2, 5), ("b", 5, 8), (COORDINATOR, 8, 10))


def test_without_a_profile_only_the_layers_in_front_leave_the_coordinator() -> None:
    times = {COORDINATOR: StageSeconds(8, 2), "a": StageSeconds(3), "b": StageSeconds(3)}
    found = replan(BOTH, Known(), times)
    assert found is not None
    assert [stage.layers for stage in found.plan.stages] == [(0, 0), (0, 5), (5, 8), (8, 10)]
    assert found.gain > 0.2


def test_a_coordinator_that_is_not_timed_keeps_its_layers_at_both_ends() -> None:
    for measured in (None, cluster()):
        found = replan(BOTH, Known(measured), {"a": StageSeconds(3), "b": StageSeconds(30)})
        assert found is not None
        first, *_, last = found.plan.stages
        assert (first.layers, last.layers) == ((0, 2), (8, 10))
        assert held(found.plan, "b") == 1


def test_a_coordinator_gets_layers_at_the_other_end() -> None:
    plan = stages_of((COORDINATOR, 0, 1), ("a", 1, 5), ("b", 5, 10))
    expected = expected_seconds(plan, cluster())
    assert expected is not None
    now = {name: StageSeconds(value) for name, value in expected.items()}
    found = replan(plan, Known(cluster()), {**now, "b": StageSeconds(9 * expected["b"])})
    assert found is not None
    found.plan.check(10, ["a", "b"])
    own = [stage for stage in found.plan.stages if stage.is_local]
    assert len(own) == 2
    assert own[-1].layers[1] == 10
    assert own[-1].layer_indices


def replicated(*shares_of_round: int, hosted: bool = False) -> Plan:
    names = ["a", COORDINATOR] if hosted else ["a", "b"]
    return Plan([StagePlan(names, (0, 4), shares=[*shares_of_round])], micro_batches=12)


def shares_in(found: Replanned | None) -> list[int] | None:
    assert found is not None
    return found.plan.stages[0].shares


def pair(own: float | None = None) -> Profile:
    """Two workers of one second for a layer's forward and two for its backward."""
    layers = [] if own is None else device("x", own, 2 * own).timings
    mine = coordinator([*ends(1e-4, 1e-4), *layers])
    workers = [device("a", 1, 2), device("b", 1, 2)]
    return profile(4, workers, mine, batch_size=12)


def test_a_slower_replica_gets_a_smaller_share_and_no_layer_moves() -> None:
    """b takes twice as long: 6 and 6 of 12 micro-batches become 8 and 4."""
    plan = replicated(6, 6)
    found = replan(plan, Known(pair()), {COORDINATOR: S(0.0, 0.001), **seconds(a=6, b=12)})
    assert shares_in(found) == [8, 4]
    assert found is not None
    assert found.plan.stages[0].layers == plan.stages[0].layers
    assert found.gain == pytest.approx(1 - 8 / 12, abs=0.02)
    assert found.is_worth_it


def test_shares_that_fit_stay() -> None:
    found = replan(
        replicated(6, 6), Known(pair()), {COORDINATOR: S(0.0, 0.001), **seconds(a=6, b=6)}
    )
    assert shares_in(found) == [6, 6]
    assert found is not None
    assert not found.is_worth_it


def test_without_a_profile_shares_follow_the_seconds() -> None:
    """A round of two becomes one of twelve, so that the shares can be as fine as the step."""
    found = replan(replicated(1, 1), Known(), seconds(a=6, b=12))
    assert shares_in(found) == [8, 4]
    assert found is not None
    assert found.gain == pytest.approx(1 - 8 / 12)


def test_without_a_profile_the_coordinator_gets_more_too() -> None:
    plan = Plan([StagePlan(["a", "b", COORDINATOR], (0, 4), shares=[4, 4, 4])], micro_batches=12)
    found = replan(plan, Known(), {COORDINATOR: S(4.0, 0.1), **seconds(a=4, b=12)})
    assert shares_in(found) == [6, 1, 5]


def test_a_spare_stays_a_spare() -> None:
    plan = Plan([StagePlan(["a", "b", "c"], (0, 4), shares=[6, 6, 0])], micro_batches=12)
    found = replan(plan, Known(), seconds(a=6, b=12))
    assert shares_in(found) == [8, 4, 0]


def test_the_coordinator_gets_fewer_where_the_profile_tells_its_time() -> None:
    found = replan(
        replicated(6, 6, hosted=True), Known(pair(1)), {COORDINATOR: S(0.0, 12.0), **seconds(a=6)}
    )
    its, own = shares_in(found) or [0, 0]
    assert its > 6 > own
    assert found is not None
    assert found.is_worth_it


def test_layers_move_between_stages_with_replicas() -> None:
    """All replicas of a stage get its new layers."""
    plan = Plan(
        [StagePlan(["a", "b"], (0, 2), shares=[1, 1]), StagePlan(["c"], (2, 4))], micro_batches=12
    )
    workers = [device(name, 1, 2) for name in "abc"]
    measured = profile(4, workers, coordinator(ends(1e-4, 1e-4)), batch_size=12)
    found = replan(plan, Known(measured), {COORDINATOR: S(0.0, 0.001), **seconds(a=3, b=3, c=6)})
    assert found is not None
    assert [stage.layers for stage in found.plan.stages] == [(0, 3), (3, 4)]
    assert [stage.workers for stage in found.plan.stages] == [["a", "b"], ["c"]]
    assert found.is_worth_it
