"""The lobby is small, and whoever only takes room in it has to go."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from queue import SimpleQueue

import pytest

from lightning_hetero.errors import WorkerError, WorkerUnreachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import Identity, address_of, dial, listen
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token
from lightning_hetero.worker.worker import Lobby, RefusalLog

from ..transport.pairs import PATIENCE_SECONDS, QUICK, MemoryConnection, memory_pair, worker_thread


def visitors(count: int) -> list[MemoryConnection]:
    return [memory_pair()[0] for _ in range(count)]


def is_gone(connection: MemoryConnection) -> bool:
    return connection._is_over


def enter_and_leave(lobby: Lobby, connection: MemoryConnection) -> threading.Thread:
    """Enter, and leave as soon as the connection is shut down, as a greeting does."""
    lobby.enter(connection)

    def greet() -> None:
        connection.receive_into(memoryview(bytearray(1)))
        lobby.leave(connection)

    thread = threading.Thread(target=greet)
    thread.start()
    return thread


def test_the_stranger_that_is_there_longest_goes_for_a_newcomer() -> None:
    lobby, guests = Lobby(3), visitors(5)
    threads = [enter_and_leave(lobby, guest) for guest in guests]
    assert [is_gone(guest) for guest in guests] == [True, True, False, False, False]
    for guest in guests:
        guest.shut_down()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_whoever_has_said_who_it_is_stays() -> None:
    lobby, guests = Lobby(2), visitors(3)
    threads = [enter_and_leave(lobby, guest) for guest in guests[:2]]
    lobby.introduce(guests[0])
    threads.append(enter_and_leave(lobby, guests[2]))
    assert [is_gone(guest) for guest in guests] == [False, True, False]
    for guest in guests:
        guest.shut_down()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)


def test_a_newcomer_waits_for_those_who_stay() -> None:
    lobby, (known, newcomer) = Lobby(1), visitors(2)
    lobby.enter(known)
    lobby.introduce(known)
    entered = threading.Event()

    def come() -> None:
        lobby.enter(newcomer)
        entered.set()

    thread = threading.Thread(target=come)
    thread.start()
    assert not entered.is_set()
    lobby.leave(known)
    assert entered.wait(PATIENCE_SECONDS)
    thread.join()
    assert not is_gone(known)


class Clock:
    """A clock that a test sets."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines since the last call."""
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_an_address_has_one_line_in_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = RefusalLog(clock)
    for port in range(1, 1001):
        log.note("10.0.0.1", port, f"reason {port}.")
    log.note("10.0.0.2", 7, "another.")
    first = "connection from 10.0.0.1:1 refused: reason 1."
    assert lines_of(caplog) == [first, "connection from 10.0.0.2:7 refused: another."]
    clock.seconds = 59.9
    log.tell_left_out()
    assert not lines_of(caplog)
    clock.seconds = 60.0
    log.tell_left_out()
    told = "connections from 10.0.0.1 refused in 60 s without a line: 999, the last: reason 1000."
    assert lines_of(caplog) == [told]
    log.note("10.0.0.1", 8, "again.")
    assert not lines_of(caplog), "that line was the one of the second minute"
    log.note("10.0.0.2", 9, "later.")
    assert lines_of(caplog) == ["connection from 10.0.0.2:9 refused: later."]
    clock.seconds = 120.0
    log.tell_left_out()
    assert lines_of(caplog) == [
        "connections from 10.0.0.1 refused in 60 s without a line: 1, the last: again."
    ]
    clock.seconds = 180.0
    log.tell_left_out()
    log.note("10.0.0.1", 10, "new.")
    assert lines_of(caplog) == ["connection from 10.0.0.1:10 refused: new."]


def test_any_number_of_addresses_have_a_bounded_number_of_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    log = RefusalLog(clock)
    for number in range(10_000):
        log.note(f"fd00::{number:x}", 1, "no token.")
    assert len(lines_of(caplog)) == 129
    clock.seconds = 61.0
    log.tell_left_out()
    told = (
        "connections from other addresses refused in 61 s without a line: 9871, the last: no token."
    )
    assert lines_of(caplog) == [told]


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


def test_a_port_in_use_is_named() -> None:
    with listen(Address("127.0.0.1", 0)) as listener:
        taken = address_of(listener)
        expected = f"Cannot listen on {taken}: another process .* Choose another one .*`--listen"
        with pytest.raises(WorkerError, match=expected):
            listen(taken)


def test_one_coordinator_at_a_time_and_then_the_next() -> None:
    with worker_thread() as address:
        first, _ = dial(address, "coordinator", "a", QUICK, Identity())
        first.start(SimpleQueue())
        with pytest.raises(WorkerUnreachable, match="busy with another coordinator"):
            dial(address, "coordinator", "b", QUICK, Identity())
        first.close(m.Goodbye())
        second, _ = dial(address, "coordinator", "c", QUICK, Identity())
        second.start(SimpleQueue())
        second.close()


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
        six_seconds = replace(QUICK, connect_seconds=6.0)
        channel, _ = dial(address, "coordinator", "a", six_seconds, identity)
        channel.start(SimpleQueue())
        channel.close(m.Goodbye())


def test_a_worker_may_listen_beyond_loopback_with_a_token() -> None:
    credentials = Credentials(Token.new())
    with listen(Address("0.0.0.0", 0), credentials) as listener:  # noqa: S104
        assert not address_of(listener).is_loopback
