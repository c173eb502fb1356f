"""A machine of the run takes a lost worker's place beside its own, and no bit changes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, StagePlan
from lightning_hetero.discovery.find import ask_status
from lightning_hetero.errors import WorkerLost, WorkerUnreachable
from lightning_hetero.report.run_record import read_run
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import dial

from ..conftest import WorkerProcess, worker_process
from ..models import TinyModule, fit, loader
from ..pairwise import covering, keeping, repeats
from ..transport.pairs import PATIENCE_SECONDS
from .dying_worker import dying
from .lost_runs import (
    ALWAYS,
    NEVER,
    Left,
    Observing,
    assert_same_run,
    end,
    run,
    turn_by_turn,
)

AT_ONCE: dict[str, Any] = {"wait_seconds": 0.2}


@pytest.fixture(scope="module")
def undisturbed(worker_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """The same run without a loss."""
    names = [worker.address for worker in worker_processes[:2]]
    return run(names, tmp_path_factory.mktemp("undisturbed"), NEVER)


# The place of the death, the number of its call, the time between snapshots, and which worker.
CASES = [
    ("forward", 8, ALWAYS, 0),
    ("forward", 20, NEVER, 1),
    ("backward", 8, ALWAYS, 1),
    ("backward", 11, NEVER, 0),
    ("clip", 2, ALWAYS, 1),
    ("clip", 1, NEVER, 0),
    ("step", 2, ALWAYS, 0),
    ("step", 2, NEVER, 1),
    ("evaluation", 2, ALWAYS, 1),
]


@pytest.mark.parametrize(("place", "call", "every_seconds", "which"), covering(CASES, 2, 3))
def test_the_other_worker_takes_over(
    place: str, call: int, every_seconds: float, which: int, undisturbed: Left, tmp_path: Path
) -> None:
    died = tmp_path / "died"
    before = dying(place, call, died, is_whole=True)
    with worker_process() as other, worker_process(before=before) as victim:
        names = [victim.address, other.address] if which == 0 else [other.address, victim.address]
        found = run(names, tmp_path / "run", every_seconds, **AT_ONCE)
        assert victim.process.poll() is not None
    assert died.exists()
    assert_same_run(found, undisturbed)
    facts = read_run(tmp_path / "run" / "logs" / "0").facts
    assert facts is not None
    (lost,) = facts.losses
    served_by = f"{victim.address} ({other.address})"
    assert (lost.place, lost.served_by) == (victim.address, served_by)


def three_in_a_row(names: list[str]) -> Plan:
    stages = [
        StagePlan([names[0]], (0, 2)),
        StagePlan([names[1]], (2, 3)),
        StagePlan([names[2]], (3, 5)),
    ]
    return Plan(stages, micro_batches=3)


@contextmanager
def three_workers(*options: str, of_third: Sequence[str] = ()) -> Iterator[list[WorkerProcess]]:
    with (
        worker_process(*options) as first,
        worker_process(*options) as second,
        worker_process(*options, *of_third) as third,
    ):
        yield [first, second, third]


@repeats(
    "test_the_other_worker_takes_over",
    "coordinator/test_lost_sessions.py::test_machines_take_over_until_one_is_left",
)
@pytest.mark.parametrize("every_seconds", [ALWAYS, NEVER])
def test_two_takeovers_in_a_row_leave_one_machine_with_everything(
    every_seconds: float, tmp_path: Path
) -> None:
    # The second one has more room than the third one, and takes over from the first one.
    with three_workers(of_third=("--memory", "1GiB")) as workers:
        names = [worker.address for worker in workers]
        plan = three_in_a_row(names)
        expected = run(names, tmp_path / "undisturbed", NEVER, plan)
        observing = Observing({1: partial(end, workers[0]), 3: partial(end, workers[2])})
        options = {**AT_ONCE, "callbacks": [observing]}
        found = run(names, tmp_path / "run", every_seconds, plan, **options)
        workers[1].await_children(1)
    assert_same_run(found, expected)
    assert observing.told.count(("restored", names[0])) == 1
    assert observing.told.count(("restored", names[2])) == 1


@repeats(
    "test_the_other_worker_takes_over",
    "coordinator/test_lost_sessions.py::test_machines_take_over_until_one_is_left",
)
def test_the_loss_of_the_machine_that_serves_two_is_taken_over_too(tmp_path: Path) -> None:
    with three_workers() as workers:
        names = [worker.address for worker in workers]
        plan = three_in_a_row(names)
        expected = run(names, tmp_path / "undisturbed", NEVER, plan)

        def end_both() -> None:
            # Whichever has taken over: the first one's layers move on to the last one left.
            end(workers[1])

        observing = Observing({1: partial(end, workers[0]), 3: end_both})
        options = {**AT_ONCE, "callbacks": [observing]}
        found = run(names, tmp_path / "run", ALWAYS, plan, **options)
    assert_same_run(found, expected)
    assert ("restored", names[1]) in observing.told


@repeats(
    "coordinator/test_lost_sessions.py::test_the_loss_of_the_last_machine_ends_the_run_with_a_sentence",
)
def test_the_loss_of_the_last_machine_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        settings = Recovery(folder=tmp_path, **AT_ONCE)
        strategy = HeteroPipelineStrategy(names, turn_by_turn(names), recovery=settings)
        callbacks = [Observing({1: partial(end, second), 3: partial(end, first)})]
        expected = "cannot be replaced: .*No other machine of the run can take its layers"
        with pytest.raises(WorkerLost, match=expected):
            fit(TinyModule(), strategy, loader(36, 6), callbacks=callbacks)


class Watching(Observing):
    """Notes too who has given its layers to others."""

    def on_worker_left(self, trainer: Any, name: str, step: int) -> None:
        self.told.append(("left", name))


@pytest.mark.parametrize("is_second", keeping([True], [True, False]))
def test_either_process_of_a_machine_with_two_may_die(
    is_second: bool, undisturbed: Left, tmp_path: Path
) -> None:
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]

        def kill_one() -> None:
            victim = sorted(first.children(), key=lambda child: float(child.create_time()))[
                is_second
            ]
            victim.kill()
            victim.wait(PATIENCE_SECONDS)

        observing = Watching({1: partial(end, second), 3: kill_one})
        found = run(names, tmp_path / "run", ALWAYS, callbacks=[observing], **AT_ONCE)
    assert_same_run(found, undisturbed)
    assert [name for what, name in observing.told if what == "left"] == []


def test_strangers_are_refused_and_status_shows_all_stages(
    undisturbed: Left, tmp_path: Path
) -> None:
    seen: list[int] = []
    with worker_process() as first, worker_process() as second:
        names, where = [first.address, second.address], Address.parse(first.address)

        def look() -> None:
            deadlines = Deadlines(busy_seconds=0.1)
            with pytest.raises(WorkerUnreachable, match="busy with another coordinator"):
                dial(where, "coordinator", "a stranger", deadlines, Identity())
            with pytest.raises(WorkerUnreachable, match="does not serve the session"):
                dial(where, "neighbor", "a stranger", deadlines, Identity())
            last = time.monotonic() + PATIENCE_SECONDS
            # The second process tells now and then what it does.
            while len(seen) < 3 and time.monotonic() < last:
                stage = ask_status(where, deadlines, Identity()).status.stage
                assert stage is not None
                seen[:] = [each.number for each in stage.stages]

        observing = Observing({1: partial(end, second), 4: look})
        found = run(names, tmp_path / "run", ALWAYS, callbacks=[observing], **AT_ONCE)
    assert_same_run(found, undisturbed)
    assert seen == [1, 2, 3]


@repeats(
    "test_the_other_worker_takes_over",
    "integration/test_lost_guests.py::test_a_machine_that_has_joined_takes_over_beside_its_own_layers",
)
@pytest.mark.parametrize("kind", ["spawn"])
def test_a_worker_whose_processes_are_not_forked_takes_over(
    kind: str, undisturbed: Left, tmp_path: Path
) -> None:
    with worker_process("--sessions", kind) as first, worker_process() as second:
        names = [first.address, second.address]
        observing = Observing({3: partial(end, second)})
        found = run(names, tmp_path / "run", ALWAYS, callbacks=[observing], **AT_ONCE)
    assert_same_run(found, undisturbed)


def test_a_drained_worker_finishes_both_sessions_and_ends(
    undisturbed: Left, tmp_path: Path
) -> None:
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        terminate = psutil.Process(first.process.pid).terminate
        observing = Observing({1: partial(end, second), 3: terminate})
        found = run(names, tmp_path / "run", ALWAYS, callbacks=[observing], **AT_ONCE)
        assert first.process.wait() == 0
    assert_same_run(found, undisturbed)
