"""The coordinator's conversations with its workers: who they are, asking them, and hearing them."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from ..devices.copies import Copies
from ..errors import (
    ChannelError,
    HeteroError,
    LinkLost,
    ProtocolError,
    RemoteProtocolError,
    StageFailed,
    WorkerError,
    WorkerLost,
)
from ..protocol import messages as m
from ..protocol.frames import Frame
from ..protocol.session import coordinator_session
from ..protocol.values import SentConstants
from ..transport.address import Address
from ..transport.channel import Arrival, Channel, Inbox
from ..transport.deadlines import Deadlines
from ..transport.handshake import Identity, dial, differences

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
    # The thread that writes to the channel may look at them too.
    constants_lock: threading.Lock = field(default_factory=threading.Lock)

    def forget_constants(self) -> None:
        """It is not known what the worker has got: everything is sent again."""
        with self.constants_lock:
            self.constants.clear()

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
        copies: Those of the device that this process computes on.

    Attributes:
        copies: As given.
        equipment: What this process runs on, as the workers were told.
        step: The number of the present step.

    Raises:
        WorkerUnreachable: If one does not answer or refuses.
    """

    def __init__(
        self,
        workers: Sequence[tuple[str, Address]],
        deadlines: Deadlines,
        identity: Identity,
        copies: Copies,
    ) -> None:
        self.equipment = identity.equipment
        self._deadlines = deadlines
        self.copies = copies
        self._inbox: Inbox = SimpleQueue()
        self._workers: list[ConnectedWorker] = []
        self._lost: WorkerError | None = None
        self._broken_link: LinkLost | None = None
        # Requests whose Done is still to come, by worker: more than one after an interrupted one.
        self._unanswered: dict[int, int] = {}
        # Names of workers whose owners want their devices for themselves at present.
        self._paused: set[str] = set()
        self.step = 0
        session_name = secrets.token_hex(16)
        try:
            for number, (name, address) in enumerate(workers, start=1):
                rules = coordinator_session()
                channel, welcome = dial(
                    address, rules, "coordinator", session_name, self._deadlines, identity
                )
                channel.start(self._inbox, copies.receive_pool())
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
    def worker_equipment(self) -> dict[str, m.Equipment]:
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
        self._paused.intersection_update(names)
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
            self._send(worker, message, *tensors)

    def _send(self, worker: ConnectedWorker, message: m.Message, *tensors: Tensor) -> None:
        """Say something to a worker.

        Raises:
            WorkerLost: If it has said its last word.
        """
        if worker.channel.has_ended:
            raise self._note_lost(worker, ChannelError("It has ended the conversation."))
        worker.channel.send(message, *tensors)

    def _await_done(self) -> None:
        """Wait until every worker has carried out what it was asked last."""
        self._collect(m.Done, self._workers)

    def _collect(
        self, kind: type[Wanted], workers: Sequence[ConnectedWorker]
    ) -> list[tuple[ConnectedWorker, Wanted]]:
        """One message of a kind from each of these workers that is not of an earlier step."""
        found: dict[int, tuple[ConnectedWorker, Wanted]] = {}
        awaited = {worker.number for worker in workers}
        while found.keys() != awaited:
            sender, frame = self._receive(self._deadlines.request_seconds)
            message = frame.message
            if not isinstance(message, kind) or self._is_left_over(sender, message):
                continue
            with self._blaming(sender):
                if sender.number not in awaited or sender.number in found:
                    raise RemoteProtocolError(f"It said {message} without being asked.")
            found[sender.number] = sender, message
        return [found[number] for number in sorted(found)]

    def _is_left_over(self, sender: ConnectedWorker, message: m.Message) -> bool:
        """Whether a message is the end of a request that was interrupted, or of an earlier step."""
        left = self._unanswered.get(sender.number, 0)
        if isinstance(message, m.Done) and left > 0:
            self._unanswered[sender.number] = left - 1
            return True
        return message.step not in (None, self.step)

    @contextmanager
    def _blaming(self, worker: ConnectedWorker) -> Iterator[None]:
        """Inside, a worker's answer is held against what was asked.

        Raises:
            WorkerLost: If the answer breaks a rule.
        """
        try:
            yield
        except RemoteProtocolError as error:
            raise self._note_lost(worker, error) from error

    def _ask(
        self, requests: Sequence[tuple[ConnectedWorker, m.Message]], kind: type[Wanted]
    ) -> Iterator[tuple[ConnectedWorker, Wanted, tuple[Tensor, ...]]]:
        """The answers of several workers, one request to each, until all are done.

        They answer at the same time. What is left over of a request that was interrupted, by Ctrl-C
        say, is passed over.
        """
        unanswered = self._unanswered
        for worker, request in requests:
            self._send(worker, request)
            unanswered[worker.number] = unanswered.get(worker.number, 0) + 1
        asked = {worker.number for worker, _ in requests}
        failed: StageFailed | None = None
        while any(unanswered[number] > 0 for number in asked):
            try:
                sender, frame = self._receive(self._deadlines.request_seconds)
            except StageFailed as error:
                failed = failed or error  # the others may fail too, and must not do so later
                continue
            if sender.number in asked and isinstance(frame.message, m.Done):
                unanswered[sender.number] -= 1
            elif isinstance(frame.message, kind) and unanswered.get(sender.number) == 1:
                yield sender, frame.message, frame.tensors
        if failed is not None:
            raise failed

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
            # It is the answer to a request, if one is open; nobody waits for an optimizer's step.
            left = self._unanswered.get(worker.number, 0)
            self._unanswered[worker.number] = max(0, left - (not message.in_optimizer_step))
            self._note_failure(worker, message)
            raise StageFailed(
                f"{worker} failed {self._when}: {message.reason}\n\n"
                f"The worker's traceback:\n{message.traceback}"
            )
        # Both ends of a broken link tell of it, and one report is enough.
        if isinstance(message, m.NeighborLost) and self._broken_link is None:
            raise self._note_neighbor_lost(worker, message)
        return worker, content

    def _take_arrival(self, patience_seconds: float) -> tuple[ConnectedWorker, Frame | HeteroError]:
        try:
            arrival = self._next_arrival(patience_seconds)
        except Empty:
            self._lost = WorkerLost(
                f"No worker has made anything for {patience_seconds:.0f} s {self._when}, although "
                f"they give signs of life. {' '.join(map(_last_known, self._workers))}"
            )
            raise self._lost from None
        return self._sender_of(arrival), arrival.content

    def _sender_of(self, arrival: Arrival) -> ConnectedWorker:
        return next(w for w in self._workers if w.channel is arrival.channel)

    def _next_arrival(self, patience_seconds: float) -> Arrival:
        """What arrives next; while somebody is paused, nobody has to be quick.

        Raises:
            Empty: If nothing does.
        """
        while True:
            try:
                return self._inbox.get(timeout=patience_seconds)
            except Empty:
                if not self._paused:
                    raise

    def _note_pause(self, worker: ConnectedWorker, message: m.Message) -> None:
        if isinstance(message, m.Paused):
            self._paused.add(worker.name)
            rank_zero_info(f"{worker} is paused by its owner; everything waits until it goes on")
        else:
            self._paused.discard(worker.name)
            rank_zero_info(f"{worker} goes on")

    def _note_lost(self, worker: ConnectedWorker, cause: HeteroError) -> WorkerError:
        if isinstance(cause, ProtocolError):
            self._lost = WorkerLost(f"{worker} broke the rules {self._when}: {cause}")
        else:
            known = _last_known(worker)
            self._lost = WorkerLost(f"{worker} was lost {self._when}. {cause} {known}".rstrip())
        self._lost.__cause__ = cause
        return self._lost

    def _note_neighbor_lost(self, reporter: ConnectedWorker, report: m.NeighborLost) -> WorkerError:
        """Who reports it is alive; whether the other one is, it is asked itself."""
        lost = next((w for w in self._workers if w.number == report.stage_index), None)
        if lost is None:
            wrong = RemoteProtocolError(f"It lost stage {report.stage_index}, which there is not.")
            return self._note_lost(reporter, wrong)
        if not lost.channel.peer_answers():
            return self._note_lost(lost, self._end_of(lost))
        first, second = sorted((reporter, lost), key=lambda worker: worker.number)
        self._broken_link = LinkLost(
            f"The link between {first} and {second} was lost {self._when}, and both answer the "
            f"coordinator. {report.reason}"
        )
        return self._broken_link

    def _end_of(self, lost: ConnectedWorker) -> HeteroError:
        """What ended a worker's channel; everything else that has arrived is left there."""
        aside = []
        while True:
            arrival = self._inbox.get()
            if arrival.channel is lost.channel and isinstance(arrival.content, HeteroError):
                break
            aside.append(arrival)
        for other in aside:
            self._inbox.put(other)
        return arrival.content

    @property
    def _when(self) -> str:
        return f"in step {self.step}" if self.step else "before the first step"

    def _check_usable(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _check_linked(self) -> None:
        self._check_usable()
        if self._broken_link is not None:
            raise self._broken_link

    def _note_failure(self, worker: ConnectedWorker, failure: m.Failure) -> None:
        """A worker's code raised."""

    def _is_aside(self, worker: ConnectedWorker, message: m.Message) -> bool:
        """Take what a worker says by the way, which answers nothing."""
        is_pause = isinstance(message, (m.Paused, m.Resumed))
        if is_pause:
            self._note_pause(worker, message)
        return is_pause


def _last_known(worker: ConnectedWorker) -> str:
    """The sentence on what a worker did when it was heard last."""
    activity = worker.channel.peer_activity
    return f"The last that is known of {worker} is {activity}." if activity else ""
