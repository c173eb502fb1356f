"""Relative errors, how much of them rounding explains, and the verdict."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lightning_hetero.errors import BatchError, ModelError
from lightning_hetero.pipeline import tolerance
from lightning_hetero.pipeline.tolerance import (
    GO_ON,
    LOSS,
    Comparison,
    RehearsalVerdict,
    Rounding,
    Rule,
    Worst,
    coarsest,
    end_or_warn,
    loss_error,
    norm_error,
    number_error,
    relative_error,
    worst_gradient,
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
    fine = Rounding(torch.float32, 1024)
    assert fine.of_hidden(4) < fine.of_hidden(16) < 1e-3
    assert Rounding(torch.bfloat16, 4096).of_hidden(32) < 0.1
    assert Rounding(torch.float32, 4096).of_loss < 1e-4 < Rounding(torch.bfloat16, 16).of_loss


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_products_of_fewer_rows_are_within_the_tolerance(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(64, 64, generator=generator)
    hidden = torch.randn(8, 64, generator=generator)
    whole = hidden @ matrix
    cut = torch.cat([piece @ matrix for piece in hidden.split(rows)])
    assert norm_error(cut, whole) <= Rounding(torch.float32, 64).of_hidden(1)


RIGHT = Comparison("a:1", (0, 2), 0.0, 1e-7, None, Worst(1e-7, "layer 0: w"), 1e-5)


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([1.0, math.inf], [1.0, math.inf], 0.0),
        ([1.0, math.inf], [1.0, 2.0], math.inf),
        ([1.0], [1.0, 2.0], math.inf),
        ([0.0], [0.0], 0.0),
        ([1e-9], [0.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_the_largest_difference_counts(
    found: list[float], expected: list[float], error: float
) -> None:
    assert relative_error(torch.tensor(found), torch.tensor(expected)) == pytest.approx(error)


def test_a_gradient_that_is_zero_but_for_rounding_is_held_against_its_layer() -> None:
    expected = {"q": torch.tensor([1.0]), "k": torch.tensor([1e-9])}
    found = {"q": torch.tensor([1.0]), "k": torch.tensor([3e-9])}
    assert worst_gradient(found, expected).error < 1e-7
    assert worst_gradient({"q": torch.tensor([1.0])}, expected) == Worst(math.inf, "k")
    assert worst_gradient(found | {"q": torch.tensor([0.9])}, expected).name == "q"
    assert worst_gradient({}, {}) == Worst(0.0, "")


def test_the_tolerance_grows_with_roots() -> None:
    one = Rounding(torch.float32, 1).of_numbers(1)
    assert Rounding(torch.float32, 1).of_numbers(16) == pytest.approx(4 * one)
    assert one < Rounding(torch.float32, 4096).of_numbers(1) < 10 * one
    assert Rounding(torch.float64, 4096).of_numbers(1) < 1e-6
    assert Rounding(torch.bfloat16, 4096).of_numbers(4) < 0.2
    assert coarsest([torch.float32, torch.bfloat16, torch.uint8]) == torch.bfloat16
    assert coarsest([]) == torch.float32


def test_the_verdict_names_who_is_wrong() -> None:
    wrong = replace(RIGHT, who="b:1", activation=1e-2)
    together = replace(RIGHT, who="all together")
    assert RehearsalVerdict([RIGHT], together).is_right
    assert RehearsalVerdict([RIGHT, wrong], together).wrong == ["b:1"]
    assert "b:1 computed wrongly" in RehearsalVerdict([RIGHT, wrong], together).sentence
    between = RehearsalVerdict([RIGHT], replace(together, loss=1.0))
    assert not between.is_right
    assert "between the workers" in between.sentence


# By rule: what is allowed and what ends a run in single and in half precision.
LIMITS = {
    "LOSS": (1e-5, 0.01, 5e-3, 0.01),
    "LOSS_ALONE": (1e-5, 1e-4, 5e-3, 0.05),
    "LOG": (1e-3, math.inf, 5e-3, math.inf),
    "HIDDEN_STATES": (1e-5, 0.01, 5e-3, 0.01),
    "GRADIENTS": (1e-4, 0.01, 0.02, 0.02),
    "MADE_UP_GRADIENTS": (0.01, 0.01, 0.02, 0.02),
    "GRADIENTS_OF_OUTPUTS": (0.01, math.inf, 0.01, math.inf),
    "RESULTS_OF_LAYER": (1e-4, math.inf, 5e-3, math.inf),
    "GRADIENTS_OF_LAYER": (4e-4, math.inf, 0.02, math.inf),
    "OPTIMIZER_STEP": (1e-5, 1e-3, 5e-3, 5e-3),
}


def test_every_rule_has_its_limits() -> None:
    rules = [name for name, value in vars(tolerance).items() if isinstance(value, Rule)]
    assert sorted(rules) == sorted(LIMITS)


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("is_half", [False, True])
def test_half_of_a_limit_is_rounding_and_twice_of_it_is_not(name: str, is_half: bool) -> None:
    rule, rounding = getattr(tolerance, name), 5e-3 if is_half else 1e-5
    allowed, ends = LIMITS[name][2:] if is_half else LIMITS[name][:2]
    assert not rule.compare(min(allowed, ends) / 2, rounding).is_other
    assert rule.compare(2 * allowed, rounding).is_other
    assert rule.compare(2 * min(ends, 1e9), rounding).is_large == (ends < math.inf)
    assert not rule.compare(ends / 2 if ends < math.inf else 1e9, rounding).is_large
    assert not rule.compare(allowed, rounding).is_large  # a run does not end by rounding


def test_a_difference_is_said_in_percent() -> None:
    assert str(LOSS.compare(0.012345)) == "1.23 %"


@pytest.mark.parametrize(
    ("one", "other", "error"),
    [
        (1.0, 1.1, 0.1 / 1.1),
        (1e-9, 0.0, 1e-6),
        (None, None, 0.0),
        (None, 1.0, math.inf),
        (UNDEFINED, UNDEFINED, 0.0),
        (UNDEFINED, 1.0, math.inf),
        (1.0, INFINITE, math.inf),
        (INFINITE, INFINITE, 0.0),
    ],
)
def test_numbers_differ_relative_to_the_larger(
    one: float | None, other: float | None, error: float
) -> None:
    assert number_error(one, other, 1e-3) == pytest.approx(error)
    assert number_error(other, one, 1e-3) == pytest.approx(error)


def test_losses_that_cancel_have_no_error_of_their_own() -> None:
    assert loss_error(1e-8, 2e-8, 5e-8, 1e-5) == 0.0
    assert loss_error(1e-4, 0.0, 2e-4, 1e-5) == pytest.approx(0.1)
    assert loss_error(None, 1.0, 1.0, 1e-5) == 0.0


def test_the_answer_is_an_error_or_a_warning() -> None:
    with pytest.raises(BatchError, match=f"It differs. {GO_ON}"):
        end_or_warn("It differs.", "stop", ends=True)
    with pytest.raises(ModelError):
        end_or_warn("It differs.", "stop", ends=True, error=ModelError)
    for mode, ends in (("stop", False), ("warn", True)):
        with pytest.warns(UserWarning, match="It differs.$"):
            end_or_warn("It differs.", mode, ends=ends)  # type: ignore[arg-type]
