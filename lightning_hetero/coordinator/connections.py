"""The coordinator's connections: the workers of a run, requests, messages and losses.

The other parts of the coordinator (`neighbors`, `layers`, `steps`, `optimizers`, `telemetry`) share
one `Connections`. An answer goes to its request in `requests`. Any other message goes to the part
registered for its kind in `asides`, else to the waiting caller.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from ..errors import (
    ChannelError,
    CheckpointError,
    HeteroError,
    LinkLost,
    MoveUndone,
    ProtocolError,
    RemoteProtocolError,
    StageFailed,
    WorkerError,
    WorkerLost,
    WorkerUnreachable,
)
from ..events import Noted
from ..pipeline.placement import Placement
from ..protocol import messages as m
from ..protocol.frames import Frame
from ..protocol.session import RUN_LETTERS
from ..protocol.tensor_bytes import BufferPool
from ..transport.address import Address
from ..transport.channel import LOOK_SECONDS, Arrival, Channel, Inbox
from ..transport.compatibility import differences
from ..transport.deadlines import Deadlines
from ..transport.wings import linger_seconds
from .member import Admit, Member, Source, say_goodbye
from .requests import Answer, Requests
from .roster import Phase, Roster, What
from .run_part import RunPart

# Takes a message without a waiting caller.
Aside = Callable[[Member, Any], None]

# The same with the tensors of the message.
TensorAside = Callable[[Member, Any, Sequence[Tensor]], None]


class Unfinished(Protocol):
    """A step with backwards on their way while other code runs."""

    def finish(self) -> None:
        """Wait until all backwards have run."""

    def drop(self) -> None:
        """Forget the step, after an error."""


class Connections:
    """Talks to the workers of a run. Not thread-safe.

    Args:
        names: The names of the workers.
        source: Where the workers are found.
        deadlines: How long each kind of waiting may take.
        equipment: The hardware and software of this process, for the workers.
        receive_pool: Makes the memory into which a channel reads tensors.

    Attributes:
        roster: The present state of each worker.
        members: The connected workers, by their numbers; a lost idle worker is left out.
        workers: The needed members, with stages; before `assign`, all members.
        source: As given.
        deadlines: As given.
        run: The name of the run; it only distinguishes runs.
        equipment: As given.
        step: The number of the present step; 0 before the first one.
        requests: The open requests.
        asides: Takes messages without a waiting caller, by their kind.
        tensor_asides: Takes such messages with tensors; they may break a rule.
        is_ending: Returns whether SIGTERM has asked this process to end.
        part: Puts another worker in the place of a lost one, if recovery is on.
        is_interrupted: Returns whether an exception, such as Ctrl-C, has ended the run.

    Raises:
        WorkerUnreachable: If a worker does not answer or refuses.
    """

    def __init__(
        self,
        names: Sequence[str],
        source: Source,
        deadlines: Deadlines,
        equipment: m.Equipment,
        receive_pool: Callable[[], BufferPool],
    ) -> None:
        self.equipment = equipment
        self.deadlines = deadlines
        self.roster = Roster()
        self.members: list[Member] = []
        self.workers: list[Member] = []
        # By name, all workers ever connected, except workers freed by the first plan.
        self._known: dict[str, Member] = {}
        self.step = 0
        self.requests = Requests(self)
        self.asides: dict[type, Aside] = {
            m.Paused: self._on_paused,
            m.Resumed: self._on_resumed,
            m.Leaving: self._on_leaving,
        }
        self.tensor_asides: dict[type, TensorAside] = {
            m.ReplicaTensors: refuse_unasked,
            m.SnapshotPart: refuse_unasked,
        }
        self.is_ending: Callable[[], bool] = lambda: False
        self.part = RunPart()
        self.is_interrupted: Callable[[], bool] = lambda: False
        self._inbox: Inbox = SimpleQueue()
        # The arrivals during the wait for a certain answer; they come before the inbox.
        self._put_aside: deque[Arrival] = deque()
        self._receive_pool = receive_pool
        self.source = source
        self.run = secrets.token_hex(RUN_LETTERS // 2)
        # The step with backwards on their way while other code runs.
        self._unfinished: Unfinished | None = None
        # Why the run is over.
        self._end = ""
        self._by_channel: dict[Channel, Member] = {}
        try:
            for number, name in enumerate(names, start=1):
                self._add(number, name)
        except BaseException:
            self.close()
            raise

    def end_when(self, is_ending: Callable[[], bool], is_interrupted: Callable[[], bool]) -> None:
        """Do not wait for long when one of these functions returns true; see the attributes."""
        self.is_ending, self.is_interrupted = is_ending, is_interrupted

    def replace_lost_by(self, part: RunPart) -> None:
        """Put other workers in the place of lost ones; call it before layers are sent."""
        self.part = part

    def note(self, what: What, worker: Member | None = None, **facts: Any) -> None:
        """Note an event of a worker, or of all workers; the facts are fields of `Noted`."""
        moment_seconds = time.perf_counter()
        name = "" if worker is None else worker.name
        try:
            self.roster.note(Noted(what.value, name, moment_seconds=moment_seconds, **facts))
        finally:  # also after an error in a callback for the event
            state = self.roster.state
            self.members = [self._known[row.name] for row in state.members]
            self.workers = [self._known[row.name] for row in state.needed]

    def _add(self, number: int, name: str) -> Member:
        """Open a session with a worker; it becomes a member."""
        channel, theirs, address, session = self._open(name)
        worker = self._known[name] = Member(name, self.roster, address, channel, theirs, session)
        self.note(What.JOINED, worker, number=number)
        self._by_channel[channel] = worker
        self._note_lingering(worker)
        if found := differences(self.equipment, theirs):
            rank_zero_info(f"{name} differs, which is normal: {', '.join(found)}")
        return worker

    def _open(
        self, own_name: str, admit: Admit | None = None
    ) -> tuple[Channel, m.Equipment, Address, str]:
        """Open a session with a worker; returns its channel, equipment, address and session."""
        # Each worker has a name of its own, impossible to guess, to refuse a neighbor that reaches
        # a wrong worker, or itself.
        session = self.run + secrets.token_hex(16)
        channel, welcome, address = (admit or partial(self.source.admit, own_name))(session)
        channel.start(self._inbox, self._receive_pool())
        return channel, welcome.equipment, address, session

    @property
    def spares(self) -> list[str]:
        """The own names of workers that could be reached, and are not members."""
        taken = {member.row.own_name for member in self.members}
        return [name for name in self.source.names() if name not in taken]

    def dial_again(self, worker: Member, own_name: str, beside: Admit | None = None) -> None:
        """Open a session with the process in the place of a lost worker.

        Args:
            worker: The lost worker.
            own_name: The name of the process: the lost worker's, or a spare's.
            beside: Opens the session with a second process on the machine of another worker.

        Raises:
            WorkerUnreachable: If a worker does not answer there or refuses.
        """
        on_sent, journal = worker.channel.on_sent, self.part.journals.get(worker)
        self._by_channel.pop(worker.channel, None)
        self.requests.forget(worker, journal.requests if journal else ())
        worker.channel.close(m.Goodbye())  # it may be a process restored too late
        worker.go_on_with(self._open(own_name, beside))
        if beside is None:
            self.note(What.SERVED, worker, text=own_name)
        else:
            self.note(What.SERVED_BESIDE, worker)
        worker.channel.report_sent(on_sent)
        self._by_channel[worker.channel] = worker

    def admit(self, own_name: str) -> Member:
        """Open a session with a worker joining during the run, still without stages.

        Raises:
            WorkerUnreachable: If it does not answer or refuses.
        """
        # The number of a departed worker may still stand in reports of others.
        rows = self.roster.state.rows.values()
        return self._add(1 + max((row.number for row in rows), default=0), own_name)

    def release(self, worker: Member, why: str = "") -> None:
        """Say goodbye to a worker without layers.

        Args:
            worker: The worker.
            why: Its fate, for later questions; empty if it may join again.
        """
        if worker.row.phase is Phase.IDLE:  # else it is gone, or the run is over by it
            self.note(What.LEFT, worker, text=why)
        self.requests.forget(worker)
        # Its name may join again; the end of this conversation does not end the next one.
        self._by_channel.pop(worker.channel, None)
        worker.channel.close(m.Goodbye())

    def forget_reports_of(self, workers: Collection[Member]) -> None:
        """Forget the unread reports of other workers about these workers' lost predecessors."""
        numbers = {worker.number for worker in workers}
        self._put_aside = deque(
            arrival
            for arrival in self._put_aside
            if not (
                isinstance(arrival.content, Frame)
                and isinstance(arrival.content.message, m.NeighborReport)
                and arrival.content.message.member in numbers
            )
        )

    def _note_lingering(self, worker: Member) -> None:
        """Warn of a worker with less time for broken connections than this run wants."""
        lingering = worker.channel.line.lingering
        asked_seconds = linger_seconds(self.deadlines.linger_seconds)
        seconds = 0.0 if lingering is None else lingering.seconds
        if seconds < asked_seconds:
            rank_zero_warn(
                f"The owner of {worker.name} allows {seconds:g} s for a broken connection to come "
                f"back, and the run asks for {asked_seconds:g} s; start the worker with "
                f"`--linger-seconds {asked_seconds:g}`."
            )

    def begin_step(self) -> int:
        """Begin the next step; returns its number."""
        self.step += 1
        return self.step

    def leave(self, unfinished: Unfinished) -> None:
        """Let other code run while backwards of the present step are on their way."""
        self._unfinished = unfinished

    def take_up(self) -> None:
        """Go on with the step left by `leave`; the caller waits for its backwards."""
        self._unfinished = None

    def settle(self) -> None:
        """Wait for the backwards on their way while other code runs, if there are any.

        Call it before each message to the workers outside of the present step.

        Raises:
            WorkerError: If a worker fails.
        """
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            unfinished.finish()

    def give_up_step(self) -> None:
        """Forget the backwards on their way while other code runs."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            unfinished.drop()

    def close(self) -> None:
        """End all conversations in good order. May be called twice."""
        self._end = str(self.lost or "The coordinator has ended the session.")
        try:
            say_goodbye(self.members)
        except KeyboardInterrupt:
            # The process may live on, as a notebook's does, and would keep the workers.
            say_goodbye(self.members)
            raise
        finally:
            self.note(What.CLOSED)

    def named(self, name: str) -> Member:
        """The worker with this name."""
        return next(worker for worker in self.members if worker.name == name)

    def keep(self, names: Sequence[str]) -> None:
        """Let these workers serve stages, with numbers in this order, and free the others."""
        kept = [self.named(name) for name in names]
        say_goodbye(worker for worker in self.members if worker not in kept)
        self.note(What.KEPT, names=[*names])
        self._known = {worker.name: worker for worker in kept}
        self._by_channel = {worker.channel: worker for worker in kept}
        # Arrivals of the freed workers are dropped: they are not awaited.
        for arrival in [self._inbox.get() for _ in range(self._inbox.qsize())]:
            if arrival.channel in self._by_channel:
                self._inbox.put(arrival)

    def assign(self, placement: Placement, giving: Collection[Member] = ()) -> None:
        """Note the coming stages of each worker; workers without any are idle.

        Args:
            placement: The coming holders of each stage.
            giving: The workers giving layers away meanwhile.
        """
        stages = {each.name: [*placement.stages_of(each.name)] for each in self.members}
        stages = {name: numbers for name, numbers in stages.items() if numbers}
        self.note(What.PLACED, stages=stages, names=[worker.name for worker in giving])

    @property
    def worker_equipment(self) -> dict[str, m.Equipment]:
        """The equipment of each worker, by the worker's name."""
        return {worker.name: worker.equipment for worker in self.members}

    @property
    def lost(self) -> WorkerError | None:
        """The reason why requests can no longer be answered, if there is one.

        A lost link between two workers ends steps only: both still answer requests.
        """
        reasons = (each.row.why for each in self.workers if each.row.phase is Phase.GIVEN_UP)
        why = self._end or next(reasons, "")
        return WorkerLost(why) if why else None

    def check_usable(self) -> None:
        """Refuse requests after a worker was lost, or after `close`.

        Raises:
            WorkerLost: With the cause.
        """
        if (error := self.lost) is not None:
            raise error

    def check_linked(self) -> None:
        """Refuse steps after a worker or a link between two workers was lost.

        Raises:
            WorkerLost: If a worker was lost.
            LinkLost: If a link was lost.
        """
        self.check_usable()
        if why := self.roster.state.link_loss:
            raise LinkLost(why)

    def lose(
        self,
        worker: Member,
        cause: HeteroError,
        also: str = "",
        is_needed: bool = False,
    ) -> WorkerError:
        """Give a worker up; the caller must raise the returned error.

        Args:
            worker: The lost worker.
            cause: The error at the end of its conversation.
            also: Another sentence for the error.
            is_needed: Whether the run cannot go on, also if the worker has no layers.
        """
        if worker.row.phase is Phase.GIVEN_UP:
            return WorkerLost(worker.row.why)
        if isinstance(cause, ProtocolError):
            text = f"{worker} broke the rules {self.when}: {cause}"
        else:
            lost = f"{worker} was lost {self.when}. {cause}"
            text = " ".join(filter(None, (lost, worker.last_known, also, worker.advice)))
        is_idle = worker in self.members and worker not in self.workers
        if is_idle and not is_needed:
            self.note(What.LEFT, worker, text=f"was lost {self.when}")
            self.requests.forget(worker)
            self._by_channel.pop(worker.channel, None)
            rank_zero_warn(f"{text} It had no layers, so the run goes on without it.")
        elif worker.row.phase is not Phase.GONE:
            what = What.GIVEN_UP if worker.row.is_needed else What.MISSED
            self.note(what, worker, text=text)
        # The strategy adds to the raised error how to go on.
        return WorkerLost(text)

    @contextmanager
    def blaming(self, worker: Member) -> Iterator[None]:
        """Inside, an answer of a worker is checked.

        Raises:
            WorkerLost: If the answer breaks a rule.
        """
        try:
            yield
        except RemoteProtocolError as error:
            raise self.lose(worker, error) from None

    def send(self, worker: Member, message: m.Message, *tensors: Tensor) -> None:
        """Queue a message for a worker.

        Raises:
            WorkerLost: If the worker has ended the conversation, and the run needs it.
        """
        if not worker.channel.has_ended:
            worker.channel.send(message, *tensors)
            return
        cause = ChannelError("It has ended the conversation.")
        also = self._why_not_replaced(worker, cause)
        if also is None:
            self.send(worker, message, *tensors)
            return
        loss = self.lose(worker, cause, also)
        if worker in self.workers:
            raise loss

    def broadcast(
        self, message: m.Message | Callable[[Member], m.Message], *tensors: Tensor
    ) -> None:
        """Queue a message, or a message made for each worker, for all workers with stages."""
        self.settle()
        for worker in self.workers:
            each = message if isinstance(message, m.Message) else message(worker)
            self.send(worker, each, *tensors)

    def receive(self, patience_seconds: float | None = None) -> tuple[Member, Frame]:
        """Wait for the next message for the caller.

        Args:
            patience_seconds: How long to wait; None for the deadline of requests.

        Raises:
            StageFailed: If a worker's code raised.
            WorkerLost: If a worker is gone, or a message does not come in time.
        """
        self.check_usable()
        while True:
            if (heard := self.hear(patience_seconds)) is not None:
                return heard

    def receive_arrived(self) -> tuple[Member, Frame] | None:
        """The next arrived message for the caller, if there is one."""
        while self._put_aside or not self._inbox.empty():
            if (heard := self.hear(None)) is not None:
                return heard
        return None

    def hear(self, patience_seconds: float | None = None) -> tuple[Member, Frame] | None:
        """Wait for the next message; return it, unless it goes to a part of the coordinator.

        Raises:
            StageFailed: If a worker's code raised.
            WorkerLost: If a worker is gone, or a message does not come in time.
        """
        self.settle()  # messages for the remaining backwards must not be lost
        arrival = self._next_arrival(patience_seconds or self.deadlines.request_seconds)
        content = arrival.content
        if (worker := self._by_channel.get(arrival.channel)) is None:
            return None  # another worker has taken the sender's place
        if isinstance(content, HeteroError):
            self._on_end(worker, content)
            return None
        message = content.message
        journal = self.part.journals.get(worker)
        if journal is not None and not journal.takes(message):
            return None  # the lost worker in whose place it is has said so too
        is_answer = self._is_answer(worker, content)
        take_aside = self.asides.get(type(message))
        if take_aside is not None:
            take_aside(worker, message)
        if is_answer or take_aside is not None:
            return None
        take_tensors = self.tensor_asides.get(type(message))
        if take_tensors is None:
            return worker, content
        with self.blaming(worker):
            take_tensors(worker, message, content.tensors)
        return None

    def _is_answer(self, worker: Member, frame: Frame) -> bool:
        """Whether a frame answers a request; the request gets it then. Raises for a `Failure`,
        unless its request was given up after an error: then the worker's weights can still be
        fetched."""
        message = frame.message
        if isinstance(message, m.Failure):
            error = self._stage_failed(worker, message)
            if not self.requests.fail(worker, message.request, error):
                raise error
            rank_zero_info(f"After the first error: {error}")
            return True
        is_answer = type(message) in m.ANSWERS or message.request > 0
        if is_answer:
            with self.blaming(worker):
                self.requests.take(worker, frame)
        return is_answer

    def _on_end(self, worker: Member, cause: HeteroError) -> None:
        """Replace a worker after the end of its channel, or end the run.

        Raises:
            WorkerLost: If the run needs the worker, and cannot replace it.
        """
        also = self._why_not_replaced(worker, cause)
        if also is None:
            return
        loss = self.lose(worker, cause, also)
        if worker in self.workers:
            raise loss

    def _why_not_replaced(self, worker: Member, cause: HeteroError) -> str | None:
        """Put another worker in the place of a lost one; returns why this is not possible, if
        so."""
        is_given_up = worker.row.phase is Phase.GIVEN_UP
        if is_given_up or worker not in self.workers:
            return ""
        if isinstance(cause, ProtocolError | CheckpointError):
            return ""  # the next process would be lost by the same
        try:
            return self.part.replace(worker, cause)
        except MoveUndone:
            raise
        except BaseException:
            self.lose(worker, cause)
            raise

    def await_alone(self, answer: Answer) -> None:
        """Wait until an answer is over. Messages of other workers, and other messages of its own
        worker, are heard later.

        Raises:
            ChannelError: If the worker's channel ends.
            WorkerError: If the worker fails or does not answer in time.
        """
        worker, aside = answer.worker, list[Arrival]()
        try:
            while not answer.is_over:
                arrival = self._next_arrival(self.deadlines.request_seconds)
                content = arrival.content
                if arrival.channel is not worker.channel:
                    aside.append(arrival)
                elif isinstance(content, HeteroError):
                    aside.append(arrival)
                    raise content
                elif isinstance(content.message, m.NeighborUnreachable):
                    raise WorkerUnreachable(content.message.reason)
                elif isinstance(content.message, m.Failure) or (
                    content.message.request == answer.message.request
                ):
                    self._is_answer(worker, content)
                else:
                    aside.append(arrival)
        finally:
            self._put_aside.extendleft(reversed(aside))

    def _next_arrival(self, patience_seconds: float) -> Arrival:
        """Wait for the next arrival. The time while a worker is paused by its owner, or while a
        broken connection may come back, does not count.

        Lightning only notes SIGTERM, for the end of the batch. A batch that waits for a worker may
        never end, so the wait is short after the signal.

        Raises:
            WorkerLost: If a message does not arrive in time.
        """
        look_seconds = min(patience_seconds, LOOK_SECONDS, self.deadlines.leave_seconds)
        waited_seconds = ending_seconds = 0.0
        if self._put_aside:
            return self._put_aside.popleft()
        while True:
            try:
                return self._inbox.get(timeout=look_seconds)
            except Empty:
                waits = any(each.row.is_paused or each.is_cut_off for each in self.workers)
                waited_seconds += 0.0 if waits else look_seconds
                ending_seconds += look_seconds if self._reason_to_leave else 0.0
            if ending_seconds >= self.deadlines.leave_seconds:
                raise self._give_up(f"{self._reason_to_leave}, and no", ending_seconds)
            if waited_seconds >= patience_seconds:
                raise self._give_up("No", waited_seconds)

    def _give_up(self, words: str, seconds: float) -> WorkerError:
        """Note missing answers of workers; the caller must raise the returned error."""
        known = " ".join(worker.last_known for worker in self.workers)
        cut_off = " and ".join(str(worker) for worker in self.workers if worker.is_cut_off)
        state = f"while {cut_off} was cut off" if cut_off else "although all workers answer"
        self._end = (
            f"{words} stage returned a result for {seconds:.0f} s {self.when}, {state}"
            f"{'' if cut_off else ' heartbeats'}. {known}".rstrip()
        )
        return WorkerLost(self._end)

    @property
    def _reason_to_leave(self) -> str:
        """Why this process must end its waits soon; empty if it has time."""
        if self.is_ending():
            return "SIGTERM asks this process to end"
        is_cut_off = any(worker.is_cut_off for worker in self.workers)
        return "The run was interrupted" if is_cut_off and self.is_interrupted() else ""

    def leaving(self) -> Callable[[], None]:
        """The function for a wait for a channel to call once a second.

        It raises `WorkerLost` when this process is to end and has waited long enough.
        """
        waited_seconds = 0.0

        def look() -> None:
            nonlocal waited_seconds
            waited_seconds += LOOK_SECONDS if self._reason_to_leave else 0.0
            if waited_seconds >= self.deadlines.leave_seconds:
                raise self._give_up(f"{self._reason_to_leave}, and no", waited_seconds)

        return look

    def _stage_failed(self, worker: Member, failure: m.Failure) -> StageFailed:
        """The error to raise for an exception in a worker's code."""
        worker.forget_constants()  # it may have failed before it kept the latest ones
        if failure.in_optimizer_step:
            self.note(What.TORN)
        also = self._other_versions(worker) if self.step == 0 else ""
        text = f"{worker} failed {self.when}: {failure.reason}{also}"
        return StageFailed.with_traceback_there(text, failure.traceback)

    def _other_versions(self, worker: Member) -> str:
        """A sentence on the different libraries of a worker that could not begin; empty if they are
        ours."""
        found = differences(self.equipment, worker.equipment)
        if not found:
            return ""
        return (
            f" {worker.name} has other versions than this process: {', '.join(found)}. If that is "
            "why it cannot build or run a layer, install the same versions on both."
        )

    def numbered(self, number: int) -> Member | None:
        """The worker of a number, also after its loss, if there is one."""
        # The reading threads of channels ask too, and a state of the roster does not change.
        rows = self.roster.state.rows.values()
        name = next((row.name for row in rows if row.number == number), None)
        return None if name is None else self._known[name]

    def take_end_of(self, lost: Member) -> None:
        """Hear the end of a worker's channel. Other arrivals are heard later.

        Raises:
            WorkerLost: If the run needs the worker, and cannot replace it.
        """
        aside: list[Arrival] = []
        while True:
            arrival = self._put_aside.popleft() if self._put_aside else self._inbox.get()
            if arrival.channel is lost.channel and isinstance(arrival.content, HeteroError):
                self._put_aside.extendleft(reversed(aside))
                self._on_end(lost, arrival.content)
                return
            aside.append(arrival)

    def _on_paused(self, worker: Member, _message: m.Paused) -> None:
        self.note(What.PAUSED, worker)
        rank_zero_info(f"{worker} is paused by its owner; all stages wait until it goes on")

    def _on_resumed(self, worker: Member, _message: m.Resumed) -> None:
        self.note(What.RESUMED, worker)
        rank_zero_info(f"{worker} goes on")

    def _on_leaving(self, worker: Member, _message: m.Leaving) -> None:
        self.note(What.LEAVING, worker)
        rank_zero_info(f"the owner of {worker.name} wants it to end")

    @property
    def when(self) -> str:
        """The present step, as words at the end of a sentence."""
        return f"in step {self.step}" if self.step else "before the first step"


def refuse_unasked(_worker: Member, message: m.Message, _tensors: Sequence[Tensor]) -> None:
    """Refuse tensors without a part of this run that waits for them.

    Raises:
        RemoteProtocolError: Always.
    """
    raise RemoteProtocolError(f"It said {message}, and nobody has asked for it.")
