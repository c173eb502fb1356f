"""The coordinator's connections: who the workers are, asking them, hearing them, losing them.

The other parts of the coordinator (`layers`, `stages`, `training`, `telemetry`) share one
`Connections`. A message that answers no request goes to the part that has registered for its kind
in `asides`. Any other message is returned to the caller that waits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

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
from ..pipeline.placement import Placement
from ..pipeline.rule import Key
from ..protocol import messages as m
from ..protocol.frames import Frame
from ..protocol.tensors import BufferPool
from ..transport.address import Address, advice
from ..transport.channel import Arrival, Channel, Inbox
from ..transport.deadlines import Deadlines
from ..transport.handshake import Identity, dial, differences
from .member import Member

Wanted = TypeVar("Wanted", bound=m.Message)

# Opens the conversation with a worker: gets the worker's name and the session's, and returns the
# channel, not started yet, and the worker's Welcome.
Open = Callable[[str, str], tuple[Channel, m.Welcome]]

# Takes a message that answers no request.
Aside = Callable[[Member, Any], None]

TakeSums = Callable[[Member, m.ReplicaTensors, Sequence[Tensor]], None]

# How often a wait looks whether this process is to end.
_LOOK_AROUND_SECONDS = 1.0

# Frames that may wait to be forwarded to one worker: so many for each micro-batch in flight, and
# some more for forwards without gradients. An honest worker stays far below.
_MOST_FORWARDED_EACH = 4
_MOST_FORWARDED = 64


class Connections:
    """Talks to the workers of a run. Not thread-safe.

    Args:
        workers: The name and address of each worker.
        deadlines: How long each kind of waiting may take.
        identity: The equipment and credentials that this process shows to the workers.
        receive_pool: Makes the memory into which a channel reads tensors.
        open_channel: Opens the conversation with a worker; None dials the worker's address.

    Attributes:
        members: The connected workers, by their numbers; an idle one that is lost is left out.
        workers: Those that serve stages; before `assign`, all of them.
        ways: By micro-batch and visit of the present step, the worker of each stage on its way.
        deadlines: As given.
        equipment: The equipment of this process, as it told the workers.
        step: The number of the present step; 0 before the first one.
        in_flight: The most micro-batches in flight in the present step.
        asides: Takes messages that answer no request, by their kind.
        num_exchanges: The exchanges of replicas that were asked for.
        take_sums: Takes the sums of gradients that a worker sends to this process.
        has_torn_step: Whether a worker has failed inside an optimizer step.
        is_ending: Tells whether SIGTERM has asked this process to end.

    Raises:
        WorkerUnreachable: If a worker does not answer or refuses.
    """

    def __init__(
        self,
        workers: Sequence[tuple[str, Address]],
        deadlines: Deadlines,
        identity: Identity,
        receive_pool: Callable[[], BufferPool],
        open_channel: Open | None = None,
    ) -> None:
        self.equipment = identity.equipment
        self.deadlines = deadlines
        self.members: list[Member] = []
        self.workers: list[Member] = []
        self.ways: dict[Key, dict[int, Member]] = {}
        self.step = 0
        self.in_flight = 1
        self.asides: dict[type, Aside] = {
            m.Paused: self._on_paused,
            m.Resumed: self._on_resumed,
            m.NeighborUnreachable: self._on_neighbor_unreachable,
            m.NeighborAway: self._on_neighbor_away,
            m.NeighborBack: self._on_neighbor_back,
        }
        self.num_exchanges = 0
        self.take_sums: TakeSums = refuse_sums
        self.has_torn_step = False
        self.is_ending: Callable[[], bool] = lambda: False
        self._inbox: Inbox = SimpleQueue()
        # Why the run is over, and which link between two workers is lost.
        self._end: WorkerError | None = None
        self._link_loss: LinkLost | None = None
        addresses = dict(workers)
        if open_channel is None:

            def open_channel(name: str, session: str) -> tuple[Channel, m.Welcome]:
                return dial(addresses[name], "coordinator", session, deadlines, identity)

        run = secrets.token_hex(4)
        try:
            for number, (name, address) in enumerate(workers, start=1):
                # Each worker has a name of its own, so that a neighbor that reaches another worker
                # than the right one, or itself, is refused.
                session = run + secrets.token_hex(16)
                channel, welcome = open_channel(name, session)
                channel.start(self._inbox, receive_pool())
                self._note_lingering(name, channel)
                theirs = welcome.equipment
                worker = Member(number, name, address, channel, theirs, session)
                self.members.append(worker)
                if found := differences(identity.equipment, theirs):
                    rank_zero_info(f"{name} differs, which is normal: {', '.join(found)}")
        except BaseException:
            self.close()
            raise
        self.workers = list(self.members)
        self._by_channel = {worker.channel: worker for worker in self.members}

    def _note_lingering(self, name: str, channel: Channel) -> None:
        """Tell of a worker that allows less time for broken connections than this run wants."""
        asked_seconds, lingering = self.deadlines.linger_seconds, channel.line.lingering
        seconds = 0.0 if lingering is None else lingering.seconds
        if seconds < asked_seconds:
            rank_zero_warn(
                f"The owner of {name} allows {seconds:g} s for a broken connection to come back, "
                f"and the run asks for {asked_seconds:g} s; start the worker with "
                f"`--linger-seconds {asked_seconds:g}`."
            )

    def close(self) -> None:
        """End all conversations in good order. May be called twice."""
        self._end = self.lost or WorkerLost("The coordinator has ended the session.")
        members, self.members, self.workers = self.members, [], []
        for worker in members:
            worker.channel.close(m.Goodbye())

    def named(self, name: str) -> Member:
        """The worker of that name."""
        return next(worker for worker in self.members if worker.name == name)

    def keep(self, names: Sequence[str]) -> None:
        """Let these workers serve stages, with numbers in this order, and free the others."""
        kept = [self.named(name) for name in names]
        for worker in self.members:
            if worker not in kept:
                worker.channel.close(m.Goodbye())
        for number, worker in enumerate(kept, start=1):
            worker.number = number
        self.members, self.workers = kept, list(kept)
        self._by_channel = {worker.channel: worker for worker in kept}
        # Arrivals of the freed workers are dropped; nothing waits for them.
        for arrival in [self._inbox.get() for _ in range(self._inbox.qsize())]:
            if arrival.channel in self._by_channel:
                self._inbox.put(arrival)

    def assign(self, placement: Placement) -> None:
        """Note the stages of each worker; workers without any are idle."""
        for worker in self.members:
            worker.stages = placement.stages_of(worker.name)
        self.workers = [worker for worker in self.members if worker.stages]

    @property
    def worker_equipment(self) -> dict[str, m.Equipment]:
        """The equipment of each worker, by the worker's name."""
        return {worker.name: worker.equipment for worker in self.members}

    @property
    def lost(self) -> WorkerError | None:
        """Why requests can no longer be answered, or None while they can.

        A lost link between two workers ends steps only: both still answer requests.
        """
        losses = (worker.loss for worker in self.workers)
        return self._end or next((loss for loss in losses if loss is not None), None)

    def check_usable(self) -> None:
        """Refuse requests after a worker was lost, or after `close`.

        Raises:
            WorkerLost: With the cause.
        """
        if self.lost is not None:
            raise _copy_of(self.lost)

    def check_linked(self) -> None:
        """Refuse steps after a worker or a link between two workers was lost.

        Raises:
            WorkerLost: If a worker was lost.
            LinkLost: If a link was lost.
        """
        self.check_usable()
        if self._link_loss is not None:
            raise _copy_of(self._link_loss)

    def lose(self, worker: Member, cause: HeteroError) -> WorkerError:
        """Give a worker up; the caller must raise the error that is returned."""
        if isinstance(cause, ProtocolError):
            text = f"{worker} broke the rules {self._when}: {cause}"
        else:
            text = " ".join(
                each
                for each in (
                    f"{worker} was lost {self._when}. {cause}",
                    worker.last_known,
                    worker.advice,
                )
                if each
            )
        loss = WorkerLost(text)
        loss.__cause__ = cause
        worker.loss = loss
        if worker in self.members and worker not in self.workers:
            self.members.remove(worker)
            rank_zero_warn(f"{text} It had no layers, so the run goes on without it.")
        # The strategy adds to the error that is raised how to go on.
        return _copy_of(loss)

    @contextmanager
    def blaming(self, worker: Member) -> Iterator[None]:
        """Inside, an answer of a worker is checked.

        Raises:
            WorkerLost: If the answer breaks a rule.
        """
        try:
            yield
        except RemoteProtocolError as error:
            raise self.lose(worker, error) from error

    def send(self, worker: Member, message: m.Message, *tensors: Tensor) -> None:
        """Queue a message for a worker.

        Raises:
            WorkerLost: If the worker has ended the conversation, and the run needs it.
        """
        if not worker.channel.has_ended:
            worker.channel.send(message, *tensors)
            return
        loss = self.lose(worker, ChannelError("It has ended the conversation."))
        if worker in self.workers:
            raise loss

    def broadcast(
        self, message: m.Message | Callable[[Member], m.Message], *tensors: Tensor
    ) -> None:
        """Queue a message, or one made for each of them, for all workers that serve stages."""
        for worker in self.workers:
            each = message if isinstance(message, m.Message) else message(worker)
            self.send(worker, each, *tensors)

    def receive(self, patience_seconds: float | None = None) -> tuple[Member, Frame]:
        """Wait for the next message that is no aside.

        Args:
            patience_seconds: How long to wait; None for the deadline of requests.

        Raises:
            StageFailed: If a worker's code raised.
            WorkerLost: If a worker is gone, or no message comes in time.
        """
        self.check_usable()
        while True:
            if (heard := self.hear(patience_seconds)) is not None:
                return heard

    def receive_arrived(self) -> tuple[Member, Frame] | None:
        """The next message that has arrived and is no aside; None if there is none."""
        while not self._inbox.empty():
            if (heard := self.hear(None)) is not None:
                return heard
        return None

    def hear(self, patience_seconds: float | None = None) -> tuple[Member, Frame] | None:
        """Wait for the next message; give it to its part and return None if it is an aside.

        Raises:
            StageFailed: If a worker's code raised.
            WorkerLost: If a worker is gone, or no message comes in time.
        """
        arrival = self._next_arrival(patience_seconds or self.deadlines.request_seconds)
        worker, content = self._by_channel[arrival.channel], arrival.content
        if isinstance(content, HeteroError):
            loss = self.lose(worker, content)
            if worker in self.workers:
                raise loss
            return None
        message = content.message
        if isinstance(message, m.Done) and worker not in self.workers:
            worker.num_unanswered = max(0, worker.num_unanswered - 1)
            return None  # nobody waits for an idle worker
        take_aside = self.asides.get(type(message))
        if take_aside is not None:
            take_aside(worker, message)
            return None
        if isinstance(message, m.ReplicaTensors):
            with self.blaming(worker):
                self.take_sums(worker, message, content.tensors)
            return None
        if isinstance(message, m.Failure):
            raise self._stage_failed(worker, message)
        if isinstance(message, m.NeighborLost):
            worker.is_apart_from.discard(message.member)
            # Both ends of a lost link report it; one report is enough.
            if self._link_loss is None and (error := self._neighbor_lost(worker, message)):
                raise error
            return None
        return worker, content

    def collect(self, kind: type[Wanted], workers: Sequence[Member]) -> list[tuple[Member, Wanted]]:
        """One message of a kind from each of these workers; skips answers to earlier requests.

        Raises:
            WorkerLost: If a worker answers twice, or one that was not asked answers.
        """
        found: dict[Member, Wanted] = {}
        while len(found) < len(workers):
            sender, frame = self.receive()
            message = frame.message
            if not isinstance(message, kind) or self._is_left_over(sender, message):
                continue
            with self.blaming(sender):
                if sender not in workers or sender in found:
                    raise RemoteProtocolError(f"It said {message} without being asked.")
            found[sender] = message
        return [(worker, found[worker]) for worker in workers]

    def ask(
        self, requests: Sequence[tuple[Member, m.Message]], kind: type[Wanted]
    ) -> Iterator[tuple[Member, Wanted, tuple[Tensor, ...]]]:
        """Send one request to each of several workers, then yield their answers until all are done.

        The workers answer at the same time. Answers to a request that was interrupted, by Ctrl-C
        for example, are skipped.

        Raises:
            StageFailed: If a worker's code raised; the others' answers have been taken by then.
        """
        for worker, request in requests:
            self.request(worker, request)
        yield from self._answers([worker for worker, _ in requests], kind)

    def request(self, worker: Member, message: m.Message, *tensors: Tensor) -> None:
        """Queue a request that the worker answers with ``Done`` in the end; see `finish`."""
        self.send(worker, message, *tensors)
        worker.num_unanswered += 1

    def finish(self, workers: Sequence[Member]) -> None:
        """Wait until these workers have carried out their requests.

        Raises:
            StageFailed: If a worker's code raised; the others have carried out theirs by then.
        """
        for _ in self._answers(workers, m.Done):
            pass

    def _answers(
        self, workers: Sequence[Member], kind: type[Wanted]
    ) -> Iterator[tuple[Member, Wanted, tuple[Tensor, ...]]]:
        """Yield what these workers answer before their ``Done``, until all requests are done."""
        failed: StageFailed | None = None
        while any(worker.num_unanswered > 0 for worker in workers):
            try:
                sender, frame = self.receive()
            except StageFailed as error:
                failed = failed or error  # the others may fail too, and must not do so later
                continue
            message = frame.message
            is_current = sender in workers and sender.num_unanswered == 1
            if isinstance(message, m.Done):
                sender.num_unanswered = max(0, sender.num_unanswered - 1)
            elif isinstance(message, kind) and is_current:
                yield sender, message, frame.tensors
        if failed is not None:
            raise failed

    def _is_left_over(self, sender: Member, message: m.Message) -> bool:
        """Whether a message answers an interrupted request or an earlier step."""
        if isinstance(message, m.Done) and sender.num_unanswered > 0:
            sender.num_unanswered -= 1
            return True
        return message.step not in (None, self.step)

    def _next_arrival(self, patience_seconds: float) -> Arrival:
        """Wait for the next arrival. The time in which a worker is paused by its owner, or a
        broken connection may come back, does not count.

        Lightning only notes SIGTERM, for the end of the batch. A batch that waits for a worker may
        have no end, so nothing arrives for long after the signal.

        Raises:
            WorkerLost: If nothing arrives in time.
        """
        look_seconds = min(patience_seconds, _LOOK_AROUND_SECONDS, self.deadlines.leave_seconds)
        waited_seconds = ending_seconds = 0.0
        while True:
            try:
                return self._inbox.get(timeout=look_seconds)
            except Empty:
                waits = any(worker.waits for worker in self.workers)
                waited_seconds += 0.0 if waits else look_seconds
                ending_seconds += look_seconds if self.is_ending() else 0.0
            if ending_seconds >= self.deadlines.leave_seconds:
                raise self._give_up("SIGTERM asks this process to end, and no", ending_seconds)
            if waited_seconds >= patience_seconds:
                raise self._give_up("No", waited_seconds)

    def _give_up(self, words: str, seconds: float) -> WorkerError:
        """Note that workers do not answer; the caller must raise the error that is returned."""
        known = " ".join(worker.last_known for worker in self.workers)
        self._end = WorkerLost(
            f"{words} stage returned a result for {seconds:.0f} s {self._when}, although all "
            f"workers answer heartbeats. {known}".rstrip()
        )
        return _copy_of(self._end)

    def _stage_failed(self, worker: Member, failure: m.Failure) -> StageFailed:
        """The error to raise for a worker whose code raised."""
        worker.forget_constants()  # it may have failed before it kept the latest ones
        if failure.in_optimizer_step:
            self.has_torn_step = True
        else:
            # It answers a request if one is open; an optimizer step is no request.
            worker.num_unanswered = max(0, worker.num_unanswered - 1)
        return StageFailed(
            f"{worker} failed {self._when}: {failure.reason}\n\n"
            f"The worker's traceback:\n{failure.traceback}"
        )

    def _neighbor_lost(self, reporter: Member, report: m.NeighborLost) -> WorkerError | None:
        """The error to raise for a link that was lost; asks the other end whether it lives.

        There is none if the other end had no layers and is lost.
        """
        everyone = self._by_channel.values()
        lost = next((w for w in everyone if w.number == report.member), None)
        if lost is None:
            wrong = f"It lost worker {report.member}, which does not exist."
            return self.lose(reporter, RemoteProtocolError(wrong))
        if lost not in self.members:
            return None
        if not lost.channel.peer_answers():
            loss = self.lose(lost, self._end_of(lost))
            return loss if lost in self.workers else None
        first, second = sorted((reporter, lost), key=lambda worker: worker.number)
        self._link_loss = LinkLost(
            f"The link between {first} and {second} was lost {self._when}, and both answer the "
            f"coordinator. {report.reason} On the machine of {first.name}, "
            f"{advice(second.address)}"
        )
        return self._link_loss

    def _on_neighbor_unreachable(self, worker: Member, message: m.NeighborUnreachable) -> None:
        """Forward from now on what two workers exchange that cannot reach each other."""
        other = next((w for w in self.members if w.number == message.member), None)
        if other is None or other is worker:
            wrong = f"It misses worker {message.member}, which is none of its neighbors."
            raise self.lose(worker, RemoteProtocolError(wrong))
        if other in worker.cannot_reach:
            return  # the other one has told it
        for source, target in ((worker, other), (other, worker)):
            source.cannot_reach.add(target)
            source.channel.forward = partial(self._forward, source)
        rank_zero_warn(
            f"{worker} cannot reach {other}, and the coordinator reaches both. So the coordinator "
            "forwards what passes between the two: the numbers stay the same, but each activation "
            "and gradient between the two passes through the coordinator's network twice. "
            "A network on which the two reach each other is faster; `lightning-hetero mesh` makes "
            f"one. The cause, as {worker.name} tells it: {message.reason}"
        )

    def _forward(self, source: Member, frame: Frame) -> bool:
        """Forward a frame of a worker, in the thread that has read it; false if it is for us."""
        message = frame.message
        if isinstance(message, (m.MovedTensor, m.ReplicaTensors)):
            return self._forward_moved(source, frame, message.member)
        if isinstance(message, m.Activation):
            sending_stage = message.stage - 1
        elif isinstance(message, m.Gradient):
            sending_stage = message.stage + 1
        else:
            return False
        way = self.ways.get(message.key, {})
        target = way.get(message.stage)
        if target not in source.cannot_reach or way.get(sending_stage) is not source:
            return False
        most_queued = _MOST_FORWARDED + _MOST_FORWARDED_EACH * self.in_flight
        target.channel.pass_on(frame, most_queued)
        return True

    def _forward_moved(self, source: Member, frame: Frame, number: int) -> bool:
        """Forward a tensor that moves to the worker of a number; false if the two are no pair."""
        target = next((w for w in source.cannot_reach if w.number == number), None)
        if target is not None:
            target.channel.pass_on(frame, _MOST_FORWARDED)
        return target is not None

    def _end_of(self, lost: Member) -> HeteroError:
        """The error that ended a worker's channel; other arrivals go back into the inbox."""
        aside = []
        while True:
            arrival = self._inbox.get()
            if arrival.channel is lost.channel and isinstance(arrival.content, HeteroError):
                break
            aside.append(arrival)
        for other in aside:
            self._inbox.put(other)
        return arrival.content

    def _on_neighbor_away(self, worker: Member, message: m.NeighborAway) -> None:
        worker.is_apart_from.add(message.member)
        other = self._numbered(worker, message.member)
        rank_zero_info(
            f"the connection between {worker} and {other} broke; the stages wait for it to come "
            f"back: {message.reason}"
        )

    def _on_neighbor_back(self, worker: Member, message: m.NeighborBack) -> None:
        worker.is_apart_from.discard(message.member)
        other = self._numbered(worker, message.member)
        rank_zero_info(f"the connection between {worker} and {other} is back")

    def _numbered(self, reporter: Member, number: int) -> Member:
        """The worker of the number that another one has told.

        Raises:
            WorkerLost: If there is none.
        """
        everyone = self._by_channel.values()
        found = next((worker for worker in everyone if worker.number == number), None)
        if found is None or found is reporter:
            wrong = f"It told of worker {number}, which is none of its neighbors."
            raise self.lose(reporter, RemoteProtocolError(wrong))
        return found

    def _on_paused(self, worker: Member, _message: m.Paused) -> None:
        worker.is_paused = True
        rank_zero_info(f"{worker} is paused by its owner; all stages wait until it goes on")

    def _on_resumed(self, worker: Member, _message: m.Resumed) -> None:
        worker.is_paused = False
        rank_zero_info(f"{worker} goes on")

    @property
    def _when(self) -> str:
        return f"in step {self.step}" if self.step else "before the first step"


def refuse_sums(_worker: Member, message: m.ReplicaTensors, _tensors: Sequence[Tensor]) -> None:
    raise RemoteProtocolError(f"It said {message}, and this process is no replica.")


def _copy_of(error: WorkerError) -> WorkerError:
    """An exception to raise in place of a kept one, whose traceback would grow at each raise."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
