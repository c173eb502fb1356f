"""What mutated frames and conversations are given to."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lightning_hetero.errors import HeteroError, RemoteProtocolError
from lightning_hetero.launch import join
from lightning_hetero.launch.join import Door
from lightning_hetero.pipeline.codec import decode_activation, decode_arguments, decode_gradients
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.bases import State
from lightning_hetero.protocol.frames import Frame, FrameReader, OpeningReader
from lightning_hetero.protocol.session import Session, answering_session, opening_session
from lightning_hetero.protocol.values import KeptConstants
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines

HANG_SECONDS = 60.0
# For the worker to answer what it was asked, before the next thing is said.
_PACE_SECONDS = 0.05


def decode(data: bytes) -> list[Frame]:
    """Read bytes as everybody does who gets them: as an opening, and in a conversation.

    Raises:
        RemoteProtocolError: If they are refused, which is the only thing that may happen.
    """
    with contextlib.suppress(HeteroError):
        _feed(OpeningReader(), data)
    frames = _feed(FrameReader(), data)
    for frame in frames:
        for session in (answering_session("coordinator"), opening_session("coordinator")):
            with contextlib.suppress(RemoteProtocolError):
                _as_serving(session).received(frame.message)
        _interpret(frame)
    return frames


def _feed(reader: FrameReader, data: bytes) -> list[Frame]:
    found, rest = [], memoryview(data)
    while rest:
        room = reader.buffer()
        count = min(len(room), len(rest))
        room[:count] = rest[:count]
        rest = rest[count:]
        frame = reader.advance(count)
        if frame is not None:
            found.append(frame)
    return found


def _as_serving(session: Session) -> Session:
    session.state = State.SERVING
    return session


def _interpret(frame: Frame) -> None:
    """What is done with a message before anything is computed."""
    if isinstance(frame.message, m.Activation):
        decode_activation(frame.message, frame.tensors)
    elif isinstance(frame.message, m.Gradient):
        decode_gradients(frame.message, frame.tensors)
    elif isinstance(frame.message, m.Arguments):
        decode_arguments(frame.message, frame.tensors, KeptConstants())


@dataclass
class LiveWorker:
    """A worker process that is told mutated conversations."""

    address: str
    pid: int
    answers: dict[str, int] = field(default_factory=dict)

    def hear(self, conversation: Sequence[bytes]) -> None:
        """Say everything, then end; the worker must end its side too.

        Raises:
            TimeoutError: If it does not.
        """
        where = Address.parse(self.address)
        with socket.create_connection((where.host, where.port), HANG_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(HANG_SECONDS)
            listener = _Listener(connection)
            with contextlib.suppress(ConnectionError):
                for frame in conversation:
                    connection.sendall(frame)
                    if b"Activation" in frame[:100]:
                        listener.wait_for(m.Activation)
            with contextlib.suppress(OSError):  # it has ended it already
                connection.shutdown(socket.SHUT_WR)
            last = listener.read_to_end()
            self.answers[last] = self.answers.get(last, 0) + 1

    def memory_bytes(self, what: str = "VmRSS") -> int:
        """VmRSS is what the newest process of the worker has now, and VmHWM the most that it ever
        had."""
        end = time.monotonic() + HANG_SECONDS
        while time.monotonic() < end:
            children = psutil.Process(self.pid).children()
            # The newest may have ended meanwhile: then it has no memory, and another one comes.
            for child in sorted(children, key=lambda child: child.create_time(), reverse=True):
                if (found := _kilobytes_of(child.pid, what)) is not None:
                    return found * 1024
        raise TimeoutError(f"The worker {self.pid} starts no process for a session.")


def _kilobytes_of(pid: int, what: str) -> int | None:
    """A line of the status of a process; None if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(what + ":")), None)


@dataclass(frozen=True)
class OpenDoor:
    """A coordinator's door that is told mutated Hellos.

    Args:
        door: The door, which waits for one worker more than there will ever be.
        faults: What the door has logged as a fault of its own.
        answers: How often each kind of word was its first answer.
    """

    door: Door
    faults: list[str] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)

    def hear(self, said: bytes) -> None:
        """Say something, then end; the door must end its side too.

        Raises:
            TimeoutError: If it does not.
            AssertionError: If it has logged a fault of its own.
        """
        where = (self.door.address.host, self.door.address.port)
        with socket.create_connection(where, HANG_SECONDS) as connection:
            connection.settimeout(HANG_SECONDS)
            listener = _Listener(connection)
            with contextlib.suppress(ConnectionError):
                connection.sendall(said)
            with contextlib.suppress(OSError):  # it has ended it already
                connection.shutdown(socket.SHUT_WR)
            first = listener.first_word()
            self.answers[first] = self.answers.get(first, 0) + 1
            self.door.names()  # it takes leave of workers that were let in and have gone
            listener.read_to_end()
        assert not self.faults, self.faults


@contextlib.contextmanager
def fuzzed_door() -> Iterator[OpenDoor]:
    """A door on a free loopback port, without a token, which nobody but `OpenDoor` watches."""
    where, silent = Address("127.0.0.1", 0), lambda _line: None
    opened = Door(where, Identity(), Deadlines(), least=2**20, say=silent)
    found = OpenDoor(opened)
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.faults.append(  # type: ignore[method-assign]
        logging.Formatter().format(record)
    )
    join.logger.addHandler(handler)
    try:
        yield found
    finally:
        join.logger.removeHandler(handler)
        opened.close()


class _Listener:
    """Hears what the other end answers."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader()
        self._last = "nothing"

    def wait_for(self, kind: type) -> None:
        """Hear until such a message comes, or not soon."""
        end = time.monotonic() + _PACE_SECONDS
        with contextlib.suppress(TimeoutError):
            while (left_seconds := end - time.monotonic()) > 0:
                self._connection.settimeout(left_seconds)
                if self._hear() is kind:
                    break
        self._connection.settimeout(HANG_SECONDS)

    def first_word(self) -> str:
        """The kind of the first thing that is said; "nothing" if the conversation ends before."""
        with contextlib.suppress(ConnectionError):
            while self._last == "nothing" and self._hear() is not None:
                pass
        return self._last

    def read_to_end(self) -> str:
        """The kind of the last thing that the worker says."""
        end = time.monotonic() + HANG_SECONDS
        with contextlib.suppress(ConnectionError):
            while self._hear() is not None:
                if time.monotonic() > end:
                    raise TimeoutError("The worker does not end a conversation that is over.")
        return self._last

    def _hear(self) -> type | None:
        count = self._connection.recv_into(self._reader.buffer())
        if count == 0:
            return None
        frame = self._reader.advance(count)
        if frame is None:
            return object
        if not isinstance(frame.message, (m.Ping, m.Pong)):
            self._last = type(frame.message).__name__
        return type(frame.message)
