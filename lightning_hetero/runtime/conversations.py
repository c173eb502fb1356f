"""The coordinator's conversations with its workers: who they are, asking them, and hearing them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from ..errors import HeteroError, ProtocolError, StageFailed, WorkerError, WorkerLost
from ..wire import messages as m
from ..wire.constants import SentConstants
from ..wire.frames import Frame
from ..wire.session import coordinator_session
from .address import Address
from .channel import Channel, Inbox
from .compatibility import differences
from .deadlines import Deadlines
from .handshake import Identity, dial

logger = logging.getLogger(__name__)

Wanted = TypeVar("Wanted", bound=m.Message)


@dataclass(frozen=True)
class ConnectedWorker:
    """A worker that answered. Its number is the number of its stage."""

    number: int
    name: str
    address: Address
    channel: Channel
    equipment: m.Equipment
    constants: SentConstants = field(default_factory=SentConstants)

    def __str__(self) -> str:
        return f"stage {self.number} on {self.name}" + (
            "" if self.name == str(self.address) else f" ({self.address})"
        )


class Conversations:
    """Talks to workers, one per remote stage, in the stages' order. Not thread-safe.

    Args:
        workers: Name and address of each.
        deadlines: How long to wait for what.
        identity: What they are shown.

    Attributes:
        step: The number of the present step.

    Raises:
        WorkerUnreachable: If one does not answer or refuses.
    """

    def __init__(
        self, workers: Sequence[tuple[str, Address]], deadlines: Deadlines, identity: Identity
    ) -> None:
        self._deadlines = deadlines
        self._inbox: Inbox = SimpleQueue()
        self._workers: list[ConnectedWorker] = []
        self._lost: WorkerError | None = None
        # Requests whose Done is still to come, by worker: more than one after an interrupted one.
        self._unanswered: dict[int, int] = {}
        self.step = 0
        session_name = secrets.token_hex(16)
        try:
            for number, (name, address) in enumerate(workers, start=1):
                rules = coordinator_session()
                channel, welcome = dial(
                    address, rules, "coordinator", session_name, self._deadlines, identity
                )
                channel.start(self._inbox)
                worker = ConnectedWorker(number, name, address, channel, welcome.equipment)
                self._workers.append(worker)
                if found := differences(identity.equipment, worker.equipment):
                    rank_zero_info(f"{name} differs, which is normal: {', '.join(found)}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all conversations in good order. May be called twice."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.channel.close(m.Goodbye())
        self._lost = self._lost or WorkerLost("The coordinator has ended the session.")

    @property
    def equipment(self) -> dict[str, m.Equipment]:
        """What each worker runs on, by its name."""
        return {worker.name: worker.equipment for worker in self._workers}

    @property
    def lost(self) -> WorkerError | None:
        """Why the stages can no longer be used, or None while they can."""
        return self._lost

    def tell(self, name: str, message: m.Message, *tensors: Tensor) -> None:
        """Ask the worker of that name something; `hear` has its answer."""
        self._check_usable()
        self._named(name).channel.send(message, *tensors)

    def hear(self) -> tuple[str, Frame]:
        """The next thing that any worker says, with the worker's name."""
        worker, frame = self._receive(self._deadlines.request_seconds)
        return worker.name, frame

    def address_of(self, name: str) -> Address:
        """Where the worker of that name listens."""
        return self._named(name).address

    def keep(self, names: Sequence[str]) -> None:
        """Let these workers serve the stages, in this order; the others are free again."""
        kept = [self._named(name) for name in names]
        for worker in self._workers:
            if worker not in kept:
                worker.channel.close(m.Goodbye())
        self._workers = [replace(worker, number=n) for n, worker in enumerate(kept, start=1)]
        # Those that are free have said goodbye too, and by now nothing more comes from them.
        arrived = [self._inbox.get() for _ in range(self._inbox.qsize())]
        for arrival in arrived:
            if any(worker.channel is arrival.channel for worker in kept):
                self._inbox.put(arrival)

    def _named(self, name: str) -> ConnectedWorker:
        return next(worker for worker in self._workers if worker.name == name)

    def _broadcast(self, message: m.Message, *tensors: Tensor) -> None:
        for worker in self._workers:
            worker.channel.send(message, *tensors)

    def _await_done(self) -> None:
        """Wait until every worker has carried out what it was asked last."""
        self._collect(m.Done, len(self._workers))

    def _check_none_failed(self) -> None:
        """Raise what a worker has reported unasked; that can only be a failure or its end."""
        while not self._inbox.empty():
            worker, frame = self._heard(self._deadlines.request_seconds)
            self._is_aside(worker, frame.message)

    def _collect(self, kind: type[Wanted], count: int) -> list[Wanted]:
        """The next ``count`` messages of a kind that are not of an earlier step."""
        found: list[Wanted] = []
        while len(found) < count:
            _, frame = self._receive(self._deadlines.request_seconds)
            message = frame.message
            if isinstance(message, kind) and getattr(message, "step", self.step) == self.step:
                found.append(message)
        return found

    def _ask(
        self, worker: ConnectedWorker, request: m.Message, kind: type[Wanted]
    ) -> Iterator[tuple[Wanted, tuple[Tensor, ...]]]:
        """A worker's answers to a request, until it is done.

        What is left over of a request that was interrupted, by Ctrl-C say, is passed over.
        """
        unanswered = self._unanswered
        worker.channel.send(request)
        unanswered[worker.number] = unanswered.get(worker.number, 0) + 1
        while unanswered[worker.number] > 0:
            try:
                sender, frame = self._receive(self._deadlines.request_seconds)
            except StageFailed:
                unanswered[worker.number] -= 1
                raise
            if sender is worker and isinstance(frame.message, m.Done):
                unanswered[worker.number] -= 1
            elif isinstance(frame.message, kind) and unanswered[worker.number] == 1:
                yield frame.message, frame.tensors

    def _receive(self, patience_seconds: float) -> tuple[ConnectedWorker, Frame]:
        """The next thing that any worker says.

        Raises:
            StageFailed: If a worker's code raised.
            WorkerLost: If a worker is gone, or says nothing for too long.
        """
        self._check_usable()
        while True:
            worker, frame = self._heard(patience_seconds)
            if not self._is_aside(worker, frame.message):
                return worker, frame

    def _heard(self, patience_seconds: float) -> tuple[ConnectedWorker, Frame]:
        """The next thing that any worker says, also if it is said by the way."""
        worker, content = self._take_arrival(patience_seconds)
        if isinstance(content, HeteroError):
            raise self._note_lost(worker, content)
        message = content.message
        if isinstance(message, m.Failure):
            self._note_failure(worker, message)
            raise StageFailed(
                f"{worker} failed in step {self.step}: {message.reason}\n\n"
                f"The worker's traceback:\n{message.traceback}"
            )
        if isinstance(message, m.NeighborLost):
            lost = next((w for w in self._workers if w.number == message.stage_index), worker)
            raise self._note_lost(lost, WorkerError(f"{worker} lost it: {message.reason}"))
        return worker, content

    def _take_arrival(self, patience_seconds: float) -> tuple[ConnectedWorker, Frame | HeteroError]:
        try:
            arrival = self._inbox.get(timeout=patience_seconds)
        except Empty:
            self._lost = WorkerLost(
                f"No worker has said anything for {patience_seconds:.0f} s in step {self.step}, "
                "although their machines are alive."
            )
            raise self._lost from None
        return next(w for w in self._workers if w.channel is arrival.channel), arrival.content

    def _note_lost(self, worker: ConnectedWorker, cause: HeteroError) -> WorkerError:
        if isinstance(cause, ProtocolError):
            self._lost = WorkerLost(f"{worker} broke the rules in step {self.step}: {cause}")
        else:
            self._lost = WorkerLost(f"{worker} was lost in step {self.step}. {cause}")
        self._lost.__cause__ = cause
        return self._lost

    def _check_usable(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _note_failure(self, worker: ConnectedWorker, failure: m.Failure) -> None:
        """A worker's code raised."""

    def _is_aside(self, worker: ConnectedWorker, message: m.Message) -> bool:
        """Take what a worker says by the way, which answers nothing."""
        return False
