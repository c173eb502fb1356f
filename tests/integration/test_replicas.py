"""Replicas on workers: one stage on several, with the bits of one device that adds up in groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

from ..equality import differing
from ..models import TinyModule, fit, loader
from .groups import fit_in_groups

NUM_LAYERS = 5
BATCH_SIZE = 6
PIECES = 6
NUM_STEPS = 3


def replicated(workers: Sequence[str], **options: Any) -> Plan:
    """Two workers share the layers 1 to 4, two micro-batches to one; the rest is here."""
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan([*workers[:2]], (1, 4), shares=[2, 1], **options),
        StagePlan(["coordinator"], (4, 5)),
    ]
    return Plan(stages, micro_batches=PIECES)


def between(workers: Sequence[str], **options: Any) -> Plan:
    """A line of a worker, of a stage on two workers, and of the first worker again."""
    stages = [
        StagePlan([workers[0]], (0, 2)),
        StagePlan([workers[1], workers[2]], (2, 4), shares=[1, 2], **options),
        StagePlan([workers[0]], (4, 5)),
    ]
    return Plan(stages, micro_batches=PIECES)


def both_shared(workers: Sequence[str], **options: Any) -> Plan:
    """Two workers share both stages, with other shares."""
    stages = [
        StagePlan([workers[0], workers[1]], (0, 2), shares=[1, 1], **options),
        StagePlan([workers[1], workers[0]], (2, 5), shares=[2, 1], **options),
    ]
    return Plan(stages, micro_batches=PIECES)


PLANS = {"beside": replicated, "between": between, "both": both_shared}


@pytest.mark.parametrize("optimizer", ["each", "split"])
@pytest.mark.parametrize("name", PLANS)
def test_a_run_has_the_bits_of_its_groups(name: str, optimizer: str, workers: list[str]) -> None:
    plan = PLANS[name](workers, optimizer=optimizer)
    names = [*dict.fromkeys(plan.workers)]
    found = fit(TinyModule(), HeteroPipelineStrategy(names, plan), loader(NUM_STEPS * 6, 6))
    expected = fit_in_groups(TinyModule(), plan, loader(NUM_STEPS * 6, 1))
    assert differing(found, expected) == []
