"""Conversations are opened over loopback, or are refused with the reason."""

from __future__ import annotations

import socket
import threading
import traceback
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NoReturn

import pytest

from lightning_hetero.errors import WorkerUnreachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame, encode_frame
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.handshake import dial
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token

from .pairs import QUICK, closed_address, worker_thread


def test_a_worker_welcomes_a_coordinator_with_its_device() -> None:
    with worker_thread() as address:
        channel, welcome = dial(address, "coordinator", "a", QUICK, Identity())
        assert welcome.equipment.device == "cpu"
        channel.start(SimpleQueue())
        channel.close()


def test_an_address_without_a_listener_is_unreachable() -> None:
    address = closed_address()
    with pytest.raises(WorkerUnreachable, match=f"No worker answers at {address}") as caught:
        dial(address, "coordinator", "a", QUICK, Identity())
    assert str(caught.value).endswith(
        f"`lightning-hetero doctor {address}` checks each hop of the way there."
    )
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


def test_a_host_name_that_cannot_be_resolved_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_where: Any, **_options: Any) -> NoReturn:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "create_connection", fails)
    address, ours = Address("strixx.local", 9999), Identity(credentials=Credentials(Token.new()))
    with pytest.raises(WorkerUnreachable) as caught:
        dial(address, "coordinator", "a", QUICK, ours)
    text = str(caught.value)
    assert "'strixx.local' of strixx.local:9999 cannot be resolved on this machine: Temp" in text
    assert "lightning-hetero doctor strixx.local:9999" in text
    assert "lightning-hetero worker" not in text


def test_another_server_is_no_worker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 mail.example ESMTP ready, who are you?\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WorkerUnreachable, match="did not answer as a worker"):
            dial(
                Address(*listener.getsockname()),
                "coordinator",
                "a",
                QUICK,
                Identity(),
            )
        thread.join()


def test_a_neighbor_of_an_unknown_session_is_refused() -> None:
    with (
        worker_thread() as address,
        pytest.raises(WorkerUnreachable, match="or the address leads to another worker"),
    ):
        dial(address, "neighbor", "unknown", QUICK, Identity())


def test_silence_ends_with_the_deadline() -> None:
    quick = replace(QUICK, connect_seconds=0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(WorkerUnreachable, match=r"Nothing came within 0\.1 s"),
    ):
        dial(
            Address(*listener.getsockname()),
            "coordinator",
            "a",
            quick,
            Identity(),
        )


LATER = m.Equipment(versions={"lightning-hetero": "9.0", "transformers": "6.0.0"})


@pytest.mark.parametrize(
    ("protocol", "equipment", "expected"),
    [
        (99, m.Equipment(), r"coordinator speaks protocol \d+ .* and the worker at .* 99"),
        (0, m.Equipment(), r"speaks protocol \d+ .* and the worker at .* 0 .* install the same"),
        (m.PROTOCOL_VERSION, LATER, r"transformers 5\.0\.0 and the worker at .* has 6\.0\.0"),
    ],
    ids=["newer protocol", "older protocol", "model code"],
)
def test_a_worker_that_welcomes_what_it_cannot_work_with_is_refused(
    protocol: int, equipment: m.Equipment, expected: str
) -> None:
    ours = Identity(m.Equipment(versions={"transformers": "5.0.0"}))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                for buffer in encode_frame(Frame(m.Welcome(protocol, equipment))):
                    connection.sendall(buffer)
                connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        address = Address(*listener.getsockname())
        with pytest.raises(WorkerUnreachable, match=expected):
            dial(address, "coordinator", "a", QUICK, ours)
        thread.join()


def test_a_worker_refuses_another_model_code_and_says_so() -> None:
    identity = Identity(LATER)
    expected = r"refused: The worker has transformers 5.* and the coordinator has 6\.0\.0"
    with worker_thread() as address:
        with pytest.raises(WorkerUnreachable, match=expected):
            dial(address, "coordinator", "a", QUICK, identity)
        channel, _ = dial(address, "coordinator", "a", QUICK, Identity())
        channel.start(SimpleQueue())
        channel.close()
