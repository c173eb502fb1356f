"""Connections that break in the middle of a run, and come back: no bit is another one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, StagePlan

from ..conftest import WorkerProcess
from ..faults.relay import Relay, relay_to
from .journey import NUM_LAYERS, PLACES, Journey, Result, Striker, later, returns_in, travel

STALL_SECONDS = 0.3


def plan_over(first: str, second: str) -> Plan:
    return Plan(
        [
            StagePlan(["coordinator"], (0, 1)),
            StagePlan([first], (1, 3)),
            StagePlan([second], (3, NUM_LAYERS)),
        ],
        micro_batches=3,
    )


@pytest.fixture(scope="module")
def undisturbed(
    worker_processes: list[WorkerProcess], tmp_path_factory: pytest.TempPathFactory
) -> Result:
    first, second = (worker.address for worker in worker_processes[:2])
    strategy = HeteroPipelineStrategy([first, second], plan_over(first, second))
    return travel(strategy, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def relays(workers: list[str]) -> Iterator[list[Relay]]:
    with ExitStack() as stack:
        yield [stack.enter_context(relay_to(address)) for address in workers[:2]]


# By connection, how to reset it. The first worker dials the second one.
LINKS: dict[str, Callable[[list[Relay]], Callable[[], None]]] = {
    "coordinator to the first worker": lambda relays: relays[0].reset_first,
    "coordinator to the last worker": lambda relays: relays[1].reset_first,
    "worker to worker": lambda relays: relays[1].reset_latest,
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("fault", ["RST", "stall, then RST"])
def test_a_connection_that_breaks_everywhere_costs_no_bit(
    fault: str,
    link: str,
    relays: list[Relay],
    undisturbed: Result,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reset = LINKS[link](relays)

    def stall_then_reset() -> None:
        for relay in relays:
            relay.stall()
        later(STALL_SECONDS, reset, *(relay.heal for relay in relays))

    ends = [relay.address for relay in relays]
    strategy = HeteroPipelineStrategy(ends, plan_over(*ends), recovery=Recovery(60))
    # Before the workers serve, they have no connection to each other.
    places = [place for place in PLACES if place != "load" or link != "worker to worker"]
    module = Journey()
    striker = Striker(module, reset if fault == "RST" else stall_then_reset, places)
    with striker.watching(), caplog.at_level(logging.INFO):
        found = travel(strategy, tmp_path, module)
    assert sorted(striker.struck) == sorted(places)
    assert returns_in(caplog) >= len(places) - 1
    found.check_equal(undisturbed)
