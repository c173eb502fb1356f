"""The first-batch check's rules; what it finds in training is in `tests/integration`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_hetero.guard.first_batch import Losses, _counts_in, tensors_of

ROUNDING = 1e-5
HALVES = [0.5, 0.5]


@pytest.mark.parametrize(
    ("whole", "cut", "weights", "difference"),
    [
        (2.0, [1.0, 3.0], HALVES, 0.0),
        (2.0, [1.0, 1.0], HALVES, 0.5),
        (4.0, [1.0, 3.0], [1.0, 1.0], 0.0),
        (2.0, [1.0, 5.0], [0.75, 0.25], 0.0),
        (2.0, [2.0, float("nan")], [1.0, 0.0], 0.0),
        (2.0, [2.0, None], [1.0, 0.5], 0.0),
        (2.0, [2.0, float("nan")], HALVES, float("inf")),
        (float("nan"), [float("nan"), 1.0], HALVES, 0.0),
        (float("inf"), [1.0, float("inf")], HALVES, 0.0),
        (None, [None, None], HALVES, 0.0),
        # What cancels has an error relative to what is added up.
        (1e-9, [0.3, -0.3], HALVES, 0.0),
        (1e-8, [3e-8, 2e-8], HALVES, 0.0),
        (1e-4, [1e-4, -1e-4], HALVES, 0.1),
    ],
)
def test_the_difference_is_relative(
    whole: float | None, cut: list[float | None], weights: list[float], difference: float
) -> None:
    losses = Losses(whole, cut, ROUNDING)
    assert losses.difference(weights).found == pytest.approx(difference, abs=2e-5)
    assert losses.fit(weights) == (difference <= ROUNDING)


@pytest.mark.parametrize(
    ("whole", "cut", "skipped"),
    [(None, [None, 1.0], True), (None, [None, None], False), (1.0, [None, 1.0], False)],
)
def test_a_batch_that_is_skipped_only_as_a_whole_is_recognized(
    whole: float | None, cut: list[float | None], skipped: bool
) -> None:
    assert Losses(whole, cut, ROUNDING).skips_only_whole == skipped


@dataclass
class Batch:
    mask: Tensor


def test_tensors_are_named_by_the_code_that_reads_them() -> None:
    one = torch.ones(1)
    found = tensors_of(({"x": one, "y": [one]}, Batch(one), "text"))
    assert list(found) == ["batch[0]['x']", "batch[0]['y'][0]", "batch[1].mask"]
    assert list(tensors_of(one)) == ["batch"]


def test_each_count_that_a_mean_may_use_comes_with_its_code() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    labels = torch.tensor([[1, -100], [-100, -100]])
    token_ids = torch.tensor([[5, 7], [1, 0]])
    whole = {"mask": mask, "labels": labels, "token_ids": token_ids}
    pieces = [{name: tensor[i : i + 1] for name, tensor in whole.items()} for i in range(2)]
    found = dict(_counts_in(pieces))
    assert found == {
        "batch['mask'].sum()": [1.0, 2.0],
        "(batch['labels'] != -100).sum()": [1.0, 0.0],
    }
    for code, counts in found.items():
        assert [float(eval(code, {"batch": piece})) for piece in pieces] == counts  # noqa: S307
