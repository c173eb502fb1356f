"""Costs between measured sizes, and the dtypes that a stage may have."""

from __future__ import annotations

import pytest

from lightning_hetero.planning.costs import Cost, allowed_dtypes, cost_at
from lightning_hetero.planning.profile import DeviceProfile, Timing

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
def test_costs_go_straight_between_sizes_and_on_above_them(size: int, expected: Cost) -> None:
    assert cost_at(TWO_SIZES, "layer", "float32", False, size) == expected


def test_one_size_is_taken_in_proportion_above_and_as_it_is_below() -> None:
    one = measured(timing("layer", 1, 2, size=4, saved_bytes=8))
    assert cost_at(one, "layer", "float32", False, 8) == Cost(2, 4, 16, 0)
    assert cost_at(one, "layer", "float32", False, 1) == Cost(1, 2, 8, 0)


def test_what_falls_with_size_never_falls_below_nothing() -> None:
    odd = measured(timing("layer", 3, 3, size=1), timing("layer", 1, 1, size=2))
    assert cost_at(odd, "layer", "float32", False, 8) == Cost(0, 0, 0, 0)


def test_recomputation_is_the_measured_one_or_a_forward_more() -> None:
    derived = cost_at(TWO_SIZES, "layer", "float32", True, 2)
    assert derived == Cost(1, 11, 100, 1000)
    again = timing("layer", 1, 10.5, size=2, recompute=True)
    own = measured(*TWO_SIZES.timings, again)
    assert cost_at(own, "layer", "float32", True, 2) == Cost(1, 10.5, 0, 0)


def test_above_the_largest_that_fits_and_for_the_unmeasured_there_is_no_cost() -> None:
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


def test_the_coordinator_keeps_to_the_users_precision() -> None:
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
