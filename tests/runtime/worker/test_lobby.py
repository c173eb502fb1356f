"""The lobby is small, and whoever only takes room in it has to go."""

from __future__ import annotations

import threading

from lightning_hetero.runtime.worker.lobby import Lobby

from ...transport.pairs import PATIENCE_SECONDS, MemoryConnection, memory_pair


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
