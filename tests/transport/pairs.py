"""In-memory twins: two channels wired together, and a worker in a thread of this process."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple

import torch

from lightning_hetero.model.allowed_imports import Allowed
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.session import Session, answering_session, opening_session
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.channel import Arrival, Channel, Inbox
from lightning_hetero.transport.connection import MOST_BYTES_AT_ONCE, SocketConnection, Traffic
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import address_of, listen
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.worker.owner import Owner
from lightning_hetero.worker.worker import Worker

PATIENCE_SECONDS = 20.0
QUICK = Deadlines(
    connect_seconds=5.0, busy_seconds=0.2, heartbeat_seconds=0.02, silence_seconds=0.3
)


class End(NamedTuple):
    """One end of a pair, and what has arrived there."""

    channel: Channel
    inbox: Inbox

    def next(self) -> Arrival:
        return self.inbox.get(timeout=PATIENCE_SECONDS)


def linked_sessions() -> tuple[Session, Session]:
    """Two stages that have greeted each other."""
    up, down = opening_session("neighbor"), answering_session("neighbor")
    hello = m.Hello(m.PROTOCOL_VERSION, "neighbor", "session")
    welcome = m.Welcome(m.PROTOCOL_VERSION)
    up.sent(hello)
    down.received(hello)
    down.sent(welcome)
    up.received(welcome)
    return up, down


@contextmanager
def one_end(deadlines: Deadlines = QUICK) -> Iterator[tuple[End, socket.socket]]:
    """The downstream end, and the bare socket of its upstream peer."""
    mine, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_SECONDS)
    _, down = linked_sessions()
    end = End(Channel(SocketConnection(mine), down, "upstream", deadlines), SimpleQueue())
    end.channel.start(end.inbox)
    try:
        with theirs:
            yield end, theirs
    finally:
        end.channel.close()


@contextmanager
def channel_pair(deadlines: Deadlines = QUICK) -> Iterator[tuple[End, End]]:
    """An upstream and a downstream end, connected."""
    first, second = socket.socketpair()
    ends = []
    for connection, session in zip((first, second), linked_sessions(), strict=True):
        channel = Channel(SocketConnection(connection), session, "the other", deadlines)
        ends.append(End(channel, SimpleQueue()))
    for end in ends:
        end.channel.start(end.inbox)
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.channel.close()


class MemoryConnection:
    """One end of a connection within this process; it takes at most ``most_bytes`` at once."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._arrived = bytearray()
        self._is_over = False
        self._timeout_seconds = PATIENCE_SECONDS
        self.answer_seconds: float | None = None
        # What the peer's process has used whenever somebody looks; then it stays as it is.
        self.cpu_seconds: deque[float] = deque()
        self.other = self
        self.traffic = Traffic()

    def set_timeout(self, seconds: float) -> None:
        self._timeout_seconds = seconds

    def receive_into(self, buffer: memoryview, sure_bytes: int = 1) -> int:
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._arrived or self._is_over, self._timeout_seconds
            ):
                raise TimeoutError
            num_bytes = min(len(buffer), len(self._arrived))
            buffer[:num_bytes] = self._arrived[:num_bytes]
            del self._arrived[:num_bytes]
            self.traffic.received_bytes += num_bytes
            return num_bytes

    @property
    def has_ahead(self) -> bool:
        return False

    def send(self, buffers: Sequence[memoryview]) -> int:
        part = b"".join(buffers)[: self._most_bytes]
        with self.other._changed:
            if self.other._is_over:
                raise BrokenPipeError("the other end is closed")
            self.other._arrived += part
            self.other._changed.notify_all()
        self.traffic.sent_bytes += len(part)
        return len(part)

    def has_room(self) -> bool:
        return self._most_bytes >= MOST_BYTES_AT_ONCE

    def seconds_since_answer(self) -> float | None:
        return self.answer_seconds

    def peer_cpu_seconds(self) -> float | None:
        if len(self.cpu_seconds) > 1:
            return self.cpu_seconds.popleft()
        return self.cpu_seconds[0] if self.cpu_seconds else None

    def finish_sending(self) -> None:
        with self.other._changed:
            self.other._is_over = True
            self.other._changed.notify_all()

    def shut_down(self) -> None:
        for end in (self, self.other):
            with end._changed:
                end._is_over = True
                end._changed.notify_all()

    def close(self) -> None:
        self.shut_down()


class CutConnection(MemoryConnection):
    """One end of a connection that breaks after it has carried so many bytes.

    Args:
        most_bytes: The most that it takes at once.
        num_bytes: How many bytes it carries; None for any number.
        loses: Whether what the other end has not read yet is lost, as by a reset.
    """

    def __init__(self, most_bytes: int, num_bytes: int | None, loses: bool) -> None:
        super().__init__(most_bytes)
        self._left_bytes = num_bytes
        self._loses = loses

    def send(self, buffers: Sequence[memoryview]) -> int:
        if self._left_bytes is None:
            return super().send(buffers)
        part = memoryview(b"".join(buffers))[: self._left_bytes]
        num_bytes = super().send([part]) if part else 0
        self._left_bytes -= num_bytes
        if self._left_bytes == 0:
            if self._loses:
                with self.other._changed:
                    self.other._arrived.clear()
            self.shut_down()
            raise ConnectionResetError("the connection was cut")
        return num_bytes


def memory_pair(most_bytes: int = 2**30) -> tuple[MemoryConnection, MemoryConnection]:
    """Two ends that are connected."""
    one, other = MemoryConnection(most_bytes), MemoryConnection(most_bytes)
    one.other, other.other = other, one
    return one, other


@contextmanager
def worker_thread(
    credentials: Credentials | None = None,
    deadlines: Deadlines | None = None,
    allowed: Allowed | None = None,
    where: Address | None = None,
) -> Iterator[Address]:
    """A worker that serves from a thread of this process, over a real loopback socket."""
    with serving_worker(credentials, deadlines, allowed, where=where) as (_, address):
        yield address


@contextmanager
def serving_worker(
    credentials: Credentials | None = None,
    deadlines: Deadlines | None = None,
    allowed: Allowed | None = None,
    owner: Owner | None = None,
    where: Address | None = None,
) -> Iterator[tuple[Worker, Address]]:
    """A worker that serves from a thread of this process, and its address."""
    listener = listen(where or Address("127.0.0.1", 0))
    # Patient: both ends share one interpreter, which may be busy building a model for a while.
    deadlines = deadlines or Deadlines(busy_seconds=0.2)
    worker = Worker(listener, torch.device("cpu"), deadlines, allowed, credentials, owner)
    address = address_of(listener)
    thread = threading.Thread(target=worker.serve_forever, daemon=True)
    thread.start()
    try:
        yield worker, address
    finally:
        worker.stop()
        thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def closed_address() -> Address:
    """An address on loopback at which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Address(*listener.getsockname())
