"""Second processes: without an idle worker, a machine of the run also serves a lost one's layers.

AskRoom ──▶ every machine ──▶ free bytes; the machine with the most, if the layers fit
OpenSession ──▶ the machine starts a second process; it takes one session of this run
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from ..errors import WorkerUnreachable
from ..protocol import messages as m
from ..units import in_bytes
from .connections import Connections
from .member import Admit, Admitted, Member

# Without a snapshot the optimizer's state is unknown; Adam keeps two tensors for each parameter.
_STATES_EACH = 2

Machine = TypeVar("Machine")


def needed_bytes(parameters: Iterable[m.ParameterSpec], snapshot_bytes: int) -> int:
    """The least memory of a worker's layers: weights, gradients and optimizer state.

    Args:
        parameters: The parameters of its stages.
        snapshot_bytes: The size of the worker's latest snapshot, with trained parameters and their
            optimizer state; 0 before the first one.
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
    """The machines with enough free memory, the most free memory first.

    Args:
        offers: Each machine, with its free bytes; equal machines keep their order.
        wanted_bytes: The bytes needed by the layers.
    """
    fitting = [offer for offer in offers if offer[1] >= wanted_bytes]
    return sorted(fitting, key=lambda offer: -offer[1])


class Takeovers:
    """Lets machines of the run start second processes for lost workers.

    Args:
        connections: The workers.
        need_of: The least bytes of a worker's layers.
    """

    def __init__(self, connections: Connections, need_of: Callable[[Member], int]) -> None:
        self._connections, self._requests = connections, connections.requests
        self._need_of = need_of

    def places(
        self, worker: Member, lost: Collection[Member], reasons: list[str]
    ) -> Iterator[tuple[str, Admit]]:
        """The machines with room for a lost worker's layers, each with its way to open a session.

        Args:
            worker: The lost worker.
            lost: All lost workers; their replacements so far are about to get their own layers.
            reasons: Gets a sentence for each unfit machine.

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
            yield str(other.address), partial(self._admit, other, free_bytes)

    def _admit(self, other: Member, free_bytes: int, session: str) -> Admitted:
        """Open a session with a second process beside a worker.

        Raises:
            WorkerUnreachable: If the machine starts none, or it does not answer.
            ChannelError: If the worker is lost meanwhile.
        """
        asked = self._requests.send_alone(other, m.OpenSession(session, free_bytes))
        opened = asked.alone(m.SessionOpened)
        if opened.reason:
            raise WorkerUnreachable(opened.reason)
        return *self._connections.source.admit_beside(other.address, session), other.address

    def _offers(
        self, worker: Member, lost: Collection[Member], reasons: list[str]
    ) -> Iterator[tuple[Member, int]]:
        """The free memory of each machine of the run; else its reason."""
        for other in self._connections.members:
            # A second process does not start another. A broken connection that may come back is
            # waited for, as the run needs it anyway.
            row = other.row
            if other is worker or row.is_beside or other.channel.is_over or row.is_paused:
                continue
            told = self._requests.send_alone(other, m.AskRoom()).alone(m.RoomTold)
            if told.reason:
                reasons.append(f"{other.address}: {told.reason}")
            else:
                yield other, told.free_bytes - (self._need_of(other) if other in lost else 0)
