"""The lobby is small, and whoever only takes room in it has to go."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from queue import SimpleQueue

import pytest

from lightning_hetero.errors import WorkerError, WorkerUnreachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import Identity, address_of, dial, listen
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token
from lightning_hetero.worker.worker import Lobby

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


@pytest.mark.parametrize("credentials", [None, Credentials(Token.new())], ids=["plain", "TLS"])
def test_silent_strangers_do_not_keep_others_out(credentials: Credentials | None) -> None:
    """They would be heard out for far longer than the coordinator is ready to wait."""
    identity = Identity(credentials=credentials)
    hour = Deadlines(connect_seconds=3600.0)
    with worker_thread(credentials, hour) as address, ExitStack() as strangers:
        where = (address.host, address.port)
        for _ in range(40):
            strangers.enter_context(socket.create_connection(where, PATIENCE_SECONDS))
        channel, _ = dial(address, "coordinator", "a", QUICK, identity)
        channel.start(SimpleQueue())
        channel.close(m.Goodbye())


def test_a_worker_may_listen_beyond_loopback_with_a_token() -> None:
    credentials = Credentials(Token.new())
    with listen(Address("0.0.0.0", 0), credentials) as listener:  # noqa: S104
        assert not address_of(listener).is_loopback
