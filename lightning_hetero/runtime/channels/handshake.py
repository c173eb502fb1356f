"""How a conversation is opened: dial, TLS, Hello, Welcome, each within its deadline."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from typing import Literal

from ...errors import ChannelError, RemoteProtocolError, TrustError, WorkerUnreachable
from ...protocol import messages as m
from ...protocol.frames import Frame, OpeningReader, encode_frame
from ...protocol.session import Session
from .address import Address
from .channel import Channel, receive_some, send_buffers
from .compatibility import Party, obstacles
from .connection import Connection, SocketConnection, prepare_socket
from .deadlines import Deadlines
from .tls import Credentials, secured

Role = Literal["coordinator", "neighbor", "watcher"]

# What people call whoever plays a role.
ROLES: dict[str, str] = {
    "coordinator": "the coordinator",
    "neighbor": "the upstream worker",
    "watcher": "the watcher",
}


@dataclass(frozen=True)
class Identity:
    """What this process shows to whoever it talks to.

    Args:
        equipment: What it runs on.
        credentials: That it has the token, or None if it has none.
    """

    equipment: m.Equipment = field(default_factory=m.Equipment)
    credentials: Credentials | None = None


def dial(
    address: Address,
    session: Session,
    role: Role,
    session_name: str,
    deadlines: Deadlines,
    identity: Identity,
) -> tuple[Channel, m.Welcome]:
    """Connect to a worker and agree on a conversation; the channel is not started yet.

    Raises:
        WorkerUnreachable: If nobody answers there, or one of the two refuses.
    """
    if identity.credentials is None and not address.is_loopback:
        raise WorkerUnreachable(
            f"The worker at {address} is on another machine, and nothing is said to one without a "
            "token: make one with `lightning-hetero token`, copy it to all machines, and name its "
            "file with `token_file=`."
        )
    plain = _connect(address, deadlines)
    try:
        seconds = deadlines.connect_seconds
        connection = secured(plain, identity.credentials, is_server=False, patience_seconds=seconds)
        hello = m.Hello(m.PROTOCOL_VERSION, role, session_name, identity.equipment)
        welcome = _ask_to_talk(connection, session, hello, address, seconds)
    except TrustError as error:
        plain.close()
        raise WorkerUnreachable(
            f"The worker at {address} and this process do not trust each other. {error}"
        ) from error
    except (OSError, ChannelError, RemoteProtocolError) as error:
        plain.close()
        raise WorkerUnreachable(
            f"What listens at {address} did not answer as a worker: {error}"
        ) from error
    except WorkerUnreachable:
        plain.close()
        raise
    return Channel(connection, session, str(address), deadlines), welcome


def receive_hello(connection: Connection, deadlines: Deadlines, identity: Identity) -> m.Hello:
    """The first message of whoever connected.

    Raises:
        ChannelError: If it does not come in time.
        TrustError: If it comes under TLS, and we have no token.
        RemoteProtocolError: If it is something else, or of somebody we cannot work with.
    """
    hello = receive_opening(connection, deadlines.connect_seconds)
    if not isinstance(hello, m.Hello):
        raise RemoteProtocolError(f"A conversation opens with Hello, not with {hello}.")
    here = Party("the worker", m.PROTOCOL_VERSION, identity.equipment)
    there = Party(ROLES.get(hello.role, "the peer"), hello.protocol, hello.equipment)
    if found := obstacles(here, there):
        raise RemoteProtocolError(" ".join(found))
    if hello.role not in ROLES:
        raise RemoteProtocolError(
            f"This worker talks to a {' or a '.join(ROLES)}, and not to a {hello.role!r}."
        )
    return hello


def _connect(address: Address, deadlines: Deadlines) -> SocketConnection:
    try:
        host_and_port = (address.host, address.port)
        connected = socket.create_connection(host_and_port, deadlines.connect_seconds)
        prepare_socket(connected)
    except OSError as error:
        raise WorkerUnreachable(
            f"No worker answers at {address}: {error}. Is `lightning-hetero worker --listen "
            f"{address}` running there?"
        ) from error
    return SocketConnection(connected)


def _ask_to_talk(
    connection: Connection, session: Session, hello: m.Hello, address: Address, seconds: float
) -> m.Welcome:
    session.sent(hello)
    send_buffers(connection, encode_frame(Frame(hello)), seconds)
    answer = receive_opening(connection, seconds)
    if not isinstance(answer, m.Welcome):
        reason = answer.reason if isinstance(answer, m.Failure) else str(answer)
        raise WorkerUnreachable(f"The worker at {address} refused: {reason}")
    here = Party(ROLES[hello.role], hello.protocol, hello.equipment)
    there = Party(f"the worker at {address}", answer.protocol, answer.equipment)
    if found := obstacles(here, there):
        raise WorkerUnreachable(" ".join(found))
    session.received(answer)
    return answer


def receive_opening(
    connection: Connection, patience_seconds: float, reader: OpeningReader | None = None
) -> m.Message:
    """The first message that comes: a Hello, or what answers one.

    Raises:
        ChannelError: If none comes in time, or the peer ends the connection.
        TrustError: If it comes under TLS, and we have no token.
        RemoteProtocolError: If it is something else.
    """
    reader = reader or OpeningReader()
    end = time.monotonic() + patience_seconds
    while (left_seconds := end - time.monotonic()) > 0:
        connection.set_timeout(left_seconds)
        try:
            frame = receive_some(connection, reader)
        except TimeoutError:
            break
        if frame is not None:
            return frame.message
    raise ChannelError(f"Nothing came within {patience_seconds} s.")
