"""Training with narrower boundaries: as close to one device as the rounding allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

from ..models import TinyModule, loader, trainer
from ..pairwise import keeping, repeats

NUM_LAYERS = 4


def train(strategy: Any, **options: Any) -> list[float]:
    module = TinyModule(NUM_LAYERS)
    trainer(strategy, max_epochs=4, **options).fit(module, loader(24, 6, padded=True))
    return module.losses


def over(workers: list[str], micro_batching: Any = "step", **narrow: Any) -> HeteroPipelineStrategy:
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan([workers[0]], (1, 2)),
        StagePlan([workers[1]], (2, NUM_LAYERS)),
    ]
    stages[1] = replace(stages[1], **narrow)
    stages[2] = replace(stages[2], **narrow)
    plan = Plan(stages, micro_batches=2)
    return HeteroPipelineStrategy(workers[:2], plan, micro_batching=micro_batching)


@pytest.mark.parametrize(
    ("activations", "gradients", "tolerance", "micro_batching"),
    keeping(
        [("float16", "bfloat16", 2e-3, "step"), ("int8", "int8", 2e-2, "boundary")],
        (
            (*dtypes, micro_batching)
            for micro_batching in ("step", "boundary", "tokens")
            for dtypes in (
                ("bfloat16", None, 2e-3),
                (None, "bfloat16", 2e-3),
                ("float16", "bfloat16", 2e-3),
                ("int8", "int8", 2e-2),
            )
        ),
    ),
)
def test_a_training_curve_stays_where_it_was(
    activations: Any, gradients: Any, tolerance: float, micro_batching: Any, workers: list[str]
) -> None:
    expected = train("auto")
    found = train(
        over(workers, micro_batching, activation_dtype=activations, gradient_dtype=gradients)
    )
    assert found == pytest.approx(expected, rel=tolerance)
    assert found != pytest.approx(expected, rel=1e-7)


@repeats(
    "test_a_training_curve_stays_where_it_was",
    "integration/test_mixed_precision.py::test_precision_over_stages_is_that_of_one_device",
)
def test_under_bf16_true_a_narrow_boundary_changes_nothing(workers: list[str]) -> None:
    narrow = over(workers, activation_dtype="bfloat16", gradient_dtype="bfloat16")
    found = train(narrow, precision="bf16-true")
    assert found == train(over(workers), precision="bf16-true")
