"""Watching workers over a second connection, which does not disturb their runs."""

from __future__ import annotations

import platform
import socket
from queue import SimpleQueue

import pytest

from lightning_hetero.cli.top import WorkerSighting, seen_again
from lightning_hetero.discovery.find import ask_status
from lightning_hetero.errors import WorkerUnreachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.handshake import dial
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token
from lightning_hetero.worker import worker

from ..transport.pairs import QUICK, worker_thread


def test_a_free_worker_tells_its_state_and_equipment() -> None:
    with worker_thread() as address:
        found = ask_status(address, QUICK, Identity())
    assert found.status.stage is None
    assert found.status.used_bytes > 2**20
    assert found.equipment.device == "cpu"
    assert found.equipment.host == platform.node()
    assert found.equipment.machine


def test_a_free_worker_tells_for_a_while_whose_spare_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with worker_thread() as address:
        seen = ask_status(address, QUICK, Identity(), run="a1b2c3d4").status
        asked = ask_status(address, QUICK, Identity()).status
        monkeypatch.setattr(worker, "_SPARE_SECONDS", 0.0)
        ask_status(address, QUICK, Identity(), run="a1b2c3d4")
        later = ask_status(address, QUICK, Identity()).status
    for status in (seen, asked):
        assert status.spare is not None
        assert status.spare.run == "a1b2c3d4"
        assert status.spare.coordinator.startswith("127.0.0.1:")
    assert later.spare is None


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
        measured = ask_status(address, QUICK, Identity(), run="another")
        channel.close(m.Goodbye())
    assert WorkerSighting("w:1", first).state == "in a run"
    assert WorkerSighting("w:1", measured).state == "measuring"
    assert measured.status.spare is None
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
    def look(last: WorkerSighting, address: Address) -> WorkerSighting:
        try:
            return seen_again(last, ask_status(address, QUICK, Identity()))
        except WorkerUnreachable as error:
            return seen_again(last, str(error))

    with worker_thread() as address:
        seen = look(WorkerSighting(str(address)), address)
    gone = look(seen, address)
    with worker_thread(where=address):
        back = look(gone, address)
    assert [each.state for each in (seen, gone, back)] == ["free", "gone", "free"]
    assert f"No worker answers at {address}" in gone.problem


def test_an_absent_worker_is_named_by_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(WorkerUnreachable, match=f"No worker answers at 127.0.0.1:{port}") as caught:
        ask_status(Address("127.0.0.1", port), QUICK, Identity())
    # It may be the address that a worker which has joined has offered.
    for option in (f"`--listen 127.0.0.1:{port}`", "`--join`"):
        assert option in str(caught.value)
