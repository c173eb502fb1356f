"""Losses of a step against those alone: what differs, and what ends a run."""

from __future__ import annotations

import math

import pytest

from lightning_hetero.guard.interleaving import LossesAlone

ROUNDING = 1e-6


@pytest.mark.parametrize(
    ("alone", "in_step"),
    [
        ([1.0, 2.0], [1.0, 2.0]),
        ([1.0, 2.0], [1.0 + 5e-7, 2.0]),
        ([1e-10, -1e-10], [-1e-10, 0.0]),
        ([math.nan, None], [math.nan, None]),
        ([math.inf], [math.inf]),
        ([1.0], [1.0, 7.0]),
    ],
    ids=["equal", "rounding", "nothing", "no number", "infinite", "more in the step"],
)
def test_equal_losses_do_not_differ(alone: list[float | None], in_step: list[float | None]) -> None:
    assert LossesAlone(alone, ROUNDING).largest_difference(in_step) is None


@pytest.mark.parametrize(
    ("alone", "in_step", "microbatch", "is_large"),
    [
        ([1.0, 2.0], [1.0, 2.00002], 1, False),
        ([1.0, 2.0], [1.001, 2.001], 0, True),
        ([1.0, None], [1.0, 2.0], 1, True),
        ([1.0, 2.0], [1.0, None], 1, True),
        ([1.0, 2.0], [math.nan, 2.0], 0, True),
        ([1.0, 2.0], [1.0, math.inf], 1, True),
    ],
)
def test_the_worst_micro_batch_is_named(
    alone: list[float | None], in_step: list[float | None], microbatch: int, is_large: bool
) -> None:
    losses = LossesAlone(alone, ROUNDING)
    found = losses.largest_difference(in_step)
    assert found is not None
    assert found.microbatch == microbatch
    assert found.compared.is_large == is_large


def test_a_run_in_half_precision_does_not_end_at_its_rounding() -> None:
    losses = LossesAlone([1.0], 4e-3)
    found = losses.largest_difference([1.01])
    assert found is not None
    assert not found.compared.is_large
    assert str(found) == "1.01 for micro-batch 0, and 1 alone"
