from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric

from lightning_hetero.guard.first_logs import Logged, form_of


def logged(value: float, batch_size: int | None = None) -> Logged:
    found = Logged()
    found.note("value", value, on_epoch=True, batch_size=batch_size)
    return found


@pytest.mark.parametrize(
    ("whole", "cut", "expected"),
    [
        (logged(8.0), logged(2.0), "'value' (8 and 2)"),
        (logged(8.0), logged(8.001), ""),
        (logged(0.0), logged(0.0), ""),
        (logged(1.0, 8), logged(1.0, 32), "the batch size of 'value' (8 and 32)"),
        (logged(1.0, 8), logged(1.0, 8), ""),
        (logged(1.0), Logged(), ""),
    ],
)
def test_what_differs_is_named_with_both_numbers(whole: Logged, cut: Logged, expected: str) -> None:
    assert ", ".join(whole.differing(cut).values()) == expected


def test_what_a_loss_in_bfloat16_may_differ_by_is_rounding() -> None:
    whole, cut = logged(0.176758, 8), logged(0.177734, 32)
    sizes = "the batch size of 'value' (8 and 32)"
    assert whole.differing(cut) == {("log", "value"): f"'value' (0.176758 and 0.177734), {sizes}"}
    assert whole.differing(cut, rounding=0.01) == {("log", "value"): sizes}


def test_a_value_in_bfloat16_is_compared_as_exactly_as_it_is() -> None:
    whole, cut, other = Logged(), Logged(), Logged()
    for each, value in ((whole, 0.176758), (cut, 0.177734), (other, 0.19)):
        each.note("value", torch.tensor(value, dtype=torch.bfloat16))
    assert not whole.differing(cut)
    assert [*whole.differing(other)] == [("log", "value")]


def test_what_a_metric_has_seen_is_compared() -> None:
    metric = MeanMetric()
    whole, cut = Logged(), Logged()
    for each, value in ((whole, 1.0), (cut, 3.0)):
        each.log("mean", metric)
        metric.update(value)  # it may be called again after it was logged
        each.compute_metrics()
    assert whole.differing(cut) == {("log", "mean"): "the metric 'mean' (1 and 2)"}


Pair = namedtuple("Pair", ["first", "second"])  # noqa: PYI024 - as users write it


@pytest.mark.parametrize(
    ("whole", "cut", "expected"),
    [
        ({"n": 8}, {"n": 2.0}, "'n' (8 and 2)"),
        ({"n": 8}, {"n": 8.001}, ""),
        ({"n": torch.tensor(8.0)}, {"n": torch.tensor(2.0)}, "'n' (8 and 2)"),
        ({"a": {"x": torch.ones(5)}}, {"a": {"x": torch.ones(20)}}, "(of shape (5,) and (20,))"),
        ({"x": torch.ones(5)}, {"x": torch.zeros(5)}, ""),
        ({"x": [1, 2]}, {"x": [1, 2, 1, 2]}, "'x' (of length 2 and 4)"),
        ({"x": Pair(1.0, 2.0)}, {"x": Pair(1.0, 3.0)}, "'second' (2 and 3)"),
        ({"x": "text"}, {"x": "other"}, ""),
        ({"x": None}, None, ""),
    ],
)
def test_what_is_returned_otherwise_is_named(whole: Any, cut: Any, expected: str) -> None:
    runs = Logged(), Logged()
    for run, result in zip(runs, (whole, cut), strict=True):
        run.note_result(form_of(result))
    found = ", ".join(runs[0].differing(runs[1]).values())
    assert expected in found
    assert bool(found) == bool(expected)


def test_only_numbers_are_compared() -> None:
    found = Logged()
    found.note("tensor", torch.tensor([2.0]))
    found.note("vector", torch.ones(2))
    found.note("metric", MeanMetric())
    assert {key: shown.value for key, shown in found.found.items()} == {("log", "'tensor'"): 2.0}
    assert not Logged().differing(found)


@pytest.mark.parametrize(("value", "other"), [(1.0, float("nan")), (float("inf"), 1.0)])
def test_a_number_on_one_side_alone_is_a_difference(value: float, other: float) -> None:
    assert [*logged(value).differing(logged(other))] == [("log", "value")]
    assert not logged(other).differing(logged(other))
