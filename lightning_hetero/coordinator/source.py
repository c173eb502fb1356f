"""Where the coordinator finds its workers: at addresses that it dials, or at the door.

A worker has a name of its own there, by which another process of it is found again after a loss.
The door, where workers wait that have dialled this process, is `launch.join.Door`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..protocol import messages as m
from ..transport.address import Address
from ..transport.channel import Channel
from ..transport.deadlines import Deadlines
from ..transport.handshake import Identity, dial


class Source(Protocol):
    """Where workers are found, by names of their own."""

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


@dataclass(frozen=True)
class Listening:
    """Workers that listen, each at an address that stays.

    Args:
        addresses: By the workers' own names.
        deadlines: How long each kind of waiting may take.
        identity: What this process shows to the workers.
    """

    addresses: Mapping[str, Address]
    deadlines: Deadlines
    identity: Identity

    def names(self) -> Sequence[str]:
        """All of them, as nobody knows which of them run."""
        return list(self.addresses)

    def admit(self, name: str, session_name: str) -> tuple[Channel, m.Welcome, Address]:
        """Dial a worker's address; see `Source`."""
        address = self.addresses[name]
        return *self.admit_beside(address, session_name), address

    def admit_beside(self, address: Address, session_name: str) -> tuple[Channel, m.Welcome]:
        """Dial a second process; see `Source`."""
        return dial(address, "coordinator", session_name, self.deadlines, self.identity)
