"""How a conversation is opened: dial, Hello, Welcome, each within its deadline."""

from __future__ import annotations

import socket
import time
from typing import Literal

import torch

from ..errors import ChannelError, RemoteProtocolError, WorkerUnreachable
from ..wire import messages as m
from ..wire.frames import Frame, FrameLimits, FrameReader, encode_frame
from ..wire.session import Session
from .address import Address
from .channel import Channel, prepare_socket, receive_some, send_buffers
from .deadlines import Deadlines

# A stranger's first frame is small: nobody may make us take memory before we know the role.
_HELLO_LIMITS = FrameLimits(header_bytes=64 * 2**10, body_bytes=0)


def dial(
    address: Address,
    session: Session,
    role: Literal["coordinator", "neighbor"],
    session_name: str,
    deadlines: Deadlines,
) -> tuple[Channel, m.Welcome]:
    """Connect to a worker and agree on a conversation; the channel is not started yet.

    Raises:
        WorkerUnreachable: If nobody answers there, or the worker refuses.
    """
    try:
        host_and_port = (address.host, address.port)
        connection = socket.create_connection(host_and_port, deadlines.connect_seconds)
    except OSError as error:
        raise WorkerUnreachable(
            f"No worker answers at {address}: {error}. Is `lightning-hetero worker --listen "
            f"{address}` running there?"
        ) from error
    try:
        prepare_socket(connection)
        hello = m.Hello(m.PROTOCOL_VERSION, role, session_name, str(torch.__version__))
        session.sent(hello)
        send_buffers(connection, encode_frame(Frame(hello)), deadlines.connect_seconds)
        reader = FrameReader()
        answer = _receive_one(connection, reader, deadlines.connect_seconds)
        session.received(answer)
        if not isinstance(answer, m.Welcome):
            reason = answer.reason if isinstance(answer, m.Failure) else str(answer)
            raise WorkerUnreachable(f"The worker at {address} refused: {reason}")
    except (OSError, ChannelError, RemoteProtocolError) as error:
        connection.close()
        raise WorkerUnreachable(
            f"What listens at {address} did not answer as a worker: {error}"
        ) from error
    except WorkerUnreachable:
        connection.close()
        raise
    return Channel(connection, session, reader, str(address), deadlines), answer


def receive_hello(connection: socket.socket, deadlines: Deadlines) -> tuple[m.Hello, FrameReader]:
    """The first message of whoever connected.

    Raises:
        ChannelError: If it does not come in time.
        RemoteProtocolError: If it is something else, or of another version.
    """
    hello = _receive_one(connection, FrameReader(_HELLO_LIMITS), deadlines.connect_seconds)
    if not isinstance(hello, m.Hello):
        raise RemoteProtocolError(f"A conversation opens with Hello, not with {hello}.")
    if hello.protocol != m.PROTOCOL_VERSION:
        raise RemoteProtocolError(
            f"You speak protocol {hello.protocol}, this worker speaks {m.PROTOCOL_VERSION}; "
            "install the same version of lightning-hetero on both."
        )
    return hello, FrameReader()


def _receive_one(
    connection: socket.socket, reader: FrameReader, patience_seconds: float
) -> m.Message:
    end = time.monotonic() + patience_seconds
    while (left_seconds := end - time.monotonic()) > 0:
        connection.settimeout(left_seconds)
        try:
            frame = receive_some(connection, reader)
        except TimeoutError:
            break
        if frame is not None:
            return frame.message
    raise ChannelError(f"Nothing came within {patience_seconds} s.")
