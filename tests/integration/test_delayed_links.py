"""Replicas over links with random delays: when something comes changes no bit.

Two runs of each plan have processes and sockets. In the others, chance orders what happens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache

import pytest

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

from ..coordinator.session_net import Net
from ..equality import differing
from ..faults.relay import relay_to
from ..models import ACCELERATOR, TinyModule, fit, loader
from ..pairwise import keeping
from .groups import fit_in_groups

BATCH_SIZE = 6
PIECES = 6
NUM_STEPS = 3
NUM_LAYERS = 5


def in_a_line(workers: list[str]) -> Plan:
    """Two workers share the first stage, and two the second."""
    first, second, third = workers
    stages = [
        StagePlan([first, second], (0, 2), shares=[1, 1]),
        StagePlan([second, third], (2, NUM_LAYERS), shares=[2, 1], optimizer="split"),
    ]
    return Plan(stages, micro_batches=PIECES)


def with_the_coordinator(workers: list[str]) -> Plan:
    """The coordinator and two workers hold all layers."""
    names = ["coordinator", *workers[:2]]
    stages = [StagePlan(names, (0, NUM_LAYERS), shares=[1, 2, 3])]
    return Plan(stages, micro_batches=PIECES)


def delays_seconds(seed: int) -> Callable[[], float]:
    """Of the pieces of a link: mostly short, now and then as long as several micro-batches."""
    draws = random.Random(seed)
    return lambda: draws.choice((0.0, 0.0, 0.001, 0.003, 0.02)) * draws.random()


PLANS = pytest.mark.parametrize("make", [in_a_line, with_the_coordinator])
ADDRESSES = ["127.0.0.1:1001", "127.0.0.1:1002", "127.0.0.1:1003"]


def trained(plan: Plan) -> TinyModule:
    strategy = HeteroPipelineStrategy(plan.workers, plan)
    return fit(TinyModule(), strategy, loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE))


@cache
def expected(make: Callable[[list[str]], Plan]) -> TinyModule:
    """One device, which adds up in the plan's groups: other names make no other groups."""
    return fit_in_groups(TinyModule(), make(ADDRESSES), loader(NUM_STEPS * BATCH_SIZE, 1))


@pytest.mark.parametrize("seed", keeping(range(1), range(2)))
@PLANS
def test_delays_change_no_bit(
    make: Callable[[list[str]], Plan], seed: int, workers: list[str]
) -> None:
    with ExitStack() as stack:
        relays = [
            stack.enter_context(relay_to(worker, delay_seconds=delays_seconds(10 * seed + place)))
            for place, worker in enumerate(workers)
        ]
        found = trained(make([relay.address for relay in relays]))
    assert differing(found, expected(make)) == []


@pytest.mark.skipif(ACCELERATOR != "cpu", reason="workers in memory compute on the processor")
@pytest.mark.parametrize("seed", keeping(range(1), range(10)))
@PLANS
def test_the_order_of_events_changes_no_bit(make: Callable[[list[str]], Plan], seed: int) -> None:
    with Net(seed).connected():
        found = trained(make(ADDRESSES))
    assert differing(found, expected(make)) == []
