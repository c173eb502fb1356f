"""The lobby is small, and whoever only takes room in it has to go; refusals fill no log."""

from __future__ import annotations

import threading

import pytest

from lightning_hetero.transport.reception import Lobby, RefusalLog

from .pairs import PATIENCE_SECONDS, MemoryConnection, memory_pair


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
    """The lines since the last call. Workers of earlier tests may still log theirs."""
    lines = [r.getMessage() for r in caplog.records if " from 127." not in r.getMessage()]
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
