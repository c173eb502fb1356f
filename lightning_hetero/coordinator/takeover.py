"""A machine of the run that takes a lost worker's place beside its own, as nobody else can.

AskRoom ──▶ every machine ──▶ free bytes; the one with the most, if the layers fit
OpenSession ──▶ that machine starts a second process, which takes one session of this run
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from ..protocol import messages as m
from ..units import in_bytes
from .connections import Connections
from .member import Member

# Without a snapshot it is unknown what the optimizer keeps; Adam keeps two tensors for each one.
_STATES_EACH = 2

Machine = TypeVar("Machine")


def needed_bytes(parameters: Iterable[m.ParameterSpec], snapshot_bytes: int) -> int:
    """The least memory that a worker's layers take: weights, gradients and optimizer state.

    Args:
        parameters: The parameters of its stages.
        snapshot_bytes: The size of the worker's latest snapshot, which holds what trains with its
            optimizer state; 0 if there is none.
    """
    weights_bytes = trained_bytes = 0
    for spec in parameters:
        weights_bytes += spec.tensor.num_bytes
        trained_bytes += spec.tensor.num_bytes if spec.requires_grad else 0
    state_bytes = max(0, snapshot_bytes - trained_bytes)
    if snapshot_bytes == 0:
        state_bytes = _STATES_EACH * trained_bytes
    return weights_bytes + trained_bytes + state_bytes


def those_that_fit(
    offers: Sequence[tuple[Machine, int]], wanted_bytes: int
) -> list[tuple[Machine, int]]:
    """The machines whose free memory is enough, with the most free memory first.

    Args:
        offers: Each machine, with its free bytes; of equal ones the first stays first.
        wanted_bytes: The bytes needed by the layers.
    """
    fitting = [offer for offer in offers if offer[1] >= wanted_bytes]
    return sorted(fitting, key=lambda offer: -offer[1])


class Takeovers:
    """Lets machines of the run start second processes for lost workers.

    Args:
        connections: The workers.
        need_of: The least bytes that a worker's layers take.
    """

    def __init__(self, connections: Connections, need_of: Callable[[Member], int]) -> None:
        self._connections, self._requests = connections, connections.requests
        self._need_of = need_of

    def opened(
        self, worker: Member, lost: Collection[Member], reasons: list[str]
    ) -> Iterator[tuple[Member, str]]:
        """Open sessions for a lost worker beside others, one by one, until one serves.

        Args:
            worker: The lost one.
            lost: All that are lost; those of them that another process has replaced already are
                about to get their own layers.
            reasons: Gets a sentence for each machine that cannot take the place.

        Yields:
            The worker on whose machine a second process waits, and the name of its session.

        Raises:
            ChannelError: If another worker is lost meanwhile.
        """
        needed = self._need_of(worker)
        offers = [*self._offers(worker, lost, reasons)]
        for other, free_bytes in offers:
            if free_bytes < needed:
                reasons.append(
                    f"{other.address}: it has {in_bytes(free_bytes)} of memory left, and the "
                    f"layers take {in_bytes(needed)} at least."
                )
        for other, free_bytes in those_that_fit(offers, needed):
            session = self._connections.new_session_name()
            asked = self._requests.send_alone(other, m.OpenSession(session, free_bytes))
            answer = asked.alone(m.SessionOpened)
            if answer.reason:
                reasons.append(f"{other.address}: {answer.reason}")
            else:
                yield other, session

    def _offers(
        self, worker: Member, lost: Collection[Member], reasons: list[str]
    ) -> Iterator[tuple[Member, int]]:
        """The free memory of each machine of the run; else its reason."""
        for other in self._connections.members:
            # A second process starts no other one. A connection that may come back is waited for,
            # as the run needs it anyway.
            row = other.row
            if other is worker or row.is_beside or other.channel.is_over or row.is_paused:
                continue
            told = self._requests.send_alone(other, m.AskRoom()).alone(m.RoomTold)
            if told.reason:
                reasons.append(f"{other.address}: {told.reason}")
            else:
                yield other, told.free_bytes - (self._need_of(other) if other in lost else 0)
