"""The head on the worker with the last layers: seconds, memory, bytes, and plans that keep it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.feasibility import candidate_of, check_plan
from lightning_hetero.planner.membership import joined, left
from lightning_hetero.planner.profile import EMBEDDING, HEAD, Link, Part, Profile
from lightning_hetero.planner.replan import best_split
from lightning_hetero.planner.solver import solve
from lightning_hetero.planner.verdict import judge

from .profiles import coordinator, device, profile, timing

NUM_LAYERS = 6
WORKERS = ("a", "b")
SAVED, WEIGHTS = 1000, 64


def cluster(head_seconds: float, *names: str, **options: object) -> Profile:
    """Workers with twice the speed of the coordinator, whose head takes so long."""
    parts = [
        Part(EMBEDDING, parameter_bytes=WEIGHTS),
        Part(HEAD, parameter_bytes=WEIGHTS),
        Part("layer", parameter_bytes=0),
    ]
    head = [
        timing(HEAD, head_seconds / 4 * s, head_seconds * 3 / 4 * s, size=s, saved_bytes=SAVED * s)
        for s in (1, 64)
    ]
    start = [timing(EMBEDDING, 0, 0, size=size) for size in (1, 64)]
    layers = [timing("layer", size, 2 * size, size=size) for size in (1, 64)]
    crossing = {"activation_bytes_per_sample": 100, "gradient_bytes_per_sample": 100}
    return profile(
        NUM_LAYERS,
        [device(name, 0.5, 1) for name in names or WORKERS],
        coordinator([*layers, *start, *head]),
        model_options={"parts": parts, **crossing},
        batch_size=4,
        **options,
    )


def plan_with(head: bool, *, last: tuple[str, ...] = ("b",)) -> Plan:
    stages = [StagePlan(["a"], (0, 3)), StagePlan([*last], (3, NUM_LAYERS), head=head)]
    return Plan(stages, micro_batches=4, in_flight=3)


def test_its_seconds_are_the_worker_s() -> None:
    measured = cluster(8)
    here, away = (candidate_of(plan_with(head), measured) for head in (False, True))
    before, after = here.process_seconds, away.process_seconds
    assert before[COORDINATOR] - after[COORDINATOR] == pytest.approx(8)
    assert after["b"] - before["b"] == pytest.approx(4)
    assert after["a"] == before["a"]
    assert away.step_seconds < here.step_seconds


def test_its_memory_is_the_worker_s_for_each_micro_batch_in_flight() -> None:
    measured = cluster(8)
    here, away = (candidate_of(plan_with(head), measured) for head in (False, True))
    there = [candidate.need("b") for candidate in (here, away)]
    assert there[1].weights - there[0].weights == WEIGHTS
    assert there[1].in_flight - there[0].in_flight == 3 * SAVED
    # One boundary less, one activation and one gradient of a sample each.
    assert there[0].boundaries - there[1].boundaries == 200
    own = [candidate.need(COORDINATOR) for candidate in (here, away)]
    assert own[0].weights - own[1].weights == WEIGHTS


def test_nothing_comes_back_but_losses() -> None:
    measured = cluster(8)
    here, away = (candidate_of(plan_with(head), measured) for head in (False, True))
    assert here.bytes_sent("b", COORDINATOR) == 400
    assert away.bytes_sent("b", COORDINATOR) == 0
    assert away.bytes_sent("a", "b") == here.bytes_sent("a", "b")


@pytest.mark.parametrize("last", [("b",), ("b", "c")])
def test_a_candidate_is_its_plan(last: tuple[str, ...]) -> None:
    plan = plan_with(head=True, last=last)
    found = candidate_of(plan, cluster(8, "a", "b", "c")).plan()
    assert [(s.workers, s.layers, s.head) for s in found.stages] == [
        (s.workers, s.layers, s.head) for s in plan.stages
    ]


def test_a_worker_without_memory_for_it_is_told() -> None:
    small = cluster(8)
    devices = [replace(d, memory_bytes=1500) if d.name == "b" else d for d in small.devices]
    assert check_plan(plan_with(head=False), replace(small, devices=devices)) == []
    (fault,) = check_plan(plan_with(head=True), replace(small, devices=devices))
    assert "does not fit: `b`" in fault


def test_no_layers_go_behind_it() -> None:
    slow = cluster(8)
    devices = [device("b", 50, 100) if d.name == "b" else d for d in slow.devices]
    found = best_split(candidate_of(plan_with(True), replace(slow, devices=devices)), False)
    assert found is not None
    assert found.ranges[-1] == (NUM_LAYERS, NUM_LAYERS)
    found.plan().check(NUM_LAYERS, WORKERS)


def test_it_stays_at_the_end_if_a_worker_joins_or_leaves() -> None:
    measured = cluster(8, "a", "b", "c")
    change = joined(plan_with(head=True), measured, "c")
    assert change is not None
    change.plan.check(NUM_LAYERS, ["a", "b", "c"])
    assert change.plan.stages[-1].head
    for name, other in (("a", "b"), ("b", "a")):
        gone = left(plan_with(head=True), measured, name, keeps_own=True)
        assert gone is not None
        gone.plan.check(NUM_LAYERS, WORKERS)
        assert [(s.worker, s.head) for s in gone.plan.stages] == [(other, True)]


@pytest.mark.parametrize("head_seconds", [0.1, 40.0])
def test_the_verdict_names_both_remedies_of_a_slow_head(head_seconds: float) -> None:
    links = [Link(one, other, 1e-6, 1e9) for one in WORKERS for other in (COORDINATOR,)]
    advice = judge(solve(cluster(head_seconds, links=links))).advice
    said = [each.text for each in advice if each.kind == "slow head"]
    assert len(said) == (head_seconds > 1)
    assert all("start the script on `" in text and "`head: true`" in text for text in said)
