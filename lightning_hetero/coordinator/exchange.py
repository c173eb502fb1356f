"""What this process exchanges with workers that hold a stage as it does.

    this process ─ sums ─▶ worker       of the parameters that the worker owns, if it owns any
    worker ─ sums ─▶ this process       of those that this process owns
    worker ─ weights ─▶ this process    of those that the worker owns, when it has stepped them

The other end is `worker/replicas.py`. What this process steps goes to workers as any tensor does
that has changed here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..devices.copies import Copies
from ..errors import RemoteProtocolError
from ..pipeline.placement import COORDINATOR_STAGE
from ..pipeline.recorder import EXCHANGED, Recorder
from ..protocol import messages as m
from ..protocol.tensors import in_frames
from ..transport.channel import send_copied
from .connections import refuse_sums
from .member import Member

if TYPE_CHECKING:
    from .layers import RemoteLayers

# What is exchanged, the number of the exchange, and the worker that sends it.
_Part = tuple[m.ReplicaContent, int, Member]


class Exchange:
    """Sends sums of gradients to workers, and takes their sums and weights.

    Args:
        remote: Knows the form and the owner of each tensor.
        names: The parameters of the layers that this process holds too.
        copies: Copies tensors from the device.
        recorder: Takes a span for each message, and for the time that this process waits.
    """

    def __init__(
        self, remote: RemoteLayers, names: Collection[str], copies: Copies, recorder: Recorder
    ) -> None:
        self._remote = remote
        self._names = {*names}
        self._copies = copies
        self._recorder = recorder
        self._parts: dict[_Part, dict[str, Tensor]] = {}
        self._whole: set[_Part] = set()
        # The latest exchange of which everything was used.
        self._latest = 0
        remote.connections.take_sums = self._take_recorded

    def detach(self) -> None:
        """Take nothing more."""
        self._remote.connections.take_sums = refuse_sums

    def send_sums(
        self, number: int, worker: Member, sums: Mapping[str, Tensor], is_last: bool = True
    ) -> None:
        """Send a worker the gradients here of what it owns; they must not change any more.

        Args:
            number: The exchange.
            worker: Their owner.
            sums: Each takes the place of one that was sent before in this exchange.
            is_last: Whether no more of them follow.
        """
        for group, is_end in in_frames(sums.items()):
            names, is_whole = [*group], is_end and is_last
            message = m.ReplicaTensors(
                worker.number, COORDINATOR_STAGE, number, "sums", names, is_whole
            )
            send_copied(worker.channel, (message, [*group.values()]), self._copies)

    def await_all(
        self, content: m.ReplicaContent, number: int, workers: Sequence[Member]
    ) -> dict[str, dict[str, Tensor]]:
        """Wait for what these workers send in an exchange; returns it by worker and parameter."""
        connections = self._remote.connections
        connections.check_usable()
        parts = [(content, number, worker) for worker in workers]
        with self._recorder.span("wait", message=EXCHANGED):
            while not self._whole.issuperset(parts):
                # What else comes is left over from an earlier step.
                connections.hear(connections.deadlines.progress_seconds)
        found = {part[2].name: self._parts[part] for part in parts}
        # What an aborted step has left goes too.
        self._whole.clear()
        self._parts.clear()
        self._latest = number
        return found

    def _take_recorded(
        self, worker: Member, message: m.ReplicaTensors, tensors: Sequence[Tensor]
    ) -> None:
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        with self._recorder.span("optimizer", None, EXCHANGED, num_bytes, worker.number):
            self._take(worker, message, tensors)

    def _take(self, worker: Member, message: m.ReplicaTensors, tensors: Sequence[Tensor]) -> None:
        """Take what a worker has sent.

        Raises:
            RemoteProtocolError: If it is nothing that the worker may send.
        """
        part = message.content, message.round, worker
        is_known = message.round <= self._latest or part in self._whole
        if worker.journal is not None and is_known:
            return  # the lost worker in whose place it is has sent so too
        is_due = message.round <= self._remote.connections.num_exchanges
        if message.content == "totals" or not is_due or part in self._whole:
            raise RemoteProtocolError(f"It sent {message.content} of exchange {message.round}.")
        if len(message.names) != len(tensors):
            raise RemoteProtocolError(f"It sent {len(tensors)} tensors for {message}.")
        found = self._parts.setdefault(part, {})
        for name, tensor in zip(message.names, tensors, strict=True):
            self._check_owner(worker, message.content, name)
            self._remote.holdings.tensors[name].check(name, tensor)
            found[name] = tensor
        if message.is_last:
            self._whole.add(part)

    def _check_owner(self, worker: Member, content: m.ReplicaContent, name: str) -> None:
        """Refuse sums of what this process does not own, and weights of what the worker does not.

        Raises:
            RemoteProtocolError: With the parameter's name.
        """
        holdings = self._remote.holdings
        has_it = name in self._names and worker in holdings.holders_of[name]
        owner = worker if content == "weights" else None
        if not has_it or holdings.owner_of.get(name) is not owner:
            raise RemoteProtocolError(
                f"It sent {content} of {name!r}, which is not its part of what replicas exchange."
            )
