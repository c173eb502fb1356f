"""Candidates: the plan that they are, the pipeline that they play, and how many are in flight."""

from __future__ import annotations

import pytest

from lightning_hetero.plan import COORDINATOR, StagePlan
from lightning_hetero.planner.candidates import Arrangement, Costs, Form, place_last
from lightning_hetero.planner.profile import EMBEDDING, HEAD, Link, Part, Profile
from lightning_hetero.planner.simulation import Hop, StageTimes

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


def test_the_pipeline_has_every_measured_time() -> None:
    candidate = Arrangement(costs(), ["fast", "old"], 4).with_ranges([(0, 1), (1, 3), (3, 4)], 3)
    played = candidate.pipeline
    assert played.stages[0] == StageTimes(101, 202, 12)
    assert played.stages[1] == StageTimes(20, 40, 4)
    assert played.loss_seconds == 12
    assert played.forward_hops[1] == Hop("card", 2, 0.5)
    assert played.backward_hops[2] == Hop("old to fast", 0.5, 0.25)
    assert played.forward_hops[2].medium == f"old to {COORDINATOR}"
    assert played.backward_hops[0].medium == f"{COORDINATOR} to old"


def test_a_candidate_is_a_plan() -> None:
    candidate = Arrangement(costs(), ["fast", "old"], 4).with_ranges([(0, 0), (0, 3), (3, 4)], 3)
    plan = candidate.plan()
    # The device that was measured in float16 alone has to be told so.
    assert plan.stages == [
        StagePlan(["fast"], (0, 3)),
        StagePlan(["old"], (3, 4), dtype="float16"),
    ]
    assert (plan.micro_batches, plan.max_in_flight) == (4, 3)


def test_a_last_coordinator_runs_its_layers_with_the_loss() -> None:
    ranges = [(3, 4), (0, 2), (2, 3)]
    last = Arrangement(costs(), ["fast", "old"], 4, Form.LAST).with_ranges(ranges, 3)
    assert last.pipeline.stages[:2] == [StageTimes(1, 2, 12), StageTimes(20, 40, 4)]
    assert last.pipeline.loss_seconds == 12 + 300
    assert last.pipeline.starts_first
    assert last.bottleneck_seconds == 3 + 312
    assert [stage.worker for stage in last.plan().stages] == ["fast", "old", COORDINATOR]


def test_a_line_sends_token_ids_and_gets_no_gradient() -> None:
    ranges = [(3, 4), (0, 2), (2, 3)]
    ring, line = (
        Arrangement(costs(), ["fast", "old"], 4, form).with_ranges(ranges, 3)
        for form in (Form.LAST, Form.LINE)
    )
    # The start stays. The worker is ten times as fast, so the rest takes it a tenth.
    assert line.pipeline.stages[:2] == [StageTimes(1, 0, 7), StageTimes(20, 40.2, 4.5)]
    assert line.pipeline.forward_hops[1:] == ring.pipeline.forward_hops[1:]
    assert line.pipeline.forward_hops[0].busy_seconds == pytest.approx(
        ring.pipeline.forward_hops[0].busy_seconds * 8 / 20
    )
    assert line.pipeline.backward_hops[1] == Hop(f"fast to {COORDINATOR}", 0)
    assert line.pipeline.backward_hops[::2] == ring.pipeline.backward_hops[::2]
    assert line.plan().stages[0] == StagePlan(["fast"], (0, 2), embedding=True)


@pytest.mark.parametrize(
    ("own", "form"), [((0, 1), Form.FIRST), ((0, 0), Form.FIRST), ((4, 4), Form.LINE)]
)
def test_it_starts_as_the_runtime_does(own: tuple[int, int], form: Form) -> None:
    ranges = [own, (own[1] % 4, 4)]
    candidate = Arrangement(costs(), ["fast"], 4, form).with_ranges(ranges, 3)
    assert candidate.pipeline.starts_first == candidate.plan().starts_on_worker
    assert candidate.pipeline.limit(0) == candidate.plan().max_started


@pytest.mark.parametrize(
    ("may_leave", "mbits", "form"),
    [(True, 0.1, Form.LINE), (False, 0.1, Form.LAST), (True, 1e9, Form.LAST)],
)
def test_the_embedding_leaves_where_the_links_gain_more_than_the_worker_loses(
    may_leave: bool, mbits: float, form: Form
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
    assert place_last(Costs(given, {}), ["w"], 8)[-1].form is form


@pytest.mark.parametrize(("pieces", "size"), [(1, 10), (3, 4), (4, 3), (10, 1)])
def test_costs_are_those_of_the_largest_microbatch(pieces: int, size: int) -> None:
    assert Costs(profile(1, [], batch_size=10), {}).size(pieces) == size


def with_memory(memory_bytes: int, saved_bytes: int) -> Costs:
    timings = [timing("layer", 1, 2, saved_bytes=saved_bytes)]
    worker = device("w", 0, 0, timings=timings, memory_bytes=memory_bytes)
    return Costs(profile(4, [worker], batch_size=16), {})


def test_enough_memory_allows_two_in_flight_per_process() -> None:
    assert [c.in_flight for c in Arrangement(with_memory(GIB, 1), ["w"], 16).place()] == [4]


def test_little_memory_tries_fewer_in_flight_and_recomputation() -> None:
    placed = Arrangement(with_memory(2000, 200), ["w"], 16).place()
    # Four in flight keep 3200 bytes, two 1600.
    assert [(c.in_flight, c.options[1].recompute) for c in placed] == [(4, True), (2, False)]


def test_layers_that_fit_nowhere_are_not_placed() -> None:
    assert Arrangement(with_memory(100, 200), ["w"], 16).place() == []


def test_a_pinned_device_holds_its_layers_or_none() -> None:
    workers = [device("a", 1, 1), device("b", 1, 1)]
    pinned = Costs(profile(6, workers, batch_size=1), {"b": (1, 2)})
    assert Arrangement(pinned, ["b", "a"], 1).place() == []
    (candidate,) = Arrangement(
        Costs(profile(6, workers, batch_size=1), {"b": (4, 6)}), ["a", "b"], 1
    ).place()
    assert candidate.ranges == [(0, 0), (0, 4), (4, 6)]


@pytest.mark.parametrize(("link_seconds", "layers"), [(0.1, [6, 4]), (1000, [9, 1])])
def test_a_slow_link_leaves_only_the_sum_to_minimize(
    link_seconds: float, layers: list[int]
) -> None:
    thin = profile(
        10,
        [device("a", 0.5, 0.5), device("b", 0.75, 0.75)],
        links=[Link("a", "b", 0, 1 / link_seconds)],
        model_options={"activation_bytes_per_sample": 1},
        batch_size=1,
    )
    candidate = Arrangement(Costs(thin, {}), ["a", "b"], 1).place()[0]
    assert [end - first for first, end in candidate.ranges[1:]] == layers


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
    (candidate,) = Arrangement(Costs(mixed, {}), ["w"], 1).place()
    assert candidate.need(1).weights == 5
    assert candidate.pipeline.stages[1] == StageTimes(11, 11)
