"""Candidates: the plan that they are, the pipeline that they play, and how many are in flight.

The exact splits of several orders at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest

from lightning_hetero.pipeline.rule import starts_first_with
from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.arrangements import Arrangement, place, place_at, place_in
from lightning_hetero.planner.candidates import Candidate, Costs
from lightning_hetero.planner.costs import Left
from lightning_hetero.planner.feasibility import candidate_of
from lightning_hetero.planner.profile import EMBEDDING, HEAD, Link, Part, Profile
from lightning_hetero.planner.replica_teams import Tables
from lightning_hetero.planner.search import Search
from lightning_hetero.planner.step_model import Hop, StageTimes

from .profiles import GIB, coordinator, device, ends, profile, timing


def cluster() -> Profile:
    own = coordinator(
        [timing(EMBEDDING, 1, 2), timing(HEAD, 4, 8), timing("layer", 100, 200)],
        optimizer_seconds={EMBEDDING: 5, HEAD: 6, "layer": 1},
    )
    fast = device("fast", 10, 20, optimizer_seconds={"layer": 2})
    half = [timing("layer", 1, 1, dtype="float16")]
    return profile(
        4,
        [fast, device("old", 0, 0, timings=half)],
        own,
        [Link("fast", "old", 0.5, 10, "card"), Link("old", "fast", 0.25, 100)],
        {"activation_bytes_per_sample": 20, "gradient_bytes_per_sample": 50},
        batch_size=4,
    )


def costs() -> Costs:
    return Costs(cluster(), {})


def line(of: Costs, workers: Sequence[str], pieces: int, left: bool = False) -> Arrangement:
    return Arrangement.line(Tables(of), workers, pieces, Left(left))


def way(*workers: str, pieces: int = 4, left: bool = False) -> Arrangement:
    return line(costs(), workers, pieces, left)


def test_the_pipeline_has_every_measured_time() -> None:
    ranges = [(0, 1), (1, 3), (3, 4), (4, 4)]
    candidate = way("fast", "old").with_ranges(ranges, 3)
    played = candidate.pipeline
    assert played.stages[0] == StageTimes(101, 202, 12)
    assert played.stages[1] == StageTimes(20, 40, 4)
    assert played.loss_seconds == 12
    assert played.forward_hops[1] == Hop("card", 2, 0.5)
    assert played.backward_hops[2] == Hop("old to fast", 0.5, 0.25)
    assert played.forward_hops[2].medium == f"old to {COORDINATOR}"
    assert played.backward_hops[0].medium == f"{COORDINATOR} to old"


def test_a_candidate_is_a_plan() -> None:
    candidate = way("fast", "old").with_ranges([(0, 0), (0, 3), (3, 4), (4, 4)], 3)
    plan = candidate.plan()
    # The device that was measured in float16 alone has to be told so.
    assert plan.stages == [
        StagePlan(["fast"], (0, 3)),
        StagePlan(["old"], (3, 4), dtype="float16"),
    ]
    assert (plan.micro_batches, plan.max_in_flight) == (4, 3)


def test_a_coordinator_runs_its_last_layers_with_the_loss() -> None:
    last = way("fast", "old").with_ranges([(0, 0), (0, 2), (2, 3), (3, 4)], 3)
    assert last.pipeline.stages[:2] == [StageTimes(1, 2, 12), StageTimes(20, 40, 4)]
    assert last.pipeline.loss_seconds == 12 + 300
    assert last.pipeline.starts_first
    assert last.bottleneck_seconds == 3 + 312
    assert [stage.worker for stage in last.plan().stages] == ["fast", "old", COORDINATOR]


def test_a_coordinator_may_have_layers_at_both_ends() -> None:
    both = way("fast").with_ranges([(0, 1), (1, 3), (3, 4)], 3)
    assert both.pipeline.stages == [StageTimes(101, 202, 5 + 6 + 2), StageTimes(20, 40, 4)]
    assert both.pipeline.loss_seconds == 12 + 300
    assert both.pipeline.starts_first
    assert both.process_seconds == {COORDINATOR: 303 + 312, "fast": 60}
    assert [(stage.worker, stage.layers) for stage in both.plan().stages] == [
        (COORDINATOR, (0, 1)),
        ("fast", (1, 3)),
        (COORDINATOR, (3, 4)),
    ]


def test_a_worker_with_the_embedding_gets_token_ids_and_sends_no_gradient() -> None:
    ranges = [(0, 0), (0, 2), (2, 3), (3, 4)]
    ring, line = (way("fast", "old", left=left).with_ranges(ranges, 3) for left in (False, True))
    # The start stays. The worker is ten times as fast, so the rest takes it a tenth.
    assert line.pipeline.stages[:2] == [StageTimes(1, 0, 7), StageTimes(20, 40.2, 4.5)]
    assert line.pipeline.forward_hops[1:] == ring.pipeline.forward_hops[1:]
    assert line.pipeline.forward_hops[0].busy_seconds == pytest.approx(
        ring.pipeline.forward_hops[0].busy_seconds * 8 / 20
    )
    assert line.pipeline.backward_hops[1] == Hop(f"fast to {COORDINATOR}", 0)
    assert line.pipeline.backward_hops[::2] == ring.pipeline.backward_hops[::2]
    assert line.plan().stages[0] == StagePlan(["fast"], (0, 2), embedding=True)


def alternating(*names: str, **others: int) -> Candidate:
    """A plan with a layer for each name in turn."""
    stages = [StagePlan([name], (index, index + 1)) for index, name in enumerate(names)]
    workers = [device("a", 10, 20), device("b", 1, 2)]
    sizes = {"activation_bytes_per_sample": 20, "gradient_bytes_per_sample": 50}
    own = coordinator([timing("layer", 1, 2), *ends(1, 2)])
    given = profile(len(names), workers, own, (), sizes, batch_size=4)
    return candidate_of(Plan(stages, 4, **others), given)


def test_a_worker_with_several_stages_is_one_process() -> None:
    candidate = alternating("a", "b", "b", "a", in_flight=2)
    assert candidate.workers == ("a", "b")
    assert list(candidate.pipeline.processes) == [0, 1, 2, 2, 1]
    assert candidate.process_seconds == {COORDINATOR: 6, "a": 60, "b": 6}
    assert candidate.need("a").in_flight == sum(
        candidate.holder(seat).need(seat.option, *seat.layers, 2).in_flight
        for seat in candidate.seats_of("a")
    )
    # Nothing travels between the two stages of b, so no medium is busy for it.
    assert all(hop.busy_seconds == 0 for hop in candidate.pipeline.forward_hops[2:3])
    assert set(candidate.busy_seconds_of_media) == {
        f"{one} to {other}" for one, other in ("ab", "ba", (COORDINATOR, "a"), ("a", COORDINATOR))
    }
    assert [stage.worker for stage in candidate.plan().stages] == ["a", "b", "b", "a"]
    assert candidate.step_seconds >= 4 * 60


@pytest.mark.parametrize(
    ("front", "behind", "left"),
    [(1, 0, False), (0, 0, False), (0, 0, True), (1, 1, False), (2, 1, False)],
)
def test_it_starts_as_the_runtime_does(front: int, behind: int, left: bool) -> None:
    ranges = [(0, front), (front, 4 - behind), (4 - behind, 4)]
    candidate = way("fast", left=left).with_ranges(ranges, 3)
    assert candidate.pipeline.starts_first == starts_first_with(*candidate.plan().own_counts)
    assert candidate.pipeline.limit(0) == candidate.plan().max_started


def test_a_simulation_may_end_early_but_its_answer_is_the_same() -> None:
    ranges = [(0, 1), (1, 3), (3, 4), (4, 4)]
    seconds = way("fast", "old").with_ranges(ranges, 3).step_seconds
    tried = way("fast", "old").with_ranges(ranges, 3)
    assert not tried.is_below(seconds / 2)
    assert not tried.is_below(seconds)
    assert tried.is_below(seconds * (1 + 1e-9))
    assert tried.step_seconds == seconds


@pytest.mark.parametrize(
    ("may_leave", "mbits", "leaves"),
    [(True, 0.1, True), (False, 0.1, False), (True, 1e9, False)],
)
def test_the_embedding_leaves_where_the_links_gain_more_than_the_worker_loses(
    may_leave: bool, mbits: float, leaves: bool
) -> None:
    own = coordinator([*device("", 1, 2).timings, *ends(1, 2)])
    crossing = {f"{what}_bytes_per_sample": 10**6 for what in ("activation", "gradient")}
    model = {**crossing, "embedding_may_leave": may_leave}
    given = profile(
        4,
        [device("w", 4, 8)],
        own,
        [Link(COORDINATOR, "w", 0, mbits * 1e5), Link("w", COORDINATOR, 0, mbits * 1e5)],
        model,
        batch_size=8,
    )
    found = Search(Costs(given, {}), [8]).best_with(["w"])
    assert found is not None
    assert found.left.embedding is leaves


@pytest.mark.parametrize(("pieces", "size"), [(1, 10), (3, 4), (4, 3), (10, 1)])
def test_costs_are_those_of_the_largest_microbatch(pieces: int, size: int) -> None:
    assert Costs(profile(1, [], batch_size=10), {}).size(pieces) == size


def with_memory(memory_bytes: int, saved_bytes: int) -> Costs:
    timings = [timing("layer", 1, 2, saved_bytes=saved_bytes)]
    worker = device("w", 0, 0, timings=timings, memory_bytes=memory_bytes)
    return Costs(profile(4, [worker], batch_size=16), {})


def test_enough_memory_allows_two_in_flight_per_process() -> None:
    assert [c.in_flight for c in place_in([line(with_memory(GIB, 1), ["w"], 16)], None)] == [4]


def test_little_memory_tries_fewer_in_flight_and_recomputation() -> None:
    placed = place_in([line(with_memory(2000, 200), ["w"], 16)], None)
    # Four in flight keep 3200 bytes, two 1600.
    assert [(c.in_flight, c.seats[1].option.recompute) for c in placed] == [(4, True), (2, False)]


def test_layers_that_fit_nowhere_are_not_placed() -> None:
    assert place(line(with_memory(100, 200), ["w"], 16)) == []


def test_a_pinned_device_holds_its_layers_or_none() -> None:
    workers = [device("a", 1, 1), device("b", 1, 1)]
    pinned = Costs(profile(6, workers, batch_size=1), {"b": (1, 2)})
    assert place_in([line(pinned, ["b", "a"], 1)], None) == []
    pinned = Costs(profile(6, workers, batch_size=1), {"b": (4, 6)})
    (candidate,) = place_in([line(pinned, ["a", "b"], 1)], None)
    assert candidate.ranges == [(0, 0), (0, 4), (4, 6), (6, 6)]


@pytest.mark.parametrize("front", [0, 1, 2, None])
def test_the_coordinator_has_as_many_layers_in_front_as_asked(front: int | None) -> None:
    own = coordinator([*device("", 1, 2).timings, *ends(0.5, 1)])
    of = Costs(profile(9, [device("w", 1, 2)], own, batch_size=4), {})
    (candidate,) = place_at(line(of, ["w"], 4), 4, front)
    before, between, behind = candidate.seats
    assert before.num_layers == (4 if front is None else front)
    # The ends take as long as a layer.
    assert (between.num_layers, before.num_layers + behind.num_layers) == (5, 4)


def test_orders_at_once_are_split_as_one_by_one() -> None:
    workers = [device(name, 1 + number, 2) for number, name in enumerate("abc")]
    links = [Link("a", "b", 3, 1), Link("b", COORDINATOR, 1, 5)]
    sizes = {"activation_bytes_per_sample": 4, "gradient_bytes_per_sample": 2}
    own = coordinator([*device("", 3, 3).timings, *ends(1, 1)])
    of = Costs(profile(9, workers, own, links, sizes, batch_size=8), {})
    ways = [line(of, order, 8) for order in permutations("abc")]
    for front in (None, 0, 1):
        at_once = place_in(ways, front)
        one_by_one = [candidate for each in ways for candidate in place_in([each], front)]
        assert len(at_once) == 6
        assert {c.identity for c in at_once} == {c.identity for c in one_by_one}


@pytest.mark.parametrize("link_seconds", [0.1, 1000])
def test_with_one_micro_batch_the_sum_is_minimized_over_any_link(link_seconds: float) -> None:
    thin = profile(
        10,
        [device("a", 0.5, 0.5), device("b", 0.75, 0.75)],
        links=[Link("a", "b", 0, 1 / link_seconds)],
        model_options={"activation_bytes_per_sample": 1},
        batch_size=1,
    )
    candidate = place_in([line(Costs(thin, {}), ["a", "b"], 1)], None)[0]
    assert [seat.num_layers for seat in candidate.seats[1:-1]] == [9, 1]


def test_devices_with_equal_measurements_share_their_holder() -> None:
    alike = Costs(profile(2, [device("a", 1, 1), device("b", 1, 1)], batch_size=1), {})
    assert alike.holder("a", 1) is alike.holder("b", 1)
    assert alike.holder("a", 1) is not alike.holder("a", 2)


def test_kinds_of_layers_have_parts_of_their_own() -> None:
    parts = [Part(EMBEDDING, 0), Part(HEAD, 0), Part("dense", 1), Part("moe", 2)]
    timings = [timing("dense", 1, 1), timing("moe", 5, 5)]
    mixed = profile(
        ["dense", "moe", "moe"],
        [device("w", 0, 0, timings=timings)],
        coordinator(ends()),
        model_options={"parts": parts},
        batch_size=1,
    )
    (candidate,) = place_in([line(Costs(mixed, {}), ["w"], 1)], None)
    assert candidate.need("w").weights == 5
    assert candidate.pipeline.stages[1] == StageTimes(11, 11)
