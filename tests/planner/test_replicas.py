"""Replicas: fair counts against one micro-batch after the other, exchanges by hand, and candidates
of plans with replicas."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from lightning_hetero.errors import PlanError
from lightning_hetero.pipeline.placement import turns
from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.feasibility import candidate_of, check_plan, with_shares
from lightning_hetero.planner.profile import HEAD, Link, LinkSpeed, Part, Profile
from lightning_hetero.planner.replicas import (
    Team,
    exchange_seconds,
    fair_counts,
    most_in_flight,
    shares_of,
)

from .profiles import GIB, coordinator, device, ends, profile, timing


def end_of(counts: list[int], seconds: list[float], fixed: list[float]) -> float:
    return max(
        f + n * each if n else 0.0 for n, each, f in zip(counts, seconds, fixed, strict=True)
    )


@settings(max_examples=300)
@given(
    st.lists(st.floats(0.1, 9), min_size=1, max_size=5),
    st.integers(0, 30),
    st.floats(0, 60),
)
def test_counts_are_as_fair_as_those_of_one_after_the_other(
    seconds: list[float], count: int, fixed: float
) -> None:
    others = [*[0.0] * (len(seconds) - 1), fixed]
    greedy = [0] * len(seconds)
    for _ in range(count):
        next_ends = [f + (n + 1) * s for n, s, f in zip(greedy, seconds, others, strict=True)]
        greedy[next_ends.index(min(next_ends))] += 1
    found = fair_counts(np.array(seconds), count, np.array(others)).tolist()
    assert sum(found) == count
    assert end_of(found, seconds, others) == pytest.approx(end_of(greedy, seconds, others))


def test_counts_of_many_stages_at_once() -> None:
    seconds = np.array([[1.0, 2.0], [2.0, 2.0], [math.inf, 4.0]])
    assert fair_counts(seconds, 10).tolist() == [[7, 4], [3, 4], [0, 2]]


def test_shares_of_unknown_devices_are_equal() -> None:
    assert shares_of([1.0, math.inf, 1.0], 8, [0, 0, 0]) == [3, 3, 2]


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any),
    st.integers(1, 60),
    st.booleans(),
)
def test_no_replica_has_more_in_flight_than_its_share(
    shares: list[int], started: int, is_hosted: bool
) -> None:
    """Also if the last one is the coordinator, whose turns come last in a round."""
    last = len(shares) - 1 if is_hosted else None
    order = turns(shares, sum(shares), last) * (2 + started // sum(shares))
    for index, share in enumerate(shares):
        found = [Counter(order[n : n + started])[index] for n in range(len(order) - started + 1)]
        others = sum(shares) - (shares[-1] if is_hosted and index != last else 0)
        assert max(found) <= most_in_flight(share, others, started, started)


def link(source: str, target: str, speed: float = 100.0, shared: str | None = None) -> Link:
    return Link(source, target, 0.5, speed, shared)


def test_the_coordinator_adds_up_what_it_holds() -> None:
    """Two workers send 200 bytes each at 100 bytes a second, one after the other, and get them
    back."""
    team = Team(["a", COORDINATOR, "b"], 200)
    assert exchange_seconds([team], link) == 2 * (2 * 2 + 0.5)
    # With a part for each it is as between workers.
    split = Team(team.names, 300, is_split=True)
    assert exchange_seconds([split], link) == exchange_seconds([Team(["a", "b", "c"], 300)], link)


def test_workers_own_equal_parts() -> None:
    """Each of three sends 100 bytes to two others, and receives as much meanwhile."""
    assert exchange_seconds([Team(["a", "b", "c"], 300)], link) == 2 * (2 * 1 + 0.5)
    two = [Team(["a", "b"], 300), Team(["c", "d"], 100)]
    assert exchange_seconds(two, link) == 2 * (1.5 + 0.5)


def test_a_shared_medium_carries_one_thing_at_a_time() -> None:
    def shared(source: str, target: str) -> Link:
        return link(source, target, shared="air")

    assert exchange_seconds([Team(["a", "b", "c"], 300)], shared) == 2 * (6 * 1 + 0.5)


def test_parameters_that_do_not_train_are_not_exchanged() -> None:
    assert exchange_seconds([Team(["a", "b"], 0)], link) == 0


def cluster(gradient_bytes: int = 0, own: float = 1.0, memory: int = GIB) -> Profile:
    """Eight layers; a is twice as fast as b and as the coordinator, whose head takes 3 seconds."""
    layer = Part("layer", 100, 25, gradient_bytes, 2 * gradient_bytes)
    timings = [*ends(), *device("x", own, 2 * own).timings]
    timings = [t for t in timings if t.part != HEAD]
    timings += [timing(HEAD, 1.0, 2.0, size, peak_bytes=1000) for size in (1, 64)]
    workers = [device("a", 0.5, 1.0, memory_bytes=memory), device("b", 1.0, 2.0)]
    steps = {"optimizer_seconds": {"layer": 1.0}}
    return profile(
        8,
        [changed(worker, **steps) for worker in workers],
        coordinator(timings, **steps),
        model_options={"parts": [layer, Part(HEAD, 0), Part("embedding", 0)]},
        batch_size=16,
        default_link=LinkSpeed(0, 100),
    )


def replicated(workers: list[str], shares: list[int] | None = None, **others: object) -> Plan:
    return Plan([StagePlan(workers, (0, 8), shares=shares, **others)], micro_batches=16)  # type: ignore[arg-type]


def test_shares_are_those_of_the_measured_speeds() -> None:
    found = candidate_of(replicated(["a", "b"]), cluster())
    # A micro-batch takes a 12 seconds and b 24.
    assert found.plan().stages[0].shares == [11, 5]
    assert found.process_seconds == {COORDINATOR: 3, "a": 11 * 12 / 16, "b": 5 * 24 / 16}


def test_the_coordinators_share_leaves_time_for_its_other_work() -> None:
    found = candidate_of(replicated(["b", COORDINATOR]), cluster())
    # It has 48 seconds of head and loss, and 24 for each micro-batch, as b does.
    assert found.plan().stages[0].shares == [9, 7]
    assert found.process_seconds == {COORDINATOR: 3 + 7 * 24 / 16, "b": 9 * 24 / 16}
    assert with_shares(replicated(["b", COORDINATOR]), cluster()).stages[0].shares == [9, 7]
    given_shares = replicated(["b", COORDINATOR], [1, 3])
    assert with_shares(given_shares, cluster()) == given_shares
    assert candidate_of(given_shares, cluster()).plan() == given_shares_of(given_shares)


def given_shares_of(plan: Plan) -> Plan:
    return Plan(plan.stages, plan.micro_batches, plan.max_in_flight)


def test_the_step_has_the_exchange_and_one_optimizer() -> None:
    """800 bytes of gradients go to the coordinator at 100 a second, and as many weights back."""
    there = candidate_of(replicated(["b", COORDINATOR], [9, 7]), cluster(gradient_bytes=100))
    free = candidate_of(replicated(["b", COORDINATOR], [9, 7]), cluster())
    assert there.exchange_seconds == 8 + 8
    assert there.step_seconds == free.step_seconds + 16
    steps = [times.optimizer_seconds for times in there.pipeline.stages]
    assert there.pipeline.sums(steps) == [8, 0]


@pytest.mark.parametrize(("optimizer", "seconds"), [(None, 8), ("each", 8), ("split", 4)])
def test_workers_step_all_parameters_or_a_part(optimizer: str | None, seconds: float) -> None:
    found = candidate_of(replicated(["a", "b"], [2, 1], optimizer=optimizer), cluster())
    steps = [times.optimizer_seconds for times in found.pipeline.stages]
    assert found.pipeline.sums(steps) == [0, seconds, seconds]
    assert found.plan().stages[0].optimizer == ("split" if optimizer == "split" else None)


def test_memory_of_each_replica() -> None:
    """Weights and gradients everywhere, optimizer state where the stage is stepped."""
    profile = cluster(gradient_bytes=100)
    hosted = candidate_of(replicated(["b", COORDINATOR], [9, 7]), profile)
    own, its = hosted.need(COORDINATOR), hosted.need("b")
    assert (own.weights, own.gradients, own.optimizer) == (800, 800, 1600)
    assert (its.weights, its.gradients, its.optimizer) == (800, 800, 0)
    plan = replicated(["b", COORDINATOR], [9, 7], optimizer="split")
    parts = candidate_of(plan, profile)
    assert parts.need(COORDINATOR).optimizer == parts.need("b").optimizer == 800
    # Room for the gradients of a worker.
    assert own.working >= 800
    # Each of its own micro-batches keeps the logits until it is its loss's turn.
    in_flight = most_in_flight(7, 16, hosted.max_started, hosted.in_flight)
    assert own.in_flight >= in_flight * 1000
    split = candidate_of(replicated(["a", "b"], [2, 1], optimizer="split"), profile)
    assert split.need("a").optimizer == 800
    each = candidate_of(replicated(["a", "b"], [2, 1]), profile)
    assert each.need("a").optimizer == 1600


def test_a_replica_that_lacks_memory_is_named() -> None:
    profile = cluster(gradient_bytes=100, memory=2000)
    (fault,) = check_plan(replicated(["a", "b"], [2, 1]), profile)
    assert fault.startswith("does not fit: `a` is")
    assert check_plan(replicated(["a", "b"], [2, 1]), cluster()) == []


def test_a_hosted_stage_cannot_have_a_part_of_each_optimizer() -> None:
    with pytest.raises(PlanError, match="steps all parameters"):
        candidate_of(replicated(["a", COORDINATOR], optimizer="each"), cluster())


SHAPES = [
    Plan([StagePlan(["a", "b"], (0, 8), shares=[2, 1])], 16),
    Plan([StagePlan(["a", "b", COORDINATOR], (0, 8), shares=[8, 4, 4])], 16),
    Plan([StagePlan(["a", COORDINATOR], (0, 6), shares=[2, 1]), StagePlan(["b"], (6, 8))], 16),
    Plan([StagePlan(["a", "b", COORDINATOR], (0, 8), shares=[8, 4, 4], optimizer="split")], 16),
    Plan([StagePlan(["a"], (0, 4)), StagePlan(["b", COORDINATOR], (4, 8), shares=[1, 1])], 16),
    Plan(
        [
            StagePlan([COORDINATOR], (0, 1)),
            StagePlan(["a", "b"], (1, 7), shares=[2, 1]),
            StagePlan([COORDINATOR], (7, 8)),
        ],
        16,
    ),
    Plan([StagePlan(["a", "b"], (0, 4), shares=[3, 1]), StagePlan(["a"], (4, 8))], 16, 16),
]


@pytest.mark.parametrize("plan", SHAPES)
def test_a_plan_is_predicted_and_comes_back(plan: Plan) -> None:
    found = candidate_of(plan, cluster(gradient_bytes=10))
    assert found.plan().stages == plan.stages
    assert found.step_seconds >= found.least_seconds > 0
    played = found.simulation
    for process, name in enumerate(found.processes):
        seats = [seat for seat in found.seats_of(name) if seat.part is not None]
        if process and seats and len(found.seats_of(name)) == 1:
            part = seats[0].part
            assert part is not None
            most = most_in_flight(part.share, part.total, found.max_started, found.in_flight)
            assert played.peak_in_flight[process] <= most
    spans = sorted(played.spans, key=lambda span: span.start_seconds)
    assert all(one.start_seconds <= other.start_seconds for one, other in pairwise(spans))
    media = found.busy_seconds_of_media
    assert all(busy * 16 <= found.step_seconds * (1 + 1e-9) for busy in media.values())
