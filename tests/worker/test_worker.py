"""A worker's listener: who may reach it, who is served, and strangers that keep nobody out."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from queue import SimpleQueue

import pytest

from lightning_hetero.coordinator.session import Coordinator
from lightning_hetero.errors import WorkerError, WorkerUnreachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.connection import Connection, send_buffers
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import address_of, dial, listen
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token
from lightning_hetero.worker import worker as worker_module

from ..transport.pairs import PATIENCE_SECONDS, QUICK, serving_worker, worker_thread


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines on strangers since the last call. Workers of earlier tests may still log theirs."""
    lines = [r.getMessage() for r in caplog.records if "does not start" in r.getMessage()]
    caplog.clear()
    return lines


def test_strangers_fill_no_log_and_are_counted_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with worker_thread() as address:
        where = (address.host, address.port)
        for _ in range(30):
            with socket.create_connection(where, PATIENCE_SECONDS) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n")
                stranger.settimeout(PATIENCE_SECONDS)
                with suppress(ConnectionError):
                    while stranger.recv(2**16):
                        pass
    first, last = lines_of(caplog)
    assert first.startswith("connection from 127.0.0.1:")
    assert "does not start a frame" in first
    assert last.startswith("connections from 127.0.0.1 refused in ")
    assert " s without a line: 29, the last: What came does not start" in last


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "strix.local"])  # noqa: S104
def test_only_loopback_is_listened_on(host: str) -> None:
    with pytest.raises(WorkerError, match=r"without a token.*loopback only.*hetero token"):
        listen(Address(host, 0))


@pytest.mark.follows(
    "another process uses this port. Choose another one with …, or end that process.",
)
def test_a_port_in_use_is_named() -> None:
    with listen(Address("127.0.0.1", 0)) as listener:
        taken = address_of(listener)
        expected = f"Cannot listen on {taken}: another process .* Choose another one .*`--listen"
        with pytest.raises(WorkerError, match=expected):
            listen(taken)
        listen(Address(taken.host, 0)).close()
    listen(taken).close()


@pytest.mark.follows(
    "wait for its run to end, or use another worker. `lightning-hetero top` shows its work.",
)
def test_one_coordinator_at_a_time_and_then_the_next() -> None:
    with worker_thread() as address:
        first, _ = dial(address, "coordinator", "a", QUICK, Identity())
        first.start(SimpleQueue())
        # Whose run it is, for how long, and where to look.
        whose = r"127\.0\.0\.1:\d+, for 0:00:\d\d"
        expected = rf"busy with another coordinator \({whose}\).*`lightning-hetero top`"
        with pytest.raises(WorkerUnreachable, match=expected):
            dial(address, "coordinator", "b", QUICK, Identity())
        first.close(m.Goodbye())
        second, _ = dial(address, "coordinator", "c", QUICK, Identity())
        second.start(SimpleQueue())
        second.close()


@pytest.mark.follows(
    "if two of the run's addresses lead to it, name one of them only",
)
def test_one_worker_at_two_addresses_is_told_as_such() -> None:
    with worker_thread() as address:
        other = Address("localhost", address.port)
        with pytest.raises(WorkerUnreachable, match="serves this run already.*name one of them"):
            Coordinator([("a", address), ("b", other)], QUICK, Identity())
        Coordinator([("a", address)], QUICK, Identity()).close()


@pytest.fixture
def many_files() -> Iterator[None]:
    """A process that may have some thousands of open files, also where a shell allows fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("credentials", [None, Credentials(Token.new())], ids=["plain", "TLS"])
@pytest.mark.parametrize("num_strangers", [40, 1000])
@pytest.mark.usefixtures("many_files")
def test_silent_strangers_do_not_keep_others_out(
    credentials: Credentials | None, num_strangers: int
) -> None:
    """They would be heard out for far longer than the coordinator is ready to wait."""
    identity = Identity(credentials=credentials)
    hour = Deadlines(connect_seconds=3600.0)
    with worker_thread(credentials, hour) as address, ExitStack() as strangers:
        where = (address.host, address.port)
        for _ in range(num_strangers):
            strangers.enter_context(socket.create_connection(where, PATIENCE_SECONDS))
        # On a busy machine, sending so many strangers away takes seconds.
        minute = replace(QUICK, connect_seconds=60.0)
        channel, _ = dial(address, "coordinator", "a", minute, identity)
        channel.start(SimpleQueue())
        channel.close(m.Goodbye())


def test_a_session_knows_its_neighbor_before_the_neighbor_may_speak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator may tell the session of the neighbor as soon as that one has its Welcome."""
    known: list[int] = []

    def noting(connection: Connection, buffers: list[memoryview], seconds: float) -> None:
        session = worker._session
        known.append(0 if session is None else len(session._neighbors.upstream))
        send_buffers(connection, buffers, seconds)

    with serving_worker(deadlines=QUICK) as (worker, address):
        monkeypatch.setattr(worker_module, "send_buffers", noting)
        coordinator, _ = dial(address, "coordinator", "a", QUICK, Identity())
        coordinator.start(SimpleQueue())
        upstream, _ = dial(address, "neighbor", "a", QUICK, Identity(), member=2)
        upstream.start(SimpleQueue())
        # What each Welcome found: the coordinator's, and that of the neighbor.
        assert known == [0, 1]
        upstream.close(m.Goodbye())
        coordinator.close(m.Goodbye())


def test_a_worker_may_listen_beyond_loopback_with_a_token() -> None:
    credentials = Credentials(Token.new())
    with listen(Address("0.0.0.0", 0), credentials) as listener:  # noqa: S104
        assert not address_of(listener).is_loopback
