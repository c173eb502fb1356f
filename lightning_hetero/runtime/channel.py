"""A channel: a connection that speaks frames, with a thread for each direction.

The reading thread fills tensors in place and answers heartbeats, so a peer that computes is heard;
the writing thread sends large tensors from their own memory. What arrives, and the channel's end,
goes to one inbox. Nobody who computes ever waits for the network.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue

from torch import Tensor

from ..errors import ChannelError, HeteroError, RemoteProtocolError
from ..wire import messages as m
from ..wire.frames import Frame, FrameReader, encode_frame
from ..wire.session import Session
from .connection import Connection
from .deadlines import Deadlines

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrival:
    """Something that came over a channel: a frame, or the error that ended it."""

    channel: Channel
    content: Frame | HeteroError


Inbox = SimpleQueue[Arrival]


class Channel:
    """One end of a conversation after its handshake. Start it with `start`, end it with `close`.

    Args:
        connection: From now on the channel's.
        session: The rules, as far as the handshake has taken them.
        peer: Who is at the other end, for messages to people.
    """

    def __init__(
        self,
        connection: Connection,
        session: Session,
        peer: str,
        deadlines: Deadlines,
    ) -> None:
        self.peer = peer
        self._connection = connection
        self.traffic = connection.traffic
        self._session = session
        self._reader = FrameReader()
        self._deadlines = deadlines
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        self._num_queued = 0
        self._is_over = False
        self._outgoing: SimpleQueue[list[memoryview] | None] = SimpleQueue()
        self._is_closing = False
        self._last_heard = time.monotonic()
        self._threads: list[threading.Thread] = []

    def start(self, inbox: Inbox) -> None:
        """Begin to read and write; what arrives goes to ``inbox``."""
        self._connection.set_timeout(self._deadlines.heartbeat_seconds)
        self._threads = [
            threading.Thread(target=self._read, args=(inbox,), name=f"read {self.peer}"),
            threading.Thread(target=self._write, name=f"write {self.peer}"),
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def send(self, message: m.Message, *tensors: Tensor) -> None:
        """Queue a frame. Its tensors must not change until they are sent.

        Raises:
            LocalProtocolError: If the rules forbid the message, or it cannot be encoded.
        """
        frame = Frame(message, tensors)
        buffers = encode_frame(frame)
        logger.debug("> %s %s", self.peer, frame)
        with self._lock:
            self._session.sent(message)
            self._num_queued += 1
            self._outgoing.put(buffers)

    def wait_until_sent(self, most_queued: int) -> None:
        """Wait until at most so many frames are still to be sent, or the channel is over."""
        with self._progress:
            self._progress.wait_for(lambda: self._num_queued <= most_queued or self._is_over)

    def close(self, last_word: m.Message | None = None) -> None:
        """Send what is queued and a last word, then end the channel and its threads."""
        if last_word is not None:
            with contextlib.suppress(HeteroError):
                self.send(last_word)
        self._is_closing = True
        self._outgoing.put(None)
        reading, writing = self._threads
        writing.join(self._deadlines.stop_seconds)
        self._connection.shut_down()
        for thread in (reading, writing):
            if thread is not threading.current_thread():
                thread.join()
        self._connection.close()

    def _read(self, inbox: Inbox) -> None:
        try:
            while True:
                frame = self._next_frame()
                if not isinstance(frame.message, (m.Ping, m.Pong)):
                    inbox.put(Arrival(self, frame))
        except (HeteroError, OSError) as error:
            self._end(inbox, error)

    def _next_frame(self) -> Frame:
        while True:
            try:
                frame = receive_some(self._connection, self._reader)
            except TimeoutError:
                self._on_silence()
                continue
            self._last_heard = time.monotonic()
            if frame is None:
                continue
            logger.debug("< %s %s", self.peer, frame)
            with self._lock:
                self._session.received(frame.message)
            if isinstance(frame.message, m.Ping):
                self.send(m.Pong())
            return frame

    def _on_silence(self) -> None:
        silence_seconds = time.monotonic() - self._last_heard
        if silence_seconds > self._deadlines.silence_seconds:
            raise ChannelError(f"No sign of life from {self.peer} for {silence_seconds:.0f} s.")
        self.send(m.Ping())

    def _end(self, inbox: Inbox, error: Exception) -> None:
        """The channel is over: tell the peer if it broke a rule, and ours in any case."""
        if isinstance(error, RemoteProtocolError):
            with contextlib.suppress(HeteroError):
                self.send(m.Failure(reason=str(error)))
        self._outgoing.put(None)
        if not self._is_closing:
            if not isinstance(error, HeteroError):
                error = ChannelError(f"The connection to {self.peer} broke: {error}.")
            inbox.put(Arrival(self, error))

    def _write(self) -> None:
        try:
            while (buffers := self._outgoing.get()) is not None:
                send_buffers(self._connection, buffers, self._deadlines.silence_seconds)
                del buffers  # the next wait must not keep their tensors alive
                self._note_progress(is_over=False)
        except (OSError, HeteroError) as error:
            logger.debug("writing to %s ended: %s", self.peer, error)
            self._connection.shut_down()
        finally:
            self._note_progress(is_over=True)

    def _note_progress(self, is_over: bool) -> None:
        with self._progress:
            self._num_queued -= not is_over
            self._is_over = is_over
            self._progress.notify_all()


def receive_some(connection: Connection, reader: FrameReader) -> Frame | None:
    """Take what has arrived; the frame, if that completes one.

    Raises:
        TimeoutError: If nothing arrives within the connection's timeout.
        ChannelError: If the peer has ended the connection.
        RemoteProtocolError: If what arrived is no frame, or ends inside one.
    """
    num_bytes = connection.receive_into(reader.buffer())
    if num_bytes == 0:
        reader.close()
        raise ChannelError("The peer ended the connection.")
    return reader.advance(num_bytes)


def send_buffers(
    connection: Connection, buffers: list[memoryview], patience_seconds: float
) -> None:
    """Send buffers one after the other, from where they are; the list is used up.

    Raises:
        ChannelError: If the peer takes nothing for ``patience_seconds``.
    """
    last_progress = time.monotonic()
    while buffers:
        try:
            num_bytes = connection.send(buffers)
            last_progress = time.monotonic()
        except TimeoutError:
            if time.monotonic() - last_progress > patience_seconds:
                raise ChannelError(f"The peer took nothing for {patience_seconds} s.") from None
            continue
        while buffers and num_bytes >= len(buffers[0]):
            num_bytes -= len(buffers.pop(0))
        if num_bytes:
            buffers[0] = buffers[0][num_bytes:]
