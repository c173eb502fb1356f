"""Who takes part: the plan with one more worker, and with one less."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.drift import StageSeconds
from lightning_hetero.planner.feasibility import candidate_of, shortages
from lightning_hetero.planner.membership import (
    at_present,
    fits,
    gathered,
    in_place,
    joined,
    left,
    left_by_bytes,
)
from lightning_hetero.planner.profile import Profile
from lightning_hetero.planner.replan import Known, PlanChange, expected_seconds, replan

from .profiles import coordinator, device, ends, profile, timing

NUM_LAYERS = 10


def plan_of(*held: tuple[str, int], in_flight: int | None = 3) -> Plan:
    stages, first = [], 0
    for name, count in held:
        stages.append(StagePlan([name], (first, first + count)))
        first += count
    return Plan(stages, micro_batches=4, in_flight=in_flight)


def cluster(*names: str, seconds: float = 1.0, **memory: int) -> Profile:
    """Workers that take a second forward and two backward, and a coordinator that is as fast."""
    own = coordinator([timing("layer", 1, 2), *ends(0.25, 0.25)])
    workers = [device(name, seconds, 2 * seconds, **memory) for name in names]
    return profile(NUM_LAYERS, workers, own, batch_size=4)


def check(change: PlanChange | None, *names: str) -> PlanChange:
    assert change is not None
    change.plan.check(NUM_LAYERS, names)
    return change


def counts(plan: Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    for stage in plan.stages:
        found[stage.worker] = found.get(stage.worker, 0) + len(stage.layer_indices)
    return found


PLANS = {
    "a line": plan_of((COORDINATOR, 2), ("a", 4), ("b", 4)),
    "workers alone": plan_of(("a", 5), ("b", 5)),
    "the coordinator last": plan_of(("a", 4), ("b", 4), (COORDINATOR, 2)),
    "turn by turn": plan_of(("a", 3), ("b", 3), ("a", 2), ("b", 2)),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_one_that_is_as_fast_as_the_others_joins(plan: Plan) -> None:
    change = check(joined(plan, cluster("a", "b", "c"), "c"), "a", "b", "c")
    assert change.is_worth_it
    assert change.plan.workers.count("c") == 1
    assert change.after_seconds == pytest.approx(
        candidate_of(change.plan, cluster("a", "b", "c")).step_seconds
    )
    assert change.plan.micro_batches == plan.micro_batches
    assert change.plan.in_flight == 5


def test_the_others_keep_their_order_and_options() -> None:
    stages = [
        StagePlan(["b"], (0, 5), embedding=True),
        StagePlan(["a"], (5, 10), recompute=True, activation_dtype="float16"),
    ]
    change = check(joined(Plan(stages, 4), cluster("a", "b", "c"), "c"), "a", "b", "c")
    first, *others = change.plan.remote_stages
    assert first.worker == "b"
    assert first.embedding
    own = next(stage for stage in others if stage.worker == "a")
    assert (own.recompute, own.activation_dtype) == (True, "float16")
    assert change.plan.in_flight is None


def test_a_slow_one_is_not_worth_a_move() -> None:
    measured = profile(
        NUM_LAYERS,
        [device("a", 1, 2), device("b", 1, 2), device("c", 60, 120)],
        coordinator([timing("layer", 1, 2), *ends(0.25, 0.25)]),
        batch_size=4,
    )
    change = check(joined(PLANS["a line"], measured, "c"), "a", "b", "c")
    assert not change.is_worth_it


def test_one_without_memory_joins_nothing() -> None:
    devices = [device("a", 1, 2), device("b", 1, 2), device("c", 1, 2, memory_bytes=1)]
    own = coordinator([timing("layer", 1, 2), *ends(0.25, 0.25)])
    measured = profile(NUM_LAYERS, devices, own, batch_size=4)
    assert joined(PLANS["a line"], measured, "c") is None


def test_nobody_joins_a_plan_without_a_layer_to_give() -> None:
    own = coordinator([timing("layer", 1, 2), *ends(0.25, 0.25)])
    single = profile(1, [device("a", 1, 2), device("c", 1, 2)], own, batch_size=4)
    assert joined(Plan([StagePlan(["a"], (0, 1))], 4), single, "c") is None


def replicas(*stages: tuple[dict[str, int], int], **options: Any) -> Plan:
    """A plan over the shares of each stage's processes and its number of layers."""
    found, first = [], 0
    for shares, count in stages:
        layers = (first, first + count)
        is_shared = len(shares) > 1
        numbers = [*shares.values()] if is_shared else None
        found.append(StagePlan([*shares], layers, shares=numbers, **(options if is_shared else {})))
        first += count
    return Plan(found, 12)


def with_batch(measured: Profile) -> Profile:
    return msgspec.structs.replace(measured, batch_size=12)


def test_one_that_joins_replicas_gets_a_share_by_its_speed() -> None:
    measured = with_batch(cluster("a", "b", "c"))
    change = check(joined(replicas(({"a": 6, "b": 6}, NUM_LAYERS)), measured, "c"), "a", "b", "c")
    assert [(s.workers, s.shares) for s in change.plan.stages] == [(["a", "b", "c"], [4, 4, 4])]
    assert change.gain == pytest.approx(1 / 3, abs=0.05)
    plan = replicas(({"a": 6, COORDINATOR: 6}, NUM_LAYERS))
    slow = with_batch(cluster("a")).devices + [device("c", 4, 8)]
    change = check(joined(plan, msgspec.structs.replace(measured, devices=slow), "c"), "a", "c")
    [stage] = change.plan.stages
    assert stage.workers == ["a", COORDINATOR, "c"]
    assert stage.shares is not None
    assert stage.shares[2] < min(stage.shares[:2])


def test_one_joins_the_stage_that_gains_most_and_none_that_has_no_memory_for_it() -> None:
    plan = replicas(({"a": 6, "b": 6}, 4), ({"d": 12}, 6))
    measured = with_batch(cluster("a", "b", "c", "d"))
    change = check(joined(plan, measured, "c"), "a", "b", "c", "d")
    assert [stage.workers for stage in change.plan.stages] == [["a", "b"], ["d", "c"]]
    small = [*with_batch(cluster("a", "b", "d")).devices, device("c", 1, 2, memory_bytes=1)]
    assert joined(plan, msgspec.structs.replace(measured, devices=small), "c") is None


def test_nobody_joins_replicas_that_have_one_micro_batch_each() -> None:
    plan = replace(replicas(({"a": 1, "b": 1}, NUM_LAYERS)), micro_batches=2)
    assert joined(plan, with_batch(cluster("a", "b", "c")), "c") is None


def test_the_other_replicas_run_the_micro_batches_of_one_that_leaves() -> None:
    measured = with_batch(cluster("a", "b", "c"))
    plan = replicas(({"a": 4, "b": 4, "c": 4}, NUM_LAYERS), optimizer="split")
    [stage] = check(left(plan, measured, "b"), "a", "c").plan.stages
    assert (stage.workers, stage.shares, stage.optimizer) == (["a", "c"], [6, 6], "split")
    [stage] = check(left(replicas(({"a": 6, "b": 6}, 10)), measured, "a"), "b").plan.stages
    assert stage == StagePlan(["b"], (0, NUM_LAYERS))


def test_the_coordinator_keeps_a_stage_whose_other_replica_leaves() -> None:
    plan = replicas(({COORDINATOR: 12}, 2), ({"a": 6, COORDINATOR: 6}, 4), ({"b": 12}, 4))
    change = check(left(plan, with_batch(cluster("a", "b")), "a"), "b")
    assert [(s.workers, s.layers) for s in change.plan.stages] == [
        ([COORDINATOR], (0, 6)),
        (["b"], (6, 10)),
    ]


def test_one_stays_that_has_a_stage_alone_beside_replicas_or_is_the_only_worker() -> None:
    measured, room = with_batch(cluster("a", "b", "c")), dict.fromkeys("abc", math.inf)
    plan = replicas(({"a": 6, "b": 6}, 4), ({"c": 12}, 6))
    assert left(plan, measured, "c") is None
    assert left_by_bytes(plan, "c", [1] * NUM_LAYERS, room) is None
    alone = replicas(({"a": 6, COORDINATOR: 6}, NUM_LAYERS))
    assert left(alone, measured, "a") is None
    assert left_by_bytes(alone, "a", [1] * NUM_LAYERS, room) is None


def test_without_a_measurement_the_shares_of_the_others_stay() -> None:
    plan = replicas(({"a": 6, "b": 4, "c": 2}, NUM_LAYERS))
    found = left_by_bytes(plan, "a", [10] * NUM_LAYERS, dict.fromkeys("bc", 1.0))
    assert found is not None, "they have the layers already"
    assert [(stage.workers, stage.shares) for stage in found.stages] == [(["b", "c"], [4, 2])]
    spare = replicas(({"a": 12, "b": 0, "c": 0}, NUM_LAYERS))
    found = left_by_bytes(spare, "a", [10] * NUM_LAYERS, dict.fromkeys("bc", 1.0))
    assert found is not None
    assert found.stages[0].shares == [1, 1], "those that ran nothing run all"


def test_those_that_step_a_part_each_need_memory_for_the_parts_of_one_that_leaves() -> None:
    plan = replicas(({"a": 6, "b": 4, "c": 2}, NUM_LAYERS), optimizer="split")
    assert left_by_bytes(plan, "a", [10] * NUM_LAYERS, dict.fromkeys("bc", 1.0)) is None
    assert left_by_bytes(plan, "a", [10] * NUM_LAYERS, dict.fromkeys("bc", 100.0)) is not None


def test_a_machine_that_takes_over_from_a_replica_beside_it_has_both_shares() -> None:
    plan = in_place(replicas(({"a": 6, "b": 4, "c": 2}, NUM_LAYERS)), "b", "a")
    assert [(stage.workers, stage.shares) for stage in plan.stages] == [(["a", "c"], [10, 2])]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("name", ["a", "b"])
def test_the_others_get_all_layers_of_one_that_leaves(plan: Plan, name: str) -> None:
    change = check(left(plan, cluster("a", "b"), name), "a", "b")
    assert change.plan.workers == [other for other in ("a", "b") if other != name]
    assert not shortages(candidate_of(change.plan, cluster("a", "b")))


def test_the_coordinator_keeps_its_layers_where_their_time_is_not_known() -> None:
    change = check(left(PLANS["a line"], cluster("a", "b"), "a", keeps_own=True), "a", "b")
    assert counts(change.plan) == {COORDINATOR: 2, "b": 8}


def test_one_stays_if_the_others_have_not_the_memory() -> None:
    plan = PLANS["workers alone"]
    assert left(plan, cluster("a", "b", memory_bytes=16), "a", keeps_own=True) is None
    assert left(plan_of((COORDINATOR, 5), ("a", 5)), cluster("a"), "a") is None


def test_the_embedding_goes_to_the_next_worker_or_comes_home() -> None:
    stages = [StagePlan(["a"], (0, 5), embedding=True), StagePlan(["b"], (5, 10))]
    change = check(left(Plan(stages, 4), cluster("a", "b"), "a", keeps_own=True), "a", "b")
    assert [(s.worker, s.layers, s.embedding) for s in change.plan.stages] == [("b", (0, 10), True)]


def test_one_takes_the_place_of_another_in_all_its_stages() -> None:
    plan = in_place(PLANS["turn by turn"], "a", "c")
    assert [stage.worker for stage in plan.stages] == ["c", "b", "c", "b"]
    assert fits(plan, cluster("b", "c"))
    assert not fits(plan, cluster("b", "c", memory_bytes=3))
    assert not fits(plan, cluster("a", "b"))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_without_a_measurement_bytes_decide(plan: Plan) -> None:
    room = {"a": 100.0, "b": 100.0}
    found = left_by_bytes(plan, "a", [10] * NUM_LAYERS, room)
    assert found is not None
    found.check(NUM_LAYERS, ["b"])
    assert found.workers == ["b"]
    assert left_by_bytes(plan, "a", [100] * NUM_LAYERS, room) is None


def test_layers_are_spread_evenly_where_nothing_is_measured() -> None:
    plan = plan_of(("a", 3), ("b", 4), ("c", 3))
    found = left_by_bytes(plan, "b", [1] * NUM_LAYERS, {"a": 9.0, "c": 9.0})
    assert found is not None
    assert counts(found) == {"a": 5, "c": 5}
    found = left_by_bytes(plan, "b", [1] * NUM_LAYERS, {"a": 4.0, "c": 9.0})
    assert found is not None
    assert counts(found) == {"a": 4, "c": 6}


def test_a_machine_that_serves_for_two_gives_layers_away() -> None:
    measured, plan = cluster("a", "b", "c"), plan_of(("a", 3), ("b", 4), ("c", 3))
    change = check(gathered(plan, measured, {"b": "a"}), "a", "c")
    assert change.before_seconds == pytest.approx(
        candidate_of(in_place(plan, "b", "a"), measured).step_seconds
    )
    assert change.is_worth_it
    assert "b" not in change.plan.workers


def test_a_profile_follows_the_present_speeds() -> None:
    plan, measured = PLANS["a line"], cluster("a", "b", "c")
    expected = expected_seconds(plan, measured)
    assert expected is not None
    now = {name: StageSeconds(2 * seconds) for name, seconds in expected.items()}
    slow = at_present(plan, measured, now)
    for name in ("a", "b", "c"):
        pairs = zip(measured.device(name).timings, slow.device(name).timings, strict=True)
        assert all(new.forward_seconds == 2 * old.forward_seconds for old, new in pairs)
    assert at_present(plan, measured, {}) is measured


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_ranges_follow_each_other(plan: Plan) -> None:
    measured = cluster("a", "b", "c")
    for change in (joined(plan, measured, "c"), left(plan, measured, "b")):
        stages = check(change, "a", "b", "c").plan.stages
        assert all(one.layers[1] == other.layers[0] for one, other in pairwise(stages))


OWNED_IN_PARTS = {
    "on workers": replicas(({"a": 4, "b": 4, "c": 4}, NUM_LAYERS), optimizer="split"),
    "the coordinator too": replicas(
        ({"a": 4, "b": 4, COORDINATOR: 4}, NUM_LAYERS), optimizer="split"
    ),
}


@pytest.mark.parametrize("plan", OWNED_IN_PARTS.values(), ids=OWNED_IN_PARTS)
def test_owners_of_parts_stay_so_whoever_comes_and_goes_and_however_fast_they_are(
    plan: Plan,
) -> None:
    everyone = with_batch(cluster("a", "b", "c", "d"))
    slow = {name: StageSeconds(3.0 if name == "b" else 1.0) for name in plan.stages[0].workers}
    found = [
        joined(plan, everyone, "d"),
        left(plan, everyone, "a"),
        gathered(plan, everyone, {"a": "b"}),
        replan(plan, Known(everyone), slow),
        replan(plan, Known(), slow),
    ]
    plans = [each.plan for each in found if each is not None]
    plans += [in_place(plan, "a", "d"), candidate_of(plan, everyone).plan()]
    by_bytes = left_by_bytes(plan, "b", [1] * NUM_LAYERS, dict.fromkeys("abcd", 1e9))
    assert len(plans) == 7
    assert by_bytes is not None
    for each in [*plans, by_bytes]:
        [stage] = each.stages
        assert len(stage.workers) > 1
        assert stage.optimizer == "split"
