"""Each session has a process of its own, which takes everything along when it ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.discovery.find import ask_status
from lightning_hetero.errors import ChannelError, StageFailed, WorkerUnreachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.channel import Inbox
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import dial
from lightning_hetero.worker import supervisor
from lightning_hetero.worker.supervisor import SessionPlace, hear_turn

from ..conftest import WorkerProcess, worker_process
from ..models import TinyModule, fit, loader
from ..pairwise import repeats
from ..transport.pairs import PATIENCE_SECONDS

LEAKED_BYTES = 256 * 2**20
# What a session may leave, measured beside what it took: less than a tenth of that.
NOISE_BYTES = 20 * 2**20
# A variable of workers' processes: the coordinator calls a layer's forward too, to look at it.
ON_WORKER = "A_WORKER_OF_THESE_TESTS"
LEAK: list[Tensor] = []


class Block(nn.Module):
    """An honest layer."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.line(hidden)
        return mixed


class Poisoner(Block):
    """Breaks every layer that its process calls from now on, and keeps memory."""

    def forward(self, hidden: Tensor) -> Tensor:
        if ON_WORKER in os.environ:
            LEAK.append(torch.ones(LEAKED_BYTES // 4))
            nn.modules.module.register_module_forward_pre_hook(refuse)
        return super().forward(hidden)


def refuse(*_: Any) -> None:
    raise RuntimeError("this process is poisoned")


class Quitter(Block):
    """Ends the process, or means to."""

    def forward(self, hidden: Tensor) -> Tensor:
        if ON_WORKER in os.environ:
            sys.exit(3)
        return super().forward(hidden)


class OwnModule(TinyModule):
    """Two layers of a class of this file."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__(1)
        torch.manual_seed(0)
        self.model = nn.ModuleDict(  # type: ignore[assignment]
            {
                "embed": nn.Embedding(48, 16),
                "blocks": nn.ModuleList([kind(), kind()]),
                "head": nn.Linear(16, 48),
            }
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        parts: Any = self.model
        hidden = parts["embed"](batch["input_ids"])
        for block in parts["blocks"]:
            hidden = block(hidden)
        loss: Tensor = parts["head"](hidden).square().mean()
        return loss


def run(worker: WorkerProcess, kind: type[Block]) -> OwnModule:
    plan = Plan([StagePlan([worker.address], (0, 2))], micro_batches=2)
    strategy = HeteroPipelineStrategy(
        [worker.address], plan, layers="model.blocks", check_first_batch="off"
    )
    return fit(OwnModule(kind), strategy, loader(24, 12))


@pytest.fixture(scope="module")
def allowing() -> Iterator[WorkerProcess]:
    with worker_process("--allow", __name__, **{ON_WORKER: "yes"}) as worker:
        yield worker


def settle(worker: WorkerProcess) -> int:
    """Wait until only one session's process is left; the bytes of the worker's processes then."""
    warm = psutil.Process(worker.process.pid)
    with session(worker, "settle"):
        worker.await_children(1)
        return sum(int(each.memory_info().rss) for each in (warm, worker.session))


def await_end(process: psutil.Process) -> None:
    _, alive = psutil.wait_procs([process], PATIENCE_SECONDS)
    assert not alive


@contextmanager
def session(worker: WorkerProcess, name: str = "a") -> Iterator[tuple[Any, Inbox]]:
    address, inbox = Address.parse(worker.address), Inbox()
    channel, _ = dial(address, "coordinator", name, Deadlines(), Identity())
    channel.start(inbox)
    try:
        yield channel, inbox
    finally:
        channel.close(m.Goodbye())


@contextmanager
def session_at_last(worker: WorkerProcess, name: str) -> Iterator[None]:
    """A session with a worker of which a process is about to end: a dial may still reach this."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(session(worker, name))
                break
            except WorkerUnreachable:
                assert time.monotonic() < deadline
        yield


def test_a_session_that_poisons_its_process_harms_no_later_one(allowing: WorkerProcess) -> None:
    run(allowing, Block)
    before = settle(allowing)
    with pytest.raises(StageFailed, match="this process is poisoned"):
        run(allowing, Poisoner)
    assert settle(allowing) < before + NOISE_BYTES
    found, expected = run(allowing, Block), fit(OwnModule(Block), "auto", loader(24, 12))
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=0)


def test_a_layer_that_exits_is_an_error_that_names_it(allowing: WorkerProcess) -> None:
    with pytest.raises(StageFailed, match="SystemExit: 3"):
        run(allowing, Quitter)
    run(allowing, Block)


def test_sessions_follow_each_other_at_once_and_leave_no_process(allowing: WorkerProcess) -> None:
    numbers: set[int] = set()
    for number in range(12):
        with session(allowing, str(number)):
            numbers.add(allowing.session.pid)
    assert len(numbers) == 12
    settle(allowing)


def test_a_session_that_is_killed_is_a_lost_worker_and_the_next_one_is_served(
    allowing: WorkerProcess,
) -> None:
    with session(allowing) as (_, inbox):
        allowing.session.kill()
        assert isinstance(inbox.get(timeout=PATIENCE_SECONDS).content, ChannelError)
    run(allowing, Block)


# Processes from the second to the last number are killed before they can serve.
DYING = """
import os, signal
from lightning_hetero.worker.supervisor import Supervisor
fork, serve, starts = Supervisor._fork, Supervisor._serve_and_exit, []
def counting(self, second):
    starts.append(second)
    return fork(self, second)
def dying(self, *given):
    if 2 <= len(starts) <= int(os.environ["LAST"]):
        os.kill(os.getpid(), signal.SIGKILL)
    serve(self, *given)
Supervisor._fork, Supervisor._serve_and_exit = counting, dying
"""


def test_a_worker_outlives_processes_that_are_killed_before_they_serve() -> None:
    """As by a system whose memory is full for a moment."""
    with worker_process(before=DYING, LAST="4") as worker:
        for name in "ab":
            with session_at_last(worker, name):
                pass


def test_a_worker_ends_whose_processes_are_always_killed_before_they_serve() -> None:
    with worker_process(before=DYING, LAST="100") as worker:
        with session(worker):
            pass
        assert worker.process.wait() == 1


def test_a_running_session_is_seen_and_keeps_others_out(allowing: WorkerProcess) -> None:
    address = Address.parse(allowing.address)
    with session(allowing, "0123456789"):
        with pytest.raises(WorkerUnreachable, match="busy with another coordinator"):
            dial(address, "coordinator", "b", Deadlines(), Identity())
        stage = ask_status(address, Deadlines(), Identity()).status.stage
    assert stage is not None
    assert stage.run == "01234567"


def test_the_session_ends_with_a_worker_that_is_killed() -> None:
    with worker_process() as worker, session(worker) as (_, inbox):
        process = worker.session
        os.kill(worker.process.pid, signal.SIGKILL)
        assert isinstance(inbox.get(timeout=PATIENCE_SECONDS).content, ChannelError)
        await_end(process)


@repeats(
    "integration/test_lost_guests.py::test_a_machine_that_has_joined_takes_over_beside_its_own_layers",
)
def test_a_process_that_is_not_forked_serves_alike() -> None:
    with worker_process("--sessions", "spawn", "--allow", __name__) as worker:
        first, spare = worker.children()
        run(worker, Block)
        await_end(first)
        run(worker, Block)
        await_end(spare)


COUNTED = """
import os
from lightning_hetero.worker import worker
look = worker.equipment_here
def counted(device):
    with open(os.environ["LOOKS"], "a") as file:
        file.write("looked ")
    return look(device)
worker.equipment_here = counted
"""


def test_the_device_is_looked_at_once_and_later_sessions_answer_alike(tmp_path: Path) -> None:
    """A GPU takes seconds to begin, and the next coordinator would wait."""
    looks = tmp_path / "looks"
    with worker_process(before=COUNTED, LOOKS=str(looks)) as worker:
        told = []
        for number in range(3):
            address = Address.parse(worker.address)
            channel, welcome = dial(address, "coordinator", str(number), Deadlines(), Identity())
            channel.start(Inbox())
            told.append(welcome.equipment)
            process = worker.session
            channel.close(m.Goodbye())
            await_end(process)
    assert told[0].dtypes
    assert told == [told[0]] * 3
    assert looks.read_text() == "looked "


def test_a_process_that_was_not_forked_is_told_of_the_device() -> None:
    equipment = m.Equipment(device="cpu", device_name="of an earlier process")
    ours, theirs = Pipe()
    listener = socket.create_server(("127.0.0.1", 0))
    with ours, theirs, listener:
        place = SessionPlace(listener, theirs, 0.0)
        ours.send(("go", "the-secret", None, equipment))
        assert hear_turn(place) == ("the-secret", replace(place, equipment=equipment))


QUICK_TO_END = """
from lightning_hetero.worker import supervisor
supervisor._LIVING_SECONDS = supervisor._LOOKING_SECONDS = 0.1
supervisor._SILENT_SECONDS = 8.0
"""
# A session that does not end when its coordinator has gone, as one whose driver hangs.
HANGING = """
import threading
from lightning_hetero.worker.session import StageSession
run = StageSession.run
def hanging(self):
    run(self)
    threading.Event().wait()
StageSession.run = hanging
"""


def test_a_process_that_is_stopped_keeps_the_worker_from_no_later_run() -> None:
    with worker_process(before=QUICK_TO_END) as worker:
        with session(worker):
            stopped = worker.session
            stopped.suspend()
        await_end(stopped)
        with session_at_last(worker, "b"):
            assert worker.session.pid != stopped.pid
            # A session that lives is left alone, however long it has nothing to do.
            served = worker.session
        await_end(served)
        stopped = worker.session  # the next one, which serves nobody yet
        stopped.suspend()
        await_end(stopped)
        with session_at_last(worker, "c"):
            pass


def test_a_session_that_hangs_without_its_coordinator_is_ended() -> None:
    with worker_process(before=QUICK_TO_END + HANGING) as worker:
        with session(worker):
            hung = worker.session
        await_end(hung)
        with session_at_last(worker, "b"):
            assert worker.session.pid != hung.pid


def test_a_process_that_says_nothing_and_computes_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = iter([0.0, 50.0, 50.0, 50.001])
    monkeypatch.setattr(supervisor, "cpu_seconds_of", lambda _pid: next(used))
    ours, theirs = Pipe()
    with ours, theirs:
        member = supervisor._Member(0, ours)
        assert not member.hangs(supervisor._SILENT_SECONDS - 1.0)
        assert not member.hangs(1.0)  # it has computed
        assert not member.hangs(supervisor._SILENT_SECONDS - 1.0)
        assert member.hangs(1.0)
