"""In-memory twins: two channels wired together, and a worker in a thread of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple

import torch

from lightning_hetero.model.imports import Allowed
from lightning_hetero.runtime.address import Address
from lightning_hetero.runtime.channel import Arrival, Channel, Inbox
from lightning_hetero.runtime.deadlines import Deadlines
from lightning_hetero.runtime.worker import Worker, address_of, listen
from lightning_hetero.wire import messages as m
from lightning_hetero.wire.frames import FrameReader
from lightning_hetero.wire.session import Session, downstream_session, upstream_session

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
    up, down = upstream_session(), downstream_session()
    hello = m.Hello(m.PROTOCOL_VERSION, "neighbor", "session", "0")
    welcome = m.Welcome("cpu", "0")
    up.sent(hello)
    down.received(hello)
    down.sent(welcome)
    up.received(welcome)
    return up, down


@contextmanager
def one_end(deadlines: Deadlines = QUICK) -> Iterator[tuple[End, socket.socket]]:
    """The downstream end, and the bare socket of whoever is upstream."""
    mine, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_SECONDS)
    _, down = linked_sessions()
    end = End(Channel(mine, down, FrameReader(), "upstream", deadlines), SimpleQueue())
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
        channel = Channel(connection, session, FrameReader(), "the other", deadlines)
        ends.append(End(channel, SimpleQueue()))
    for end in ends:
        end.channel.start(end.inbox)
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.channel.close()


@contextmanager
def worker_thread(allowed: Allowed | None = None) -> Iterator[Address]:
    """A worker that serves from a thread of this process, over a real loopback socket."""
    listener = listen(Address("127.0.0.1", 0))
    # Patient: both ends share one interpreter, which may be busy building a model for a while.
    worker = Worker(listener, torch.device("cpu"), Deadlines(busy_seconds=0.2), allowed)
    address = address_of(listener)
    thread = threading.Thread(target=worker.serve_forever, daemon=True)
    thread.start()
    try:
        yield address
    finally:
        worker.stop()
        thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
