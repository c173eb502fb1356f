"""Stages that run again in the backward, as a whole or by layers, have the bits of one that keeps
its graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedModel

from lightning_hetero import HeteroPipelineStrategy, Plan
from lightning_hetero.plan import Recompute

from ..equality import differing
from ..families import BATCH_SIZE, CONFIGS, FamilyModule, tiny_model
from ..models import fit, loader, scaled_precision
from ..pairwise import each_value, keeping
from .drawing import BOTH_ENDS, MODELS, TURN_BY_TURN, TWO_WORKERS, Drawing, Shares, plan_of

# The loss of a mixture couples the samples of a batch.
pytestmark = pytest.mark.filterwarnings("ignore:The loss of the first batch")

NUM_STEPS = 2
PRECISIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "32-true": dict,
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "bf16-true": lambda: {"precision": "bf16-true"},
    "16-mixed": lambda: {"plugins": [scaled_precision()]},
}
SHARES: dict[str, Shares] = {
    "both ends": BOTH_ENDS,
    "two workers": TWO_WORKERS,
    "turn by turn": TURN_BY_TURN,
}


def train(
    module: type[FamilyModule],
    model: PreTrainedModel,
    plan: Plan,
    precision: str,
) -> FamilyModule:
    strategy = HeteroPipelineStrategy(plan.workers, plan, loss_weighting="labels")
    data = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE, padded=True)
    return fit(module(model), strategy, data, **PRECISIONS[precision]())


def again(plan: Plan, recompute: Recompute) -> Plan:
    return replace(plan, stages=[replace(each, recompute=recompute) for each in plan.stages])


ROWS = each_value([*CONFIGS], [*SHARES], [*PRECISIONS])


@pytest.mark.parametrize(
    ("family", "shares", "precision"),
    keeping([row for row in ROWS if row[0] in ("llama", "gemma2", "gpt2", "mixtral")], ROWS),
)
def test_every_family_has_the_same_bits(
    family: str, shares: str, precision: str, workers: list[str]
) -> None:
    plan = plan_of(workers, SHARES[shares])
    expected, *found = (
        train(FamilyModule, tiny_model(family), again(plan, recompute), precision)
        for recompute in (False, True, "layers")
    )
    for each in found:
        assert each.losses == expected.losses
        assert differing(each, expected) == []


REPLICAS = ["workers", "coordinator"]
DRAWING = each_value([*MODELS], REPLICAS, ["32-true", "bf16-mixed"])


@pytest.mark.parametrize(
    ("name", "who", "precision"),
    keeping([row for row in DRAWING if row[0] in ("eager", "adapters")], DRAWING),
)
def test_replicas_with_dropout_have_the_same_bits(
    name: str, who: str, precision: str, workers: list[str]
) -> None:
    names = workers[:2] if who == "workers" else [workers[0], "coordinator"]
    plan = plan_of(workers[:1], [("a", 4)])
    plan = replace(plan, stages=[replace(plan.stages[0], workers=names)])
    expected, *found = (
        train(Drawing, MODELS[name](), again(plan, recompute), precision)
        for recompute in (False, True, "layers")
    )
    for each in found:
        assert each.losses == expected.losses
        assert differing(each, expected) == []
