"""Asking a worker what it does, from outside of its run."""

from __future__ import annotations

from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ...errors import WorkerUnreachable
from ...protocol import messages as m
from ...protocol.frames import Frame
from ...protocol.session import watcher_session
from ...transport.address import Address
from ...transport.channel import Inbox
from ...transport.deadlines import Deadlines
from ...transport.handshake import Identity, dial


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker is, and what it does."""

    equipment: m.Equipment
    status: m.Status


def ask_status(address: Address, deadlines: Deadlines, identity: Identity) -> WorkerStatus:
    """What a worker does now. Its run, if it has one, goes on meanwhile.

    Raises:
        WorkerUnreachable: If it does not answer, or refuses.
    """
    inbox: Inbox = SimpleQueue()
    rules = watcher_session()
    channel, welcome = dial(address, rules, "watcher", "", deadlines, identity)
    channel.start(inbox)
    try:
        content = inbox.get(timeout=deadlines.connect_seconds).content
    except Empty:
        content = None
    finally:
        channel.close()
    if isinstance(content, Frame) and isinstance(content.message, m.Status):
        return WorkerStatus(welcome.equipment, content.message)
    said = content.message if isinstance(content, Frame) else content
    raise WorkerUnreachable(
        f"The worker at {address} did not say what it does: {said or 'nothing came'}."
    )
