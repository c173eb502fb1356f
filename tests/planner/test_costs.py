"""Costs between measured sizes, and the dtypes that a stage may have.

Seconds and bytes of stages, against sums done by hand.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec.structs import replace

from lightning_hetero.planner.candidates import Costs
from lightning_hetero.planner.costs import (
    KEPT_FREE,
    BothEnds,
    Cost,
    Holder,
    Left,
    Need,
    allowed_dtypes,
    cost_at,
)
from lightning_hetero.planner.profile import (
    EMBEDDING,
    HEAD,
    VERSION,
    DeviceProfile,
    ModelProfile,
    Part,
    Profile,
    Timing,
)

from .profiles import coordinator, device, ends, model, timing


def measured(*timings: Timing, **others: object) -> DeviceProfile:
    return device("w", 0, 0, timings=list(timings), **others)


TWO_SIZES = measured(
    timing("layer", 1, 10, size=2, saved_bytes=100, peak_bytes=1000),
    timing("layer", 3, 20, size=4, saved_bytes=200, peak_bytes=1600),
)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, Cost(1, 10, 100, 1000)),
        (2, Cost(1, 10, 100, 1000)),
        (3, Cost(2, 15, 150, 1300)),
        (4, Cost(3, 20, 200, 1600)),
        (6, Cost(5, 30, 300, 2200)),
    ],
)
def test_costs_are_linear_between_sizes_and_above_them(size: int, expected: Cost) -> None:
    assert cost_at(TWO_SIZES, "layer", "float32", False, size) == expected


def test_one_measured_size_is_proportional_above_and_constant_below() -> None:
    one = measured(timing("layer", 1, 2, size=4, saved_bytes=8))
    assert cost_at(one, "layer", "float32", False, 8) == Cost(2, 4, 16, 0)
    assert cost_at(one, "layer", "float32", False, 1) == Cost(1, 2, 8, 0)


def test_costs_are_never_negative() -> None:
    odd = measured(timing("layer", 3, 3, size=1), timing("layer", 1, 1, size=2))
    assert cost_at(odd, "layer", "float32", False, 8) == Cost(0, 0, 0, 0)


def test_unmeasured_recomputation_adds_a_forward() -> None:
    derived = cost_at(TWO_SIZES, "layer", "float32", True, 2)
    assert derived == Cost(1, 11, 100, 1000)
    again = timing("layer", 1, 10.5, size=2, recompute=True)
    own = measured(*TWO_SIZES.timings, again)
    assert cost_at(own, "layer", "float32", True, 2) == Cost(1, 10.5, 0, 0)


def test_a_microbatch_too_large_or_unmeasured_has_no_cost() -> None:
    small = measured(*TWO_SIZES.timings, largest_micro_batch=3)
    assert cost_at(small, "layer", "float32", False, 4) is None
    assert cost_at(small, "layer", "float32", True, 4) is None
    assert cost_at(small, "layer", "float32", False, 3) is not None
    assert cost_at(small, "other", "float32", False, 1) is None
    assert cost_at(small, "layer", "float16", False, 1) is None


def in_dtypes(**seconds: float) -> DeviceProfile:
    return measured(*(timing("layer", each, 0, dtype=dtype) for dtype, each in seconds.items()))


@pytest.mark.parametrize(
    ("wanted", "seconds", "expected"),
    [
        ("float16", {"float16": 3, "float32": 5}, ["float16"]),
        ("float16", {"float16": 5, "float32": 3}, ["float16", "float32"]),
        ("float32", {"float16": 1, "float32": 3}, ["float32"]),
        ("bfloat16", {"float16": 1, "float32": 3}, ["float16"]),
        ("bfloat16", {"float16": 4, "float32": 3}, ["float32"]),
        ("bfloat16", {"float16": 1, "bfloat16": 3}, ["bfloat16"]),
        ("bfloat16", {}, []),
    ],
)
def test_which_dtypes_a_stage_may_have(
    wanted: str, seconds: dict[str, float], expected: list[str]
) -> None:
    assert allowed_dtypes(in_dtypes(**seconds), model(1, dtype=wanted), 1) == expected


def test_the_coordinator_computes_in_the_users_precision() -> None:
    own = coordinator([*ends(), timing("layer", 1, 1), timing("layer", 5, 5, dtype="float16")])
    assert allowed_dtypes(own, model(1, dtype="float16"), 1) == ["float16"]
    assert allowed_dtypes(own, model(1, dtype="bfloat16"), 1) == []


def test_a_dtype_in_which_a_kind_is_missing_is_not_faster() -> None:
    half = measured(
        timing("dense", 5, 5, dtype="float16"),
        timing("moe", 5, 5, dtype="float16"),
        timing("dense", 1, 1),
    )
    assert allowed_dtypes(half, model(["dense", "moe"], dtype="float16"), 1) == ["float16"]


LAYERS = ["dense", "moe", "dense"]


def mixed_model(**others: object) -> ModelProfile:
    parts = [
        Part(EMBEDDING, 1000, 10, 20, 40),
        Part(HEAD, 2000, 5, 10, 20),
        Part("dense", 100, 25, 50, 200, {"float16": 60}),
        Part("moe", 400, 0, 0, 0),
    ]
    given = {"activation_bytes_per_sample": 3, "gradient_bytes_per_sample": 2, "parts": parts}
    return model(LAYERS, **(given | others))


TIMINGS = [
    timing("dense", 1, 2, saved_bytes=10, peak_bytes=15),
    timing("moe", 4, 8, saved_bytes=20, peak_bytes=50),
]


def holder(memory_bytes: int = 2**30, **others: object) -> Holder:
    worker = device("w", 0, 0, timings=TIMINGS, memory_bytes=memory_bytes, base_bytes=7, **others)
    return Holder(worker, mixed_model(), size=1)


def costs_with(own: DeviceProfile, **model: object) -> Costs:
    worker = device("w", 0, 0, timings=TIMINGS, base_bytes=7)
    return Costs(Profile(VERSION, mixed_model(**model), [own, worker]), {})


def own_with(own: DeviceProfile, embedding_left: bool = False, **model: object) -> BothEnds:
    return costs_with(own, **model).both_ends(1, Left(embedding_left))


def need_of(own: BothEnds, first: int, end: int, in_flight: int, again: bool = False) -> Need:
    """The need of a coordinator that leaves these layers to the workers."""
    front, behind = (seat.option("float32", again) for seat in (own.front, own.behind))
    return own.need((front, behind), first, end, in_flight)


def test_a_stage_takes_the_sum_of_its_layers() -> None:
    seconds = holder().matrix(in_flight=1)
    assert [seconds[0, 1], seconds[0, 2], seconds[0, 3], seconds[1, 2]] == [3, 15, 18, 12]
    assert np.isinf(seconds[1, 1])
    assert np.isinf(seconds[2, 1])


def test_what_a_stage_without_recomputation_needs() -> None:
    here = holder()
    need = here.need(here.option("float32", False), 0, 2, in_flight=4)
    assert (need.base, need.weights, need.gradients, need.optimizer) == (7, 500, 50, 200)
    assert need.in_flight == 4 * (10 + 20 + 3)
    assert (need.working, need.boundaries) == (50 - 20, 2 * (3 + 2))
    assert need.total == 7 + 500 + 50 + 200 + 132 + 40


def test_a_device_may_have_less_optimizer_state_than_others() -> None:
    """Where a paged state is in main memory."""
    worker, model = device("w", 1, 2), mixed_model()
    kind = model.layers[0]
    own = replace(worker, optimizer_bytes={kind: 1})
    usual, less = (Holder(each, model, 1) for each in (worker, own))
    found = [each.need(each.options[0], 0, 1, in_flight=1) for each in (usual, less)]
    assert [need.optimizer for need in found] == [model.part(kind).optimizer_bytes, 1]
    assert found[0].total - found[1].total == model.part(kind).optimizer_bytes - 1 > 0


def test_what_a_stage_with_recomputation_needs() -> None:
    here = holder()
    need = here.need(here.option("float32", True), 0, 2, in_flight=4)
    # Inputs and outputs wait; one micro-batch's graph is made anew at a time.
    assert need.in_flight == 4 * (3 + 3)
    assert (need.working, need.boundaries) == ((50 - 20) + (10 + 20), 2 * (3 + 2))


def test_two_stages_of_a_process_need_one_action_and_one_framework() -> None:
    here = holder()
    option = here.option("float32", False)
    first, last = (here.need(option, *span, in_flight=4) for span in ((0, 1), (1, 3)))
    both = first + last
    assert both.base == 7
    assert (both.weights, both.in_flight) == (600, first.in_flight + last.in_flight)
    assert (both.working, both.boundaries) == (30, 4 * (3 + 2))


def test_a_stages_own_dtype_may_change_the_size_of_weights() -> None:
    timings = [timing("dense", 1, 2, dtype="float16")]
    here = Holder(device("w", 0, 0, timings=timings), mixed_model(dtype="bfloat16"), size=1)
    assert [option.dtype for option in here.options] == ["float16"] * 3
    assert here.need(here.options[0], 0, 1, in_flight=1).weights == 60


def test_a_kind_that_was_not_measured_cannot_be_there() -> None:
    worker = device("w", 0, 0, timings=TIMINGS[:1])
    seconds = Holder(worker, mixed_model(), size=1).matrix(in_flight=1)
    assert seconds[0, 1] == 3
    assert np.isinf(seconds[0, 2])
    assert Holder(device("w", 0, 0, timings=[]), mixed_model(), 1).speed.most_layers == 0


def test_the_coordinator_also_has_its_ends() -> None:
    own = own_with(ends_with(*TIMINGS), tied_gradient_bytes=30)
    seconds = own.matrix(in_flight=1)
    assert [seconds[0, 3], seconds[1, 3], seconds[3, 3]] == [33, 36, 51]
    assert np.isinf(seconds[2, 1])
    need = need_of(own, 1, 3, in_flight=2)
    assert (need.weights, need.gradients, need.optimizer) == (3100, 80, 260)
    assert need.in_flight == 2 * (10 + 2 * 3 + 5 + 30)
    assert (need.working, need.boundaries) == (900, 2 * (3 + 2))


def test_the_coordinator_recomputes_layer_by_layer() -> None:
    timings = [timing(EMBEDDING, 1, 2), timing(HEAD, 1, 2), *TIMINGS]
    need = need_of(own_with(coordinator(timings)), 3, 3, in_flight=2, again=True)
    assert need.in_flight == 2 * (3 * 3 + 2 * 3)
    assert need.working == 50


def ends_with(*others: Timing) -> DeviceProfile:
    return coordinator(
        [
            timing(EMBEDDING, 1, 2, saved_bytes=5, peak_bytes=6),
            timing(HEAD, 10, 20, saved_bytes=500, peak_bytes=900),
            *others,
        ],
        optimizer_seconds={EMBEDDING: 4, HEAD: 2},
    )


def test_layers_behind_keep_the_graph_of_one_micro_batch() -> None:
    own = own_with(ends_with(*TIMINGS), tied_gradient_bytes=30)
    seconds = own.matrix(in_flight=1)
    assert [seconds[0, 3], seconds[0, 2], seconds[0, 1]] == [33, 36, 48]
    need = need_of(own, 0, 1, in_flight=7)
    assert (need.weights, need.gradients) == (1000 + 2000 + 400 + 100, 20 + 10 + 50)
    # The embedding's output and what comes back wait; the two layers' graph is there once.
    assert need.in_flight == 7 * (2 * 3 + 5 + 30)
    assert need.working == (20 + 10) + 900
    assert need_of(own, 0, 1, in_flight=7, again=True).working == 2 * 3 + 900


def test_layers_at_both_ends_need_what_each_end_needs() -> None:
    own = own_with(ends_with(*TIMINGS), tied_gradient_bytes=30)
    assert own.matrix(in_flight=1)[1, 2] == 33 + 3 + 3
    need = need_of(own, 1, 2, in_flight=7)
    assert (need.weights, need.gradients) == (1000 + 2000 + 2 * 100, 20 + 10 + 2 * 50)
    # In front a graph for each micro-batch in flight, behind one at a time.
    assert need.in_flight == 7 * (10 + 2 * 3 + 5 + 30)
    assert (need.working, need.boundaries) == (10 + 900, 2 * (3 + 2))


def test_the_seat_in_front_recomputes_alone_where_that_is_enough() -> None:
    own = own_with(ends_with(*TIMINGS))
    plain, again = (need_of(own, 2, 2, 50, again=again).total for again in (False, True))
    memory = int(float(again) / (1 - KEPT_FREE)) + 60
    assert memory < float(plain)
    tight = own_with(replace(ends_with(*TIMINGS), memory_bytes=memory))
    assert [option.recompute for option in tight.options_for(2, 2, 50)] == [True, False]


def test_the_matrix_of_the_front_has_the_options_of_both() -> None:
    own = own_with(ends_with(*TIMINGS))
    front = own.front_matrix(in_flight=1)
    assert [front[0, 3], front[1, 3], front[3, 3]] == [3, 6, 21]


def test_without_the_embedding_the_coordinator_has_no_first_layers() -> None:
    own = own_with(ends_with(*TIMINGS), embedding_left=True)
    # The forward before the layers is all but the embedding's.
    assert own.matrix(in_flight=1)[0, 2] == 34
    assert np.isinf(own.matrix(in_flight=1)[1, 2])
    need = need_of(own, 0, 2, in_flight=7)
    assert (need.weights, need.gradients, need.optimizer) == (2100, 60, 220)
    # What comes back waits; nothing that was sent does, and there is one boundary.
    assert need.in_flight == 7 * 3
    assert (need.working, need.boundaries) == (10 + 900, 3 + 2)


def test_a_worker_with_the_embedding_has_its_backward() -> None:
    # It is half as fast as the coordinator, so it takes twice as long for the backward.
    halved = [timing("dense", 0.5, 1), timing("moe", 2, 4)]
    there = costs_with(ends_with(*halved)).holder("w", 1, (EMBEDDING,))
    assert [there.matrix(1)[0, 1], there.matrix(1)[0, 3]] == [3 + 4, 18 + 4]
    assert np.isinf(there.matrix(1)[1, 2])
    assert there.ends[EMBEDDING].optimizer_seconds == 8
    need = there.need(there.option("float32", False), 0, 1, in_flight=7)
    assert (need.weights, need.gradients, need.optimizer) == (1100, 70, 240)
    assert need.in_flight == 7 * (10 + 3 + 5)
    assert (need.working, need.boundaries) == (6, 3 + 2)
    again = there.need(there.option("float32", True), 0, 1, in_flight=7)
    assert again.in_flight == 7 * 3


def test_an_embedding_is_not_held_in_another_dtype() -> None:
    own = ends_with(timing("dense", 1, 2, dtype="float16"))
    half = device("w", 0, 0, timings=[timing("dense", 1, 2, dtype="float16")])
    costs = Costs(Profile(VERSION, mixed_model(), [own, half]), {})
    assert costs.holder("w", 1).speed.most_layers == 1
    assert costs.holder("w", 1, (EMBEDDING,)).speed.most_layers == 0


def test_short_memory_makes_a_stage_recompute() -> None:
    plain = holder()
    most = float(plain.need(plain.option("float32", False), 0, 3, in_flight=9).total)
    roomy, tight = int(most / (1 - KEPT_FREE)) + 1, int((most - 1) / (1 - KEPT_FREE))
    assert not holder(roomy).option_for(0, 3, in_flight=9).recompute
    assert holder(tight).option_for(0, 3, in_flight=9).recompute
    assert holder(tight).matrix(9)[0, 3] == 18 + 6
    assert holder(roomy).matrix(9)[0, 3] == 18


def by_layers(saved_bytes: int, memory_bytes: int = 0) -> Holder:
    """A worker for ten layers with an input of 8 bytes, and 4 bytes more than they save."""
    timings = [timing("layer", 1, 2, saved_bytes=saved_bytes, peak_bytes=saved_bytes + 4)]
    worker = device("w", 0, 0, timings=timings, memory_bytes=memory_bytes)
    return Holder(worker, model(10, activation_bytes_per_sample=8), size=1)


def test_a_stage_that_recomputes_by_layers_keeps_their_inputs_and_one_graph() -> None:
    plain = by_layers(saved_bytes=100)
    stage = plain.need(plain.option("float32", True), 0, 10, in_flight=2)
    layers = plain.need(plain.option("float32", "layers"), 0, 10, in_flight=2)
    # What it sends on is part of what it keeps.
    assert (stage.in_flight, stage.working) == (2 * (8 + 8), 10 * 100 + 4)
    assert (layers.in_flight, layers.working) == (2 * (10 * 8 + 8), 100 + 4)


def test_inputs_are_as_wide_as_the_dtype_of_the_stage() -> None:
    worker = device("w", 0, 0, timings=[timing("layer", 1, 2, saved_bytes=100)])
    half = Holder(worker, model(10, activation_bytes_per_sample=8, dtype="float16"), size=1)
    assert half.need(half.option("float32", "layers"), 0, 10, in_flight=1).in_flight == 160 + 8


@pytest.mark.parametrize(
    ("saved_bytes", "in_flight", "expected"),
    [(100, 2, "layers"), (100, 4, "layers"), (20, 2, "layers"), (16, 2, None), (20, 4, None)],
)
def test_layers_run_again_one_by_one_only_where_the_stage_does_not_fit(
    saved_bytes: int, in_flight: int, expected: str | None
) -> None:
    found = by_layers(saved_bytes)
    needs = {o.recompute: float(found.need(o, 0, 10, in_flight).total) for o in found.options}

    def chosen(memory_bytes: float) -> object:
        memory = math.ceil(memory_bytes / (1 - KEPT_FREE))
        holder = by_layers(saved_bytes, memory)
        matrix = holder.matrix(in_flight)
        if np.isinf(matrix[0, 10]):
            return None
        assert matrix[0, 10] == 10 * (3 + (holder.option_for(0, 10, in_flight).recompute != 0))
        return holder.option_for(0, 10, in_flight).recompute

    assert chosen(needs[False]) is False
    assert chosen(min(needs[False], needs[True])) is (needs[True] < needs[False])
    assert chosen(min(needs.values())) == (expected or needs[True] < needs[False])
    assert (needs["layers"] < needs[True]) == (expected is not None)


def test_more_in_flight_leaves_room_for_fewer_layers() -> None:
    def most_layers(in_flight: int) -> int:
        seconds = holder(900).matrix(in_flight)
        return max(end for end in range(4) if np.isfinite(seconds[0, end]) or end == 0)

    counts = [most_layers(in_flight) for in_flight in (1, 8, 40)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


@pytest.mark.parametrize("in_flight", [1, 3])
def test_one_stage_and_all_stages_use_one_formula(in_flight: int) -> None:
    here, points = holder(), np.arange(4)
    for option in here.options:
        every = here.need(option, points[:, None], points[None, :], in_flight).total
        for first in range(4):
            for end in range(first + 1, 4):
                single = here.need(option, first, end, in_flight).total
                assert np.asarray(every)[first, end] == single
