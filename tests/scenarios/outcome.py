"""What a run leaves, and how near another run must come to it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import Tensor

from ..equality import assert_close
from .scenario import WHOLE, Scenario

# Of all that training leaves, relative to the norm of a tensor: by the reason why bits differ.
NORM_TOLERANCE = 1e-5
"""Lightning adds the norms of all gradients in another order than stages do."""
WHOLE_TOLERANCE = 1e-5
"""One device adds the gradients of a batch in one product, and stages those of its pieces."""
HALF_TOLERANCE = {"16-mixed": 2e-3, "bf16-mixed": 2e-2}
"""And these are rounded to a half of the bits before they are added. A backward by hand also runs
inside autocast on one CPU, and outside of it on workers, even if a batch is in one piece."""
INEXACT = WHOLE | {"clipping by norm"}
"""The options with which bits differ."""
FLOOR = 1e-2
"""Of the largest norm; smaller tensors count as that. Some gradients are zero but for rounding."""


@dataclass(frozen=True)
class Outcome:
    """What a run leaves.

    Args:
        weights: The tensors of the module.
        logged: What Lightning had of the training behind each batch.
        validated: The losses of the evaluations.
    """

    weights: dict[str, Tensor]
    logged: list[dict[str, float]]
    validated: list[float]


def tolerance(scenario: Scenario) -> float:
    """How far a run may be from the reference; 0 if it must have its bits.

    Bits are those of plain Lightning that accumulates over the same micro-batches, also in 16-mixed
    and in four bits.
    """
    options = {*scenario.options}
    if options & WHOLE and (scenario.pieces > 1 or options & HALF_TOLERANCE.keys()):
        return max([WHOLE_TOLERANCE, *(HALF_TOLERANCE.get(name, 0.0) for name in options)])
    return NORM_TOLERANCE if "clipping by norm" in options else 0.0


def check_equal(found: Outcome, expected: Outcome, scenario: Scenario) -> None:
    """Refuse a difference from the reference that the scenario does not explain."""
    within = tolerance(scenario)
    halves = max(HALF_TOLERANCE.get(name, 0.0) for name in ("", *scenario.options))
    assert len(found.logged) == len(expected.logged), f"{len(found.logged)} batches are logged"
    for number, (mine, its) in enumerate(zip(found.logged, expected.logged, strict=True)):
        is_near = mine == pytest.approx(its, rel=within, abs=within)
        assert is_near, f"batch {number} logs {mine}, and the reference {its}"
    # Evaluations cut hidden states, and one device does not.
    near = pytest.approx(expected.validated, rel=max(within, halves, WHOLE_TOLERANCE))
    said = f"{found.validated} are validated, and {expected.validated} by the reference"
    assert found.validated == near, said
    assert found.weights.keys() == expected.weights.keys()
    if within:
        assert_close(found.weights, expected.weights, FLOOR, within)
        return
    wanted = expected.weights
    differing = [name for name, t in found.weights.items() if not t.equal(wanted[name])]
    assert differing == [], f"other bits in {differing}"
