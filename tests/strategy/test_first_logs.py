from __future__ import annotations

import pytest
import torch
from torchmetrics import MeanMetric

from lightning_hetero.strategy.first_logs import Logged, differing


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
    assert ", ".join(differing(whole, cut).values()) == expected


def test_what_a_loss_in_bfloat16_may_differ_by_is_rounding() -> None:
    whole, cut = logged(0.176758, 8), logged(0.177734, 32)
    assert differing(whole, cut) == {
        "value": "'value' (0.176758 and 0.177734), the batch size of 'value' (8 and 32)"
    }
    assert differing(whole, cut, rounding=0.01) == {"value": "the batch size of 'value' (8 and 32)"}


def test_a_value_in_bfloat16_is_compared_as_exactly_as_it_is() -> None:
    whole, cut, other = Logged(), Logged(), Logged()
    for each, value in ((whole, 0.176758), (cut, 0.177734), (other, 0.19)):
        each.note("value", torch.tensor(value, dtype=torch.bfloat16))
    assert not differing(whole, cut)
    assert [*differing(whole, other)] == ["value"]


def test_only_numbers_are_compared() -> None:
    found = Logged()
    found.note("tensor", torch.tensor([2.0]))
    found.note("vector", torch.ones(2))
    found.note("metric", MeanMetric())
    assert found.values == {"tensor": 2.0}
