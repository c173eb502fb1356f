from __future__ import annotations

import pytest
import torch
from torchmetrics import MeanMetric

from lightning_hetero.strategy.first_logs import Logged, differing, in_words


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
    assert in_words(differing(whole, cut), whole, cut) == expected


def test_only_numbers_are_compared() -> None:
    found = Logged()
    found.note("tensor", torch.tensor([2.0]))
    found.note("vector", torch.ones(2))
    found.note("metric", MeanMetric())
    assert found.values == {"tensor": 2.0}
