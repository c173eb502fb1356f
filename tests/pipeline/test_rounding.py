"""How far apart rounding may bring two results."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_hetero.pipeline.rounding import (
    coarsest,
    norm_error,
    rounding_of_hidden,
    rounding_of_loss,
)

INFINITE, UNDEFINED = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([INFINITE, 4.0], [INFINITE, 4.0], 0.0),
        ([UNDEFINED, 4.0], [UNDEFINED, 4.0], 0.0),
        ([UNDEFINED, 4.0], [3.0, 4.0], math.inf),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_errors_are_relative_to_the_norm(
    found: list[float], expected: list[float], error: float
) -> None:
    assert norm_error(torch.tensor(found), torch.tensor(expected)) == pytest.approx(error)


def test_the_coarsest_dtype_rounds_most() -> None:
    assert coarsest([torch.float32, torch.bfloat16, torch.float16]) == torch.bfloat16
    assert coarsest([torch.uint8]) == torch.float32


def test_more_layers_and_coarser_numbers_round_more() -> None:
    fine = rounding_of_hidden(torch.float32, 4, 1024)
    assert fine < rounding_of_hidden(torch.float32, 16, 1024) < 1e-3
    assert rounding_of_hidden(torch.bfloat16, 32, 4096) < 0.1
    assert rounding_of_loss(torch.float32, 4096) < 1e-4 < rounding_of_loss(torch.bfloat16, 16)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_products_of_fewer_rows_are_within_it(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(64, 64, generator=generator)
    hidden = torch.randn(8, 64, generator=generator)
    whole = hidden @ matrix
    cut = torch.cat([piece @ matrix for piece in hidden.split(rows)])
    assert norm_error(cut, whole) <= rounding_of_hidden(torch.float32, 1, 64)
