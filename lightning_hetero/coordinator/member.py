"""Members: the workers of a run as the coordinator sees them, and where it finds them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..protocol import messages as m
from ..protocol.values import SentConstants
from ..transport.address import Address, advice
from .roster import Roster, Row

if TYPE_CHECKING:
    from ..pipeline.journal import Journal
    from ..transport.channel import Channel


@dataclass(eq=False)
class Member:
    """A worker of the run as the coordinator sees it, and the conversation with it.

    Attributes:
        name: Its name in plans.
        roster: Knows what it is at present.
        address: Where it listens.
        channel: The conversation.
        equipment: Its hardware and software.
        session: The name of the conversation, by which a neighbor shows that it means this worker.
        journal: The messages to it since its latest snapshot; None if they are not kept.
    """

    name: str
    roster: Roster
    address: Address
    channel: Channel
    equipment: m.Equipment
    session: str
    constants: SentConstants = field(default_factory=SentConstants)
    # The thread that writes to the channel reads the constants too.
    constants_lock: threading.Lock = field(default_factory=threading.Lock)
    journal: Journal | None = None

    @property
    def row(self) -> Row:
        """Its present state."""
        return self.roster.state.rows[self.name]

    @property
    def number(self) -> int:
        """See `Row`."""
        return self.row.number

    @property
    def stages(self) -> tuple[int, ...]:
        """See `Row`."""
        return self.row.stages

    def forget_constants(self) -> None:
        """Send every constant again: it is unknown which of them the worker has."""
        with self.constants_lock:
            self.constants.clear()

    @property
    def is_cut_off(self) -> bool:
        """Whether a connection of it is broken, and may come back."""
        return self.channel.is_away or bool(self.row.is_apart_from)

    @property
    def last_known(self) -> str:
        """A sentence about the latest activity that the worker told; empty if it told none."""
        activity = self.channel.peer_activity
        return f"The last that is known of {self} is {activity}." if activity else ""

    @property
    def advice(self) -> str:
        """A sentence on how to check the way to the worker; empty for a process of this run."""
        return advice(self.address) if self.name == str(self.address) else ""

    @property
    def where(self) -> str:
        """Its name in plans, and its address if it has another one."""
        return self.name if self.name == str(self.address) else f"{self.name} ({self.address})"

    def __str__(self) -> str:
        what = f"stage {' and '.join(map(str, self.stages))}" if self.stages else "the worker"
        return f"{what} on {self.where}"


def say_goodbye(members: Iterable[Member]) -> None:
    """End the conversations with some workers in good order; those that have ended stay so."""
    for worker in members:
        worker.channel.close(m.Goodbye())


class Source(Protocol):
    """Where the coordinator finds its workers: at addresses that it dials, or at the door.

    A worker has a name of its own there, by which another process of it is found again after a
    loss. The door, where workers wait that have dialled this process, is `launch.join.Door`.
    """

    def names(self) -> Sequence[str]:
        """The workers that may be there now."""

    def admit(self, name: str, session_name: str) -> tuple[Channel, m.Welcome, Address]:
        """Open a conversation with a worker.

        Args:
            name: The worker's own name.
            session_name: The name of the conversation.

        Returns:
            The channel, which is not started yet; the worker's Welcome; where it listens now.

        Raises:
            WorkerUnreachable: If it does not answer or refuses.
        """

    def admit_beside(self, address: Address, session_name: str) -> tuple[Channel, m.Welcome]:
        """Open the conversation that only a second process of a worker takes.

        Args:
            address: Where the worker listens, and its second process too.
            session_name: The name of the conversation.

        Raises:
            WorkerUnreachable: If it does not answer or refuses.
        """
