"""Seconds and bytes of stages, against sums done by hand."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_hetero.planning.holding import KEPT_FREE, Holder
from lightning_hetero.planning.profile import EMBEDDING, HEAD, ModelProfile, Part

from .profiles import coordinator, device, model, timing

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
    assert need.working == (50 - 20) + 2 * (3 + 2)
    assert need.total == 7 + 500 + 50 + 200 + 132 + 40


def test_what_a_stage_with_recomputation_needs() -> None:
    here = holder()
    need = here.need(here.option("float32", True), 0, 2, in_flight=4)
    # Inputs and outputs wait; one micro-batch's graph is made anew at a time.
    assert need.in_flight == 4 * (3 + 3)
    assert need.working == (50 - 20) + (10 + 20) + 2 * (3 + 2)


def test_a_stages_own_dtype_may_store_weights_otherwise() -> None:
    timings = [timing("dense", 1, 2, dtype="float16")]
    here = Holder(device("w", 0, 0, timings=timings), mixed_model(dtype="bfloat16"), size=1)
    assert [option.dtype for option in here.options] == ["float16", "float16"]
    assert here.need(here.options[0], 0, 1, in_flight=1).weights == 60


def test_a_kind_that_was_not_measured_cannot_be_there() -> None:
    worker = device("w", 0, 0, timings=TIMINGS[:1])
    seconds = Holder(worker, mixed_model(), size=1).matrix(in_flight=1)
    assert seconds[0, 1] == 3
    assert np.isinf(seconds[0, 2])
    assert Holder(device("w", 0, 0, timings=[]), mixed_model(), 1).speed.most_layers == 0


def test_the_coordinator_has_its_ends_besides() -> None:
    own = coordinator(
        [
            timing(EMBEDDING, 1, 2, saved_bytes=5, peak_bytes=6),
            timing(HEAD, 10, 20, saved_bytes=500, peak_bytes=900),
            *TIMINGS,
        ]
    )
    here = Holder(own, mixed_model(tied_gradient_bytes=30), size=1)
    seconds = here.matrix(in_flight=1)
    assert [seconds[0, 0], seconds[0, 1]] == [33, 36]
    assert np.isinf(seconds[1, 2])
    need = here.need(here.option("float32", False), 0, 1, in_flight=2)
    assert (need.weights, need.gradients, need.optimizer) == (3100, 80, 260)
    assert need.in_flight == 2 * (10 + 2 * 3 + 5 + 30)
    assert need.working == 900 + 2 * (3 + 2)


def test_the_coordinator_recomputes_layer_by_layer() -> None:
    timings = [timing(EMBEDDING, 1, 2), timing(HEAD, 1, 2), *TIMINGS]
    here = Holder(coordinator(timings), mixed_model(), size=1)
    need = here.need(here.option("float32", True), 0, 3, in_flight=2)
    assert need.in_flight == 2 * (3 * 3 + 2 * 3)
    assert need.working == 50 + 2 * (3 + 2)


def test_recomputation_is_taken_where_memory_asks_for_it() -> None:
    plain = holder()
    most = float(plain.need(plain.option("float32", False), 0, 3, in_flight=9).total)
    roomy, tight = int(most / (1 - KEPT_FREE)) + 1, int((most - 1) / (1 - KEPT_FREE))
    assert not holder(roomy).option_for(0, 3, in_flight=9).recompute
    assert holder(tight).option_for(0, 3, in_flight=9).recompute
    assert holder(tight).matrix(9)[0, 3] == 18 + 6
    assert holder(roomy).matrix(9)[0, 3] == 18


def test_more_in_flight_leaves_room_for_fewer_layers() -> None:
    def most_layers(in_flight: int) -> int:
        seconds = holder(900).matrix(in_flight)
        return max(end for end in range(4) if np.isfinite(seconds[0, end]) or end == 0)

    counts = [most_layers(in_flight) for in_flight in (1, 8, 40)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


@pytest.mark.parametrize("in_flight", [1, 3])
def test_one_stage_and_all_stages_are_reckoned_alike(in_flight: int) -> None:
    here, points = holder(), np.arange(4)
    for option in here.options:
        every = here.need(option, points[:, None], points[None, :], in_flight).total
        for first in range(4):
            for end in range(first + 1, 4):
                single = here.need(option, first, end, in_flight).total
                assert np.asarray(every)[first, end] == single
