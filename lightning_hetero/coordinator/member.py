"""Members: the workers of a run as the coordinator sees them, and where it finds them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..protocol import messages as m
from ..protocol.values import SentConstants
from ..transport.address import Address, advice
from .roster import Roster, Row

if TYPE_CHECKING:
    from ..transport.channel import Channel


# An open conversation: the channel, not started yet; the worker's Welcome; where it listens now.
Admitted = tuple["Channel", m.Welcome, Address]

# Opens the conversation of a name.
Admit = Callable[[str], Admitted]


@dataclass(eq=False)
class Member:
    """A worker of the run as the coordinator sees it, and the conversation with it.

    Attributes:
        name: Its name in plans.
        roster: Knows its present state.
        address: Where it listens.
        channel: The conversation.
        equipment: Its hardware and software.
        session: The name of the conversation; a neighbor names it to reach the right worker.
    """

    name: str
    roster: Roster
    address: Address
    channel: Channel
    equipment: m.Equipment
    session: str
    constants: SentConstants = field(default_factory=SentConstants)
    # The writing thread of the channel reads the constants too.
    constants_lock: threading.Lock = field(default_factory=threading.Lock)

    def go_on_with(self, opened: tuple[Channel, m.Equipment, Address, str]) -> None:
        """Another process is in its place from now on."""
        self.channel, self.equipment, self.address, self.session = opened

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
        """Send every constant again: the worker may have only some of them."""
        with self.constants_lock:
            self.constants.clear()

    @property
    def is_cut_off(self) -> bool:
        """Whether a connection of it is broken, and may come back."""
        return self.channel.is_away or bool(self.row.is_apart_from)

    @property
    def last_known(self) -> str:
        """A sentence about the worker's latest reported activity; empty without a report."""
        activity = self.channel.peer_activity
        return f"The last that is known of {self} is {activity}." if activity else ""

    @property
    def advice(self) -> str:
        """A sentence on how to check the way to the worker; empty for a process of this run."""
        return advice(self.address) if self.name == str(self.address) else ""

    @property
    def where(self) -> str:
        """Its name in plans, and its address if it differs."""
        return self.name if self.name == str(self.address) else f"{self.name} ({self.address})"

    def __str__(self) -> str:
        what = f"stage {' and '.join(map(str, self.stages))}" if self.stages else "the worker"
        return f"{what} on {self.where}"


def say_goodbye(members: Iterable[Member]) -> None:
    """End the conversations with some workers in good order; ended conversations stay ended."""
    for worker in members:
        worker.channel.close(m.Goodbye())


class Source(Protocol):
    """Where the coordinator finds its workers: at addresses to dial, or at the door.

    A worker has a name of its own there; after a loss, another process of it is found again by this
    name. Workers that have dialled this process wait at the door, `launch.join.Door`.
    """

    def names(self) -> Sequence[str]:
        """The workers that may be there now."""

    def admit(self, name: str, session_name: str) -> Admitted:
        """Open a conversation with a worker.

        Args:
            name: The worker's own name.
            session_name: The name of the conversation.

        Raises:
            WorkerUnreachable: If it does not answer or refuses.
        """

    def admit_beside(self, address: Address, session_name: str) -> tuple[Channel, m.Welcome]:
        """Open the conversation with a second process of a worker.

        Args:
            address: Where the worker listens, and its second process too.
            session_name: The name of the conversation.

        Raises:
            WorkerUnreachable: If it does not answer or refuses.
        """
