from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.errors import WorkerError, WorkerUnreachable
from lightning_hetero.launch import local
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import dial
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token

from ..transport.pairs import QUICK

PATIENT = Deadlines(connect_seconds=60.0)


@pytest.mark.parametrize(
    ("cores", "processes", "expected"), [(2, 3, 1), (8, 3, 2), (16, 2, 8), (1, 5, 1)]
)
def test_processes_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, expected: int
) -> None:
    monkeypatch.setattr(local, "usable_cores", lambda: cores)
    assert local.threads_per_process(processes) == expected


def test_workers_answer_at_their_addresses_and_end_when_told() -> None:
    workers = local.start_local_workers(["cpu", "cpu"], threads=1)
    try:
        assert [worker.name for worker in workers] == local.local_worker_names(2)
        for worker in workers:
            worker.wait_until_ready()
            ours = Identity(credentials=worker.credentials)
            with pytest.raises(local.WorkerError, match="does not serve the session"):
                dial(worker.address, "neighbor", "none", PATIENT, ours)
            # Other users of this machine, who can reach the port, have no token or another one.
            for stranger in (Identity(), Identity(credentials=Credentials(Token.new()))):
                for role in ("coordinator", "watcher"):
                    with pytest.raises(WorkerUnreachable, match="do not trust each other"):
                        dial(worker.address, role, "none", PATIENT, stranger)
    finally:
        local.stop_local_workers(workers, QUICK)
    assert all(worker.process.poll() is not None for worker in workers)


@contextmanager
def started_process(code: str) -> Iterator[local.LocalWorker]:
    """A process that may be a worker, on its leash."""
    leash, its_end = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=its_end)
    its_end.close()
    where = local.Address("127.0.0.1", 1)
    yield local.LocalWorker("local-1", where, process, leash, Credentials(Token.new()))
    leash.close()
    process.kill()
    process.wait()


SAYS_READY = "import os; os.read(0, 1); os.write(0, b'!'); os.read(0, 1)"


def test_a_worker_that_imports_for_long_is_waited_for_as_long_as_it_computes() -> None:
    with started_process(SAYS_READY) as worker:
        looks: list[float] = []

        def computes(_pid: int) -> float:
            looks.append(len(looks))
            if len(looks) == 8:  # far later than it may be idle
                worker.leash.sendall(b"!")
            return looks[-1]

        worker.wait_until_ready(0.1, computes)
    assert len(looks) >= 8


@pytest.mark.follows(
    "Look for the cause of its wait, such as a network drive with the libraries, and start again."
)
def test_a_worker_that_hangs_while_it_starts_is_named() -> None:
    with (
        started_process(SAYS_READY) as worker,
        pytest.raises(WorkerError, match=r"local-1 \(process [0-9]+\) hangs while it starts"),
    ):
        worker.wait_until_ready(0.1, lambda _pid: 1.5)
    with started_process(SAYS_READY) as worker:
        worker.leash.sendall(b"!")  # what it waits for is there
        worker.wait_until_ready()


def test_a_worker_that_ends_while_it_starts_is_named() -> None:
    with (
        started_process("raise SystemExit(3)") as worker,
        pytest.raises(WorkerError, match="local-1 .* ended while it started"),
    ):
        worker.wait_until_ready()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the time of a process")
def test_the_processor_time_of_a_process_is_known() -> None:
    before = local.cpu_seconds_of(os.getpid())
    assert before is not None
    while time.process_time() < before + 0.05:
        pass
    after = local.cpu_seconds_of(os.getpid())
    assert after is not None
    assert after > before
    assert local.cpu_seconds_of(2**22 + 1) is None  # no process has this number


def test_another_interpreter_finds_modules_where_this_one_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "only_here.py").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path, ""])
    settings = local._same_search_path()
    command = [sys.executable, "-c", "import only_here, lightning_hetero.errors"]
    subprocess.run(command, env={**os.environ, **settings}, cwd=tmp_path.parent, check=True)


def test_no_process_is_left_when_one_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], subprocess.Popen

    def second_fails(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            raise OSError("no more processes")
        started.append(start(*arguments, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", second_fails)
    with pytest.raises(WorkerError, match="local-2 cannot be started: no more processes"):
        local.start_local_workers(["cpu", "cpu"], threads=1)
    assert started[0].poll() is not None
