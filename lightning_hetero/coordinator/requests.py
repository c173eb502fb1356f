"""The table of open requests: each has a number, and each answer is taken by its number.

An answer that is no longer awaited, after Ctrl-C for example, is dropped when it comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
from torch import Tensor

from ..errors import (
    LocalProtocolError,
    RemoteProtocolError,
    StageFailed,
    WorkerError,
    WorkerLost,
)
from ..protocol import messages as m
from ..protocol.frames import Frame
from .member import Member
from .roster import Phase

Wanted = TypeVar("Wanted", bound=m.Message)


class Talk(Protocol):
    """The table's view of `Connections`."""

    workers: list[Member]

    def settle(self) -> None: ...

    def send(self, worker: Member, message: m.Message, *tensors: Tensor) -> None: ...

    def check_usable(self) -> None: ...

    def hear(self) -> object: ...

    def await_alone(self, answer: Answer) -> None: ...


@dataclass(eq=False)
class Answer:
    """The answer to one request: some pieces, if its class has them, and a last message.

    Args:
        requests: The table.
        message: The request, with its number.
        asked: The receiver of the request.
        worker: The answering worker.

    Attributes:
        arrived: The unused arrivals.
        is_over: Whether it is complete, or has failed.
        error: Why the last message does not come, if so.
        is_dropped: Whether it is no longer awaited.
    """

    requests: Requests
    message: m.Message
    asked: Member
    worker: Member
    arrived: deque[Frame] = field(default_factory=deque)
    is_over: bool = False
    error: WorkerError | None = None
    is_dropped: bool = False

    def result(self, kind: type[Wanted]) -> Wanted:
        """Wait for the last message, of this class; see `Requests.parts`."""
        return [message for _, message, _ in self.requests.parts([self], kind)][-1]

    def drop(self) -> None:
        """Await it no longer."""
        self.is_dropped = True

    def alone(self, kind: type[Wanted]) -> Wanted:
        """`result`, with all other messages heard later; see `Connections.await_alone`."""
        self.requests.connections.await_alone(self)
        return self.result(kind)


class Requests:
    """Sends requests, and gives each answer to its request. Not thread-safe.

    Args:
        connections: The workers.
    """

    def __init__(self, connections: Talk) -> None:
        self.connections = connections
        self._open: dict[int, Answer] = {}
        self._num_requests = 0
        # The first answer of each worker after the latest step given up.
        self._ends: dict[Member, Answer] = {}

    def send(
        self, worker: Member, message: m.Message, *tensors: Tensor, by: Member | None = None
    ) -> Answer:
        """Send a worker a request; it answers, or the worker ``by``.

        Raises:
            WorkerLost: If the worker is gone.
        """
        self.connections.settle()
        answer = self.open(worker, message, by)
        self.connections.send(worker, answer.message, *tensors)
        if answer.is_over and worker.row.phase is not Phase.GIVEN_UP:
            # Another process has got it: only the first process's request is over.
            self._open[answer.message.request], answer.is_over, answer.error = answer, False, None
        return answer

    def send_alone(self, worker: Member, message: m.Message, *tensors: Tensor) -> Answer:
        """Send a request over the worker's present channel, and never to a replacement.

        Raises:
            LocalProtocolError: If the conversation has ended.
        """
        answer = self.open(worker, message)
        worker.channel.send(answer.message, *tensors)
        return answer

    def describe(self, worker: Member) -> m.DeviceDescribed:
        """The device of a worker without stages so far.

        Raises:
            ChannelError: If it is lost.
            WorkerError: If it does not answer in time.
        """
        return self.send_alone(worker, m.DescribeDevice()).alone(m.DeviceDescribed)

    def open(self, worker: Member, message: m.Message, by: Member | None = None) -> Answer:
        """Number a request; the caller must send the message of the answer to the worker."""
        self._num_requests += 1
        numbered = msgspec.structs.replace(message, request=self._num_requests)
        answer = self._open[self._num_requests] = Answer(self, numbered, worker, by or worker)
        return answer

    def take(self, worker: Member, frame: Frame) -> None:
        """Give an answer to its request.

        Raises:
            RemoteProtocolError: If such an answer does not belong to an open request of the worker.
        """
        message = frame.message
        answer, kind = self._open.get(message.request), type(message).__name__
        if answer is None or worker is not answer.worker or kind not in answer.message.answers:
            raise RemoteProtocolError(f"It said {message} without being asked.")
        if not answer.is_dropped:
            answer.arrived.append(frame)
        if not message.is_piece:
            self._close(answer)

    def fail(self, worker: Member, number: int, error: WorkerError) -> bool:
        """Close the request of a number, if there is one, after a failure of a worker in it.

        Returns:
            Whether the request, or without a request the step, is no longer awaited.
        """
        answer = self._open.get(number)
        if answer is None or worker not in (answer.asked, answer.worker):
            return worker in self._ends and not self._ends[worker].is_over
        self._close(answer, error)
        return answer.is_dropped

    def give_up_step(self) -> None:
        """Ignore later answers and failures of workers in the present step."""
        for worker in self.connections.workers:
            with suppress(LocalProtocolError):
                self._ends[worker] = self.send_alone(worker, m.FetchTensors([]))
                self._ends[worker].drop()

    def forget(self, worker: Member, but: Collection[int] = ()) -> None:
        """Close the requests to a worker after the end of its process, except these numbers: the
        process in its place gets these requests too."""
        for number, answer in list(self._open.items()):
            if worker in (answer.asked, answer.worker) and number not in but:
                said = f"{worker} was lost before it answered {answer.message}."
                self._close(answer, WorkerLost(said))

    def _close(self, answer: Answer, error: WorkerError | None = None) -> None:
        del self._open[answer.message.request]
        answer.is_over, answer.error = True, error

    def parts(
        self, answers: Sequence[Answer], kind: type[Wanted]
    ) -> Iterator[tuple[Member, Wanted, tuple[Tensor, ...]]]:
        """Yield the messages of a class in several answers as they come, until all are over.

        Messages after the end of the loop are dropped.

        Raises:
            StageFailed: If a worker's code raised. If it raised in one of these requests, the
                others' answers have been taken by then.
            WorkerLost: If a worker is gone, or a message does not come in time.
        """
        try:
            while True:
                for answer in answers:
                    while answer.arrived:
                        frame = answer.arrived.popleft()
                        if isinstance(frame.message, kind):
                            yield answer.worker, frame.message, frame.tensors
                if all(answer.is_over for answer in answers):
                    break
                try:
                    self.connections.check_usable()
                    self.connections.hear()
                except StageFailed as error:
                    # The others may fail too, and must not do so later.
                    if all(answer.error is not error for answer in answers):
                        raise
        finally:
            for answer in answers:
                answer.drop()
                answer.arrived.clear()
        for answer in answers:
            if answer.error is not None:
                raise answer.error

    def finish(self, answers: Sequence[Answer]) -> None:
        """Wait until these answers are over; see `parts`."""
        for _ in self.parts(answers, m.Message):
            pass
