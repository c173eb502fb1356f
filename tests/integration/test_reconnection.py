"""Connections that break in the middle of a run, and come back: no bit is another one."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, StagePlan
from lightning_hetero.errors import LinkLost, WorkerLost

from ..conftest import WorkerProcess, worker_process
from ..faults.relay import Relay, relay_to
from ..faults.scene import QUICK, SILENCE_SECONDS
from ..forked import running_script
from ..pairwise import keeping
from .journey import (
    NUM_LAYERS,
    PLACES,
    Journey,
    Result,
    Returns,
    Striker,
    later,
    returns_in,
    travel,
)
from .tunnels import FORWARDED, tunnels_to

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


@pytest.mark.parametrize(
    ("fault", "link"),
    keeping(
        [("stall, then RST", "worker to worker")],
        product(["RST", "stall, then RST"], LINKS),
    ),
)
def test_a_connection_that_breaks_everywhere_costs_no_bit(
    fault: str,
    link: str,
    relays: list[Relay],
    undisturbed: Result,
    tmp_path: Path,
) -> None:
    reset = LINKS[link](relays)
    returns = Returns()

    def strike() -> None:
        # Places may follow each other at once; each is to break a connection that is whole.
        returns.wait_for(len(striker.struck) - 1)
        if fault == "RST":
            reset()
            return
        for relay in relays:
            relay.stall()
        later(STALL_SECONDS, reset, *(relay.heal for relay in relays))

    ends = [relay.address for relay in relays]
    strategy = HeteroPipelineStrategy(ends, plan_over(*ends), recovery=Recovery(60))
    # Before the workers serve, they have no connection to each other.
    places = [p for p in PLACES if p != "reduce" and (p, link) != ("load", "worker to worker")]
    module = Journey()
    striker = Striker(module, strike, places)
    with returns.watching(), striker.watching():
        found = travel(strategy, tmp_path, module)
    assert sorted(striker.struck) == sorted(places)
    returns.wait_for(len(places) - 1)  # the last one may come back behind the end
    found.check_equal(undisturbed)


def strategy_over(*ends: str, seconds: float = 60, plan: Plan | None = None, **more: Any) -> Any:
    settings = Recovery(linger_seconds=seconds, **more)
    return HeteroPipelineStrategy(list(ends), plan or plan_over(*ends), recovery=settings)


# Neither another process nor the other machine takes the place of a lost worker.
ALONE: dict[str, Any] = {"wait_seconds": 0.3, "least_workers": 2}


def test_nobody_waits_for_a_process_that_is_gone(tmp_path: Path, workers: list[str]) -> None:
    """The process that takes its place says that it does not know the session, and serves."""
    with worker_process() as victim:
        module = Journey()
        striker = Striker(module, lambda: victim.session.kill(), ["backward"])
        began = time.monotonic()
        with striker.watching():
            travel(strategy_over(victim.address, workers[0], seconds=110), tmp_path, module)
        assert time.monotonic() - began < 90


def test_a_worker_whose_machine_says_that_nobody_listens_is_lost_at_once(
    workers: list[str], tmp_path: Path
) -> None:
    with worker_process() as victim:
        module = Journey()
        striker = Striker(module, victim.process.kill, ["backward"])
        strategy = strategy_over(workers[0], victim.address, seconds=110, **ALONE)
        with striker.watching(), pytest.raises(WorkerLost, match="`least_workers`"):
            travel(strategy, tmp_path, module)


@pytest.mark.parametrize("index", keeping([1], [0, 1]))
def test_a_connection_that_stays_away_ends_the_run(
    index: int, relays: list[Relay], tmp_path: Path
) -> None:
    module = Journey()
    ends = [relay.address for relay in relays]
    striker = Striker(module, relays[index].pull, ["backward"])
    with striker.watching(), pytest.raises((WorkerLost, LinkLost)) as lost:
        travel(strategy_over(*ends, seconds=0.5, **ALONE), tmp_path, module)
    assert "did not come back within 0.5 s." in str(lost.value)


WAITING = """
import sys
from lightning_hetero import HeteroPipelineStrategy, Recovery
from lightning_hetero.transport.deadlines import Deadlines
from tests.faults.relay import relay_to
from tests.models import TinyModule, loader, trainer

with relay_to(sys.argv[1]) as relay:
    class Module(TinyModule):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                relay.pull()
                print("waits", flush=True)
            return super().training_step(batch, batch_idx)

    recovery = Recovery(600, folder=sys.argv[2])
    strategy = HeteroPipelineStrategy([relay.address], "even", recovery=recovery)
    strategy.deadlines = Deadlines(leave_seconds=1.0)
    trainer(strategy, max_steps=3).fit(Module(), loader(36, 12))
"""


@pytest.mark.parametrize(
    "number", keeping([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]), ids=lambda each: each.name
)
def test_a_signal_ends_a_run_that_waits_for_a_connection(
    number: signal.Signals, tmp_path: Path
) -> None:
    options = ("--linger-seconds", "600")
    with (
        worker_process(*options) as worker,
        running_script(WAITING, worker.address, str(tmp_path)) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode not in (None, 0, -signal.SIGKILL)
    assert "no stage returned a result for 1 s in step 2, while stage 1 on" in said
    assert "was cut off" in said


def test_replicas_add_up_the_same_gradients(relays: list[Relay], tmp_path: Path) -> None:
    """What replicas send each other changes as soon as it is sent."""

    def plan(ends: Sequence[str]) -> Plan:
        stages = [StagePlan(["coordinator"], (0, 1)), StagePlan([*ends], (1, NUM_LAYERS))]
        return Plan(stages, micro_batches=4)

    ends = [relay.address for relay in relays]
    undisturbed = travel(HeteroPipelineStrategy(ends, plan(ends)), tmp_path / "undisturbed")
    module, places = Journey(), ["backward", "reduce", "clip", "step"]

    def reset() -> None:
        for relay in relays:
            relay.reset()

    striker = Striker(module, reset, places)
    with striker.watching():
        found = travel(strategy_over(*ends, plan=plan(ends)), tmp_path / "broken", module)
    assert sorted(striker.struck) == sorted(places)
    found.check_equal(undisturbed)


@pytest.mark.filterwarnings(f"ignore:.*{FORWARDED}")
def test_connections_that_the_coordinator_forwards_come_back(
    workers: list[str], undisturbed: Result, tmp_path: Path
) -> None:
    module, places = Journey(), ["forward", "backward", "step", "generation"]
    with tunnels_to(workers[:2]) as ends:
        striker = Striker(module, ends.reset, places)
        with striker.watching():
            found = travel(strategy_over(*ends), tmp_path, module)
    assert sorted(striker.struck) == sorted(places)
    found.check_equal(undisturbed)


def test_a_process_that_was_frozen_goes_on(
    workers: list[str], undisturbed: Result, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It finds the connections of several attempts, of which the latest counts."""
    with worker_process() as frozen:
        module = Journey()

        def freeze() -> None:
            session = frozen.session
            session.suspend()
            later(2.5 * SILENCE_SECONDS, session.resume)

        strategy = strategy_over(workers[0], frozen.address)
        strategy.deadlines = replace(QUICK, connect_seconds=SILENCE_SECONDS / 2)
        striker = Striker(module, freeze, ["backward"])
        with striker.watching(), caplog.at_level(logging.INFO):
            found = travel(strategy, tmp_path, module)
    assert striker.struck == ["backward"]
    assert returns_in(caplog) >= 1
    found.check_equal(undisturbed)
