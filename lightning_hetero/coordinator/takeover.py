"""A machine of the run that takes a lost worker's place beside its own, as nobody else can.

AskRoom ──▶ every machine ──▶ free bytes; the one with the most, if the layers fit
OpenSession ──▶ that machine starts a second process, which takes one session of this run
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from ..errors import WorkerUnreachable
from ..protocol import messages as m
from ..transport.address import Address
from ..units import in_bytes
from .connections import Connections
from .member import Member

# Without a snapshot it is unknown what the optimizer keeps; Adam keeps two tensors for each one.
_STATES_EACH = 2

Machine = TypeVar("Machine")


def needed_bytes(parameters: Iterable[m.ParameterSpec], snapshot_bytes: int) -> int:
    """The least memory that a worker's layers take: weights, gradients and optimizer state.

    Args:
        parameters: Those of its stages.
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
        wanted_bytes: What the layers need.
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
        self._connections = connections
        self._need_of = need_of

    def opened(self, worker: Member, lost: Collection[Member]) -> Iterator[tuple[Member, str]]:
        """Open sessions for a lost worker beside others, one by one, until one serves.

        Args:
            worker: The lost one.
            lost: All that are lost; those of them that another process has replaced already are
                about to get their own layers.

        Yields:
            The worker on whose machine a second process waits, and the name of its session.

        Raises:
            WorkerUnreachable: Behind the last one, with the reason of each machine.
            ChannelError: If another worker is lost meanwhile.
        """
        needed = self._need_of(worker)
        reasons: dict[Address, str] = {}
        offers = [*self._offers(worker, lost, reasons)]
        for other, free_bytes in offers:
            if free_bytes < needed:
                reasons[other.address] = (
                    f"it has {in_bytes(free_bytes)} of memory left, and the layers take "
                    f"{in_bytes(needed)} at least."
                )
        for other, free_bytes in those_that_fit(offers, needed):
            session = self._connections.new_session_name()
            other.channel.send(m.OpenSession(session, free_bytes))
            answer = self._connections.await_from(other, m.SessionOpened)
            if answer.reason:
                reasons[other.address] = answer.reason
            else:
                yield other, session
        sentences = [f"{address}: {reason}" for address, reason in reasons.items()]
        raise WorkerUnreachable(
            " ".join(
                ["No other machine of the run can take its layers beside its own.", *sentences]
            )
        )

    def _offers(
        self, worker: Member, lost: Collection[Member], reasons: dict[Address, str]
    ) -> Iterator[tuple[Member, int]]:
        """The free memory of each machine of the run; else its reason."""
        found: set[Address] = set()
        for other in self._connections.members:
            # One whose connection may come back is waited for, as the run needs it anyway.
            is_asked = other is not worker and not other.channel.is_over and not other.is_paused
            if not is_asked or other.address in found:
                continue
            other.channel.send(m.AskRoom())
            told = self._connections.await_from(other, m.RoomTold)
            if told.reason:
                # A machine that serves two has one process that can start others.
                reasons[other.address] = told.reason
                continue
            found.add(other.address)
            reasons.pop(other.address, None)
            yield other, told.free_bytes - (self._need_of(other) if other in lost else 0)
