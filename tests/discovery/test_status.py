"""Watching workers over a second connection, which does not disturb their runs."""

from __future__ import annotations

import platform
import socket
from dataclasses import replace
from queue import SimpleQueue

import pytest

from lightning_hetero.discovery.status import Sighting, ask_status, seen_again
from lightning_hetero.errors import WorkerUnreachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.handshake import Identity, dial
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token

from ..transport.pairs import QUICK, worker_thread
from .answers import answer


def test_a_free_worker_tells_its_state_and_equipment() -> None:
    with worker_thread() as address:
        found = ask_status(address, QUICK, Identity())
    assert found.status.stage is None
    assert found.status.used_bytes > 2**20
    assert found.equipment.device == "cpu"
    assert found.equipment.host == platform.node()
    assert found.equipment.machine


def test_a_busy_worker_answers_and_its_run_goes_on() -> None:
    with worker_thread() as address:
        channel, _ = dial(address, "coordinator", "a" * 32, QUICK, Identity())
        inbox: SimpleQueue[object] = SimpleQueue()
        channel.start(inbox)  # type: ignore[arg-type]
        first, second = (
            ask_status(address, QUICK, Identity()),
            ask_status(address, QUICK, Identity()),
        )
        channel.send(m.DescribeDevice())
        assert inbox.get(timeout=20).content.message.device  # type: ignore[attr-defined]
        measured = ask_status(address, QUICK, Identity())
        channel.close(m.Goodbye())
    assert Sighting("w:1", first).state == "in a run"
    assert Sighting("w:1", measured).state == "measuring"
    assert first.status.stage is not None
    assert second.status.stage is not None
    # Enough to tell runs apart, and too little to join one.
    assert first.status.stage.run == "a" * 8
    assert first.status.stage.links[0].peer == "coordinator"
    assert second.status.moment_seconds >= first.status.moment_seconds


def test_status_needs_the_token() -> None:
    credentials = Credentials(Token.new())
    with worker_thread(credentials) as address:
        assert ask_status(address, QUICK, Identity(credentials=credentials)).status.stage is None
        with pytest.raises(WorkerUnreachable, match="token"):
            ask_status(address, QUICK, Identity())
        with pytest.raises(WorkerUnreachable, match="do not trust each other"):
            ask_status(address, QUICK, Identity(credentials=Credentials(Token.new())))


def test_a_worker_may_go_and_come_back_on_its_address() -> None:
    def look(last: Sighting, address: Address) -> Sighting:
        try:
            return seen_again(last, ask_status(address, QUICK, Identity()))
        except WorkerUnreachable as error:
            return seen_again(last, str(error))

    with worker_thread() as address:
        seen = look(Sighting(str(address)), address)
    gone = look(seen, address)
    with worker_thread(where=address):
        back = look(gone, address)
    assert [each.state for each in (seen, gone, back)] == ["free", "gone", "free"]
    assert f"No worker answers at {address}" in gone.problem


def test_an_absent_worker_is_named_by_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(WorkerUnreachable, match=f"No worker answers at 127.0.0.1:{port}"):
        ask_status(Address("127.0.0.1", port), QUICK, Identity())


def test_the_first_look_averages_over_the_run_and_the_next_over_the_time_between() -> None:
    first = seen_again(Sighting("w"), answer(10.0, busy=2.0, training=8.0, sent=100))
    assert first.busy_share == 0.25
    assert first.traffic == []
    second = seen_again(first, answer(12.0, busy=3.0, training=10.0, sent=300))
    assert second.busy_share == 0.5
    assert (second.traffic[0].sent, second.traffic[0].received) == (100.0, 200.0)


def test_without_a_step_since_the_share_stays() -> None:
    first = seen_again(Sighting("w"), answer(10.0, busy=2.0, training=8.0))
    assert seen_again(first, answer(11.0, busy=2.0, training=8.0)).busy_share == 0.25


def test_another_run_begins_anew() -> None:
    first = seen_again(Sighting("w"), answer(10.0, busy=9.0, training=9.0, sent=10**9))
    second = seen_again(first, answer(11.0, busy=0.1, training=1.0, run="b"))
    assert second.busy_share == pytest.approx(0.1)
    assert second.traffic == []


def test_a_worker_that_vanishes_is_gone_and_comes_back() -> None:
    seen = seen_again(Sighting("w"), answer(10.0, 1.0, 2.0))
    gone = seen_again(seen_again(seen, "No worker answers."), "No worker answers.")
    assert (gone.state, gone.num_missed, gone.traffic) == ("gone", 2, [])
    back = seen_again(gone, answer(1.0, 0.5, 1.0, run="b"))
    assert (back.state, back.problem, back.busy_share) == ("training", "", 0.5)
    assert replace(back, seen=None).stage is None


def test_a_worker_that_never_answered_is_not_there() -> None:
    assert seen_again(Sighting("w"), "No worker answers.").state == "not there"
