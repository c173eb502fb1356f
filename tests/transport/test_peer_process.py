"""The CPU time of the process at the other end tells a slow process from a frozen one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import psutil  # type: ignore[import-untyped]
import pytest

from lightning_hetero.errors import ChannelError
from lightning_hetero.transport.connection import PeerWork, SocketConnection, send_buffers

from .pairs import memory_pair

# A process that connects, reads nothing, and computes for ever.
BUSY = """
import socket, sys
connected = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print("connected", flush=True)
while True:
    pass
"""


@contextmanager
def busy_peer(host: str, dialled: str = "") -> Iterator[tuple[SocketConnection, int]]:
    """A connection with a process that computes, and the number of that process."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::") as listener:
        place = [dialled or host, str(listener.getsockname()[1])]
        command = [sys.executable, "-c", BUSY, *place]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            connected, _ = listener.accept()
            assert process.stdout is not None
            assert process.stdout.readline() == b"connected\n"
            try:
                yield SocketConnection(connected), process.pid
            finally:
                process.kill()
                connected.close()


def wait_until_stopped(pid: int) -> None:
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        pass


@pytest.mark.parametrize(
    ("host", "dialled"), [("127.0.0.1", ""), ("127.0.1.1", ""), ("::1", ""), ("::", "127.0.0.1")]
)
def test_a_process_that_computes_advances_and_a_stopped_one_does_not(
    host: str, dialled: str
) -> None:
    with busy_peer(host, dialled) as (connection, pid):
        work = PeerWork(connection)
        assert work.is_visible
        while not work.has_advanced():
            pass
        os.kill(pid, signal.SIGSTOP)
        wait_until_stopped(pid)
        work.has_advanced()
        assert not work.has_advanced()
        assert work.is_visible


def test_this_process_itself_and_one_that_has_ended_are_not_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connected = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with connected, accepted:
            assert not PeerWork(SocketConnection(accepted)).is_visible
    with busy_peer("127.0.0.1") as (connection, pid):
        work = PeerWork(connection)
        os.kill(pid, signal.SIGKILL)
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            pass
        work.has_advanced()
        assert not work.has_advanced()


def test_threads_that_wait_for_the_interpreter_are_no_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine less CPU time is work."""
    mine, _theirs = memory_pair()
    load = 1.0
    monkeypatch.setattr("psutil.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    clock = count(100.0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    mine.cpu_seconds.extend([0.0, 0.05, 0.95, 1.0])
    work = PeerWork(mine)
    assert not work.has_advanced()
    assert work.has_advanced()
    load = 60.0
    assert work.has_advanced()


def test_what_is_sent_waits_for_a_process_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing, and is given up when it computes no more."""
    mine, _theirs = memory_pair()
    mine.cpu_seconds.extend([0.0, 0.1, 0.2, 0.3, 0.3])
    num_calls = 0

    def full(_buffers: Sequence[memoryview]) -> int:
        nonlocal num_calls
        num_calls += 1
        raise TimeoutError

    monkeypatch.setattr(mine, "send", full)
    for waits_for_work, expected in ((False, 1), (True, 4)):
        num_calls = 0
        with pytest.raises(ChannelError, match="read nothing for 0.0 s"):
            send_buffers(mine, [memoryview(b"x")], 0.0, waits_for_work)
        assert num_calls == expected
