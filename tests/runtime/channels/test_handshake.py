from __future__ import annotations

import socket
import threading
from dataclasses import replace
from queue import SimpleQueue

import pytest

from lightning_hetero.errors import WorkerUnreachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame, encode_frame
from lightning_hetero.protocol.session import coordinator_session, upstream_session
from lightning_hetero.runtime.channels.address import Address
from lightning_hetero.runtime.channels.handshake import Identity, dial

from ..pairs import QUICK, worker_thread


def closed_address() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Address(*listener.getsockname())


def test_a_worker_welcomes_a_coordinator_with_its_device() -> None:
    with worker_thread() as address:
        channel, welcome = dial(
            address, coordinator_session(), "coordinator", "a", QUICK, Identity()
        )
        assert welcome.equipment.device == "cpu"
        channel.start(SimpleQueue())
        channel.close()


def test_nobody_there() -> None:
    with pytest.raises(WorkerUnreachable, match="No worker answers at 127.0.0.1:"):
        dial(closed_address(), coordinator_session(), "coordinator", "a", QUICK, Identity())


def test_somebody_else_there() -> None:
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
                coordinator_session(),
                "coordinator",
                "a",
                QUICK,
                Identity(),
            )
        thread.join()


def test_a_stranger_to_the_session_is_refused() -> None:
    with worker_thread() as address, pytest.raises(WorkerUnreachable, match="session 'unknown'"):
        dial(address, upstream_session(), "neighbor", "unknown", QUICK, Identity())


def test_silence_ends_with_the_deadline() -> None:
    quick = replace(QUICK, connect_seconds=0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(WorkerUnreachable, match=r"Nothing came within 0\.1 s"),
    ):
        dial(
            Address(*listener.getsockname()),
            coordinator_session(),
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
            dial(address, coordinator_session(), "coordinator", "a", QUICK, ours)
        thread.join()


def test_a_worker_refuses_another_model_code_and_says_so() -> None:
    identity = Identity(LATER)
    expected = r"refused: The worker has transformers 5.* and the coordinator has 6\.0\.0"
    with worker_thread() as address:
        with pytest.raises(WorkerUnreachable, match=expected):
            dial(address, coordinator_session(), "coordinator", "a", QUICK, identity)
        channel, _ = dial(address, coordinator_session(), "coordinator", "a", QUICK, Identity())
        channel.start(SimpleQueue())
        channel.close()
