"""The head on the worker with the last layers: seconds, memory, bytes, and plans that keep it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from benchmarks.planner_optimality.main import BOUND, compare
from lightning_hetero.errors import PlanError
from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.candidates import Candidate, Costs
from lightning_hetero.planner.feasibility import candidate_of, check_plan, with_head_away
from lightning_hetero.planner.membership import joined, left
from lightning_hetero.planner.profile import EMBEDDING, HEAD, Link, LinkSpeed, Part, Profile
from lightning_hetero.planner.remedies import fastest_with_script
from lightning_hetero.planner.replan import best_split
from lightning_hetero.planner.search import Search
from lightning_hetero.planner.solver import Wishes, solve
from lightning_hetero.planner.verdict import judge, sentences

from ..pairwise import keeping
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
    said = [each for each in advice if "head is the bottleneck" in each]
    assert len(said) == (head_seconds > 1)
    assert all("start the script on `" in text and "`head: true`" in text for text in said)


def test_a_tied_head_leaves_only_with_the_embedding() -> None:
    tied = cluster(40)
    tied = replace(tied, model=replace(tied.model, tied_gradient_bytes=8))
    assert with_head_away(candidate_of(plan_with(False), cluster(40))) is not None
    assert with_head_away(candidate_of(plan_with(False), tied)) is None
    whole = Plan([StagePlan(["a"], (0, NUM_LAYERS), embedding=True)], micro_batches=4)
    found = with_head_away(candidate_of(whole, tied))
    assert found is not None
    assert found.left.head


def measured_there(of: Profile, head_seconds: float, *names: str, **options: object) -> Profile:
    """The profile with a head that may leave, measured on some workers."""
    head = [
        timing(HEAD, head_seconds / 4 * s, head_seconds * 3 / 4 * s, size=s, saved_bytes=SAVED * s)
        for s in (1, 64)
    ]
    devices = [
        replace(each, timings=[*each.timings, *head]) if each.name in names else each
        for each in of.devices
    ]
    model = replace(of.model, head_may_leave=True, logits_bytes_per_sample=2**20, **options)
    return replace(of, model=model, devices=devices)


def chosen_of(of: Profile) -> Candidate:
    return solve(of, Wishes(replicas=False)).chosen


def test_a_weak_coordinator_gives_the_head_to_a_strong_worker() -> None:
    stays = chosen_of(cluster(8))
    leaves = chosen_of(measured_there(cluster(8), 1, *WORKERS))
    assert not stays.left.head
    assert leaves.left.head
    assert leaves.plan().stages[-1].head
    assert leaves.step_seconds < stays.step_seconds


def test_a_strong_coordinator_keeps_the_head() -> None:
    assert not chosen_of(measured_there(cluster(0.1), 8, *WORKERS)).left.head


def test_seconds_measured_there_count_and_not_those_of_its_layers() -> None:
    """By its layers `b` would take half of the coordinator's time."""
    there = measured_there(cluster(8), 7, *WORKERS)
    found, before = candidate_of(plan_with(True), there), candidate_of(plan_with(False), there)
    assert found.process_seconds["b"] - before.process_seconds["b"] == pytest.approx(7)


def test_the_optimizer_s_step_over_the_head_is_the_worker_s() -> None:
    there = measured_there(cluster(8), 1, *WORKERS)
    devices = [
        replace(d, optimizer_seconds={HEAD: 3.0} if d.name == COORDINATOR else {HEAD: 1.0})
        for d in there.devices
    ]
    there = replace(there, devices=devices)
    here, away = (candidate_of(plan_with(head), there).pipeline for head in (False, True))
    assert [times.optimizer_seconds for times in here.stages] == [3.0, 0.0, 0.0]
    assert [times.optimizer_seconds for times in away.stages] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("num_workers", [2, 7])
def test_a_coordinator_without_memory_for_it_gives_it_away(num_workers: int) -> None:
    """Seven workers are too many to try all their orders."""
    names = [*"abcdefg"[:num_workers]]
    small = measured_there(cluster(0.01, *names), 1, *names)
    own = replace(small.device(COORDINATOR), memory_bytes=500)
    small = replace(small, devices=[own, *small.devices[1:]])
    found = chosen_of(small)
    assert found.left.head
    assert check_plan(found.plan(), small) == []
    stays = replace(small, model=replace(small.model, head_may_leave=False))
    with pytest.raises(PlanError, match="the head do not fit: the coordinator is"):
        solve(stays)


def test_both_ends_may_leave() -> None:
    there = measured_there(cluster(8), 1, *WORKERS, embedding_may_leave=True)
    # A link over which activations take longer than layers, and ids do not.
    there = replace(there, default_link=LinkSpeed(0, 20))
    found = chosen_of(there)
    assert found.left == (True, True)
    assert found.bytes_sent(found.workers[-1], COORDINATOR) == 0


def test_labels_go_out() -> None:
    measured = cluster(8)
    here, away = (candidate_of(plan_with(head), measured) for head in (False, True))
    of_labels = 8 * measured.model.tokens_per_sample * 4
    assert away.bytes_sent(COORDINATOR, "a") - here.bytes_sent(COORDINATOR, "a") == of_labels


@pytest.mark.parametrize("why", ["not measured there", "safe mode", "other precision"])
def test_where_a_run_could_fail_it_stays(why: str) -> None:
    there = measured_there(cluster(8, "a"), 1, "a")
    assert chosen_of(there).left.head
    if why == "not measured there":
        there = measured_there(cluster(8, "a"), 1)
    if why == "safe mode":
        there = replace(there, settings={"cut": "boundary"})
    if why == "other precision":
        heads = [replace(t, dtype="bfloat16") for t in there.device("a").timings if t.part == HEAD]
        layers = [t for t in there.device("a").timings if t.part != HEAD]
        worker = replace(there.device("a"), timings=[*layers, *heads])
        there = replace(there, devices=[there.devices[0], worker])
    assert not chosen_of(there).left.head


def test_only_a_measured_worker_comes_last() -> None:
    """`b` is a little slower, so that it would come first."""
    there = measured_there(cluster(8), 1, "b")
    found = chosen_of(there)
    assert found.left.head
    assert found.workers[-1] == "b"


def test_replicas_with_whole_models_have_it() -> None:
    there = measured_there(cluster(8), 1, *WORKERS, embedding_may_leave=True)
    found = solve(replace(there, batch_size=16)).chosen
    assert found.left.head
    assert all(seat.has_head for seat in found.teams[-1])
    assert check_plan(found.plan(), replace(there, batch_size=16)) == []


@pytest.mark.parametrize(
    "seed", keeping([3, 13], [2, 3, 7, 8, 13, 15, 16, 18, 20, 21, 22, 26, 36, 39])
)
def test_brute_force_finds_nothing_much_better(seed: int) -> None:
    found = compare(seed, heads=True)
    assert found.gap is None or found.gap <= BOUND


def test_the_verdict_names_its_seconds_everywhere_and_the_price_of_evaluations() -> None:
    there = measured_there(cluster(8), 1, *WORKERS)
    found = judge(solve(there, Wishes(replicas=False)))
    said = "\n".join(sentences(found))
    last = found.candidate.workers[-1]
    size = found.candidate.size
    assert f"head and loss of a micro-batch take {8 * size} s on coordinator" in said
    assert f"{last} has them; labels go there, and losses come back; training must not" in said
    assert "an evaluation brings them here, 4.0 MiB a batch and" in said
    assert not [each for each in found.advice if "head is the bottleneck" in each]
    kept = judge(solve(measured_there(cluster(0.1), 8, *WORKERS), Wishes(replicas=False)))
    assert "they stay with the coordinator" in "\n".join(sentences(kept))
    assert "head and loss of" not in "\n".join(sentences(judge(solve(cluster(8)))))


def test_a_script_on_the_worker_takes_the_head_s_seconds_there() -> None:
    one = measured_there(cluster(8, "a"), 1, "a")
    found = fastest_with_script(Search(Costs(one, {}), [1, 2, 4]))
    assert found is not None
    name, alone = found
    assert name == "a"
    # Four samples through six layers of 1.5 seconds, and through the head.
    assert alone.step_seconds == pytest.approx(4 * (6 * 1.5 + 1))
