"""A channel: a connection that carries frames, with a thread for each direction.

The reading thread fills tensors in place. The writing thread sends large tensors from their own
memory, and sends a sign of life when it has nothing else, so that a peer that computes is heard. A
small frame that has nothing before it and for which the connection has room is sent at once, by the
thread that says it. While the writing thread waits for the device to finish a tensor, the reading
thread sends the signs of life. Everything that arrives, and the channel's end, goes to one inbox:
the thread that computes never waits for the network.

Below a channel is its line, which may put another connection in the place of a broken one. Nobody
above the channel notices.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from torch import Tensor

from ..devices.copies import Copies, HostCopy
from ..errors import ChannelError, HeteroError, RemoteProtocolError
from ..pipeline.recorder import Recorder
from ..pipeline.rule import Action
from ..protocol import messages as m
from ..protocol.bases import InstantMessage, State
from ..protocol.frames import (
    Content,
    Encode,
    Frame,
    FrameReader,
    encode_body,
    encode_frame,
    encode_head,
)
from ..protocol.session import Session
from ..protocol.tensor_bytes import BufferPool
from .connection import MOST_BYTES_AT_ONCE, Connection, PeerWork, Traffic
from .deadlines import Deadlines
from .link_probe import Exchange, PeerClock, payload
from .reconnection import Line, Lingering, reason_of

logger = logging.getLogger(__name__)

# A message, and the function that encodes its frame.
Queued = tuple[m.Message, Callable[[], list[memoryview]]]

# Keeps a message that is about to be queued. It gets what encodes the frame, and whether that may
# be called at once, and returns what encodes the frame for the channel.
Keep = Callable[[m.Message, Encode, bool], Encode]

# How often a wait looks whether this process is to end.
LOOK_SECONDS = 1.0

# Relative to the silence. A machine that is up acknowledges something at least twice in it, even
# while its receive window is closed and it only gets window probes.
_SHARE_OF_SILENCE = 0.7

_FROZEN_HERE = ": its process is frozen, since it has computed next to nothing on this machine"


@dataclass(frozen=True)
class Arrival:
    """What arrived over a channel: a frame, or the error that ended the channel."""

    channel: Channel
    content: Frame | HeteroError
    moment_seconds: float = field(default_factory=lambda: time.perf_counter())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The frame's tensors; none for an error."""
        return self.content.tensors if isinstance(self.content, Frame) else ()


Inbox = SimpleQueue[Arrival]

# Carries out a message of one class; gets its tensors too.
Handler = Callable[[Any, tuple[Tensor, ...]], None]


class Channel:
    """One end of a conversation after its handshake. Start it with `start`, end it with `close`.

    Args:
        connection: The connection, which the channel closes.
        session: The session, in the state in which the handshake left it.
        peer: Name of the other end, for messages to people.
        frozen_seconds: Silence after which the channel gives up a peer whose machine still answers;
            None takes the deadline for any silence.
        lingering: What the two ends have agreed on for a broken connection; None to end with it.

    Attributes:
        line: The connections, one after the other.
        activity: What this end does, in words for people at the other end.
        peer_activity: The latest that the peer reported of its own activity; empty at first.
        clock: Compares the peer's clock with ours.
        on_sent: Called after each message, in a thread of the channel or in the one that says it:
            the message, the bytes of its frame, and when sending began.
        forward: Called in the reading thread with each frame; a frame for which it returns true
            does not reach the inbox.
        keep: Keeps what is sent for a process that takes the peer's place; None keeps nothing.
    """

    def __init__(
        self,
        connection: Connection,
        session: Session,
        peer: str,
        deadlines: Deadlines,
        frozen_seconds: float | None = None,
        lingering: Lingering | None = None,
    ) -> None:
        self.peer = peer
        self.line = Line(connection, peer, deadlines, lingering)
        self._frozen_seconds = frozen_seconds or deadlines.silence_seconds
        self.activity = ""
        self.peer_activity = ""
        self._session = session
        self._deadlines = deadlines
        self._progress = threading.Condition()
        self._num_queued = 0
        self._num_passed_on = 0
        self._is_over = False
        # Why a frame could not be made, where that has ended the channel.
        self._encode_error: HeteroError | None = None
        self.clock = PeerClock(self.send)
        self.on_sent: Callable[[m.Message, int, float], None] | None = None
        self.forward: Callable[[Frame], bool] | None = None
        self.keep: Keep | None = None
        self._outgoing: SimpleQueue[Queued | None] = SimpleQueue()
        self._is_encoding = False
        self._is_closing = False
        self._num_heard = 0
        self._num_silent_waits = 0
        # Looks at the peer's process while the peer is silent; how often that has computed then.
        self._peer_work: PeerWork | None = None
        self._num_slow_waits = 0
        # The writing thread, then the reading one; fewer if the system gives none.
        self._threads: list[threading.Thread] = []

    def start(self, inbox: Inbox, pool: BufferPool | None = None) -> None:
        """Begin to read and write; arrivals go to ``inbox``, tensors in buffers of ``pool``.

        Raises:
            ChannelError: If the system gives this process no more threads; the peer is told so.
        """
        self.line.connection.set_timeout(self._deadlines.heartbeat_seconds)
        reader = FrameReader(pool=pool)
        for thread in (
            threading.Thread(target=self._write, name=f"write {self.peer}"),
            threading.Thread(target=self._read, args=(inbox, reader), name=f"read {self.peer}"),
        ):
            thread.daemon = True
            try:
                thread.start()
            except RuntimeError as error:
                raise self._without_threads(error) from error
            self._threads.append(thread)

    def _without_threads(self, cause: RuntimeError) -> ChannelError:
        """Tell the peer why this end cannot talk, and end the channel."""
        reason = (
            f"This process can start no thread for the connection with {self.peer} ({cause}): "
            "raise the number of processes and threads that the system allows it (`ulimit -u`, or "
            "`pids.max` of its control group), or its memory."
        )
        with contextlib.suppress(OSError, HeteroError):
            last_word = encode_frame(Frame(m.Failure(reason)))
            self.line.make_final()
            self.line.send("the reason", last_word)
        self.close()
        return ChannelError(reason)

    def send(self, message: m.Message, *tensors: Tensor) -> None:
        """Queue a frame; its tensors must not change until it is sent.

        Raises:
            LocalProtocolError: If the rules forbid the message, or it cannot be encoded.
        """
        frame = Frame(message, tensors)
        buffers = encode_frame(frame)
        logger.debug("> %s %s", self.peer, frame)
        is_small = sum(map(len, buffers)) <= MOST_BYTES_AT_ONCE
        self._queue(message, self._kept(message, lambda: buffers, is_ready=True), is_small)

    def send_later(self, message: m.Message, encode: Callable[[], list[memoryview]]) -> None:
        """Queue a frame that the writing thread encodes, which may wait for its tensors.

        Raises:
            LocalProtocolError: If the rules forbid the message.
        """
        logger.debug("> %s %s", self.peer, message)
        self._queue(message, self._kept(message, encode, is_ready=False))

    def send_again(self, message: m.Message, read: Callable[[], bytes]) -> None:
        """Queue a frame that was kept; it is read when it is its turn to be sent.

        Raises:
            LocalProtocolError: If the rules forbid the message.
        """
        logger.debug("> %s again %s", self.peer, message)
        self._queue(message, lambda: [memoryview(read())])

    def _kept(self, message: m.Message, encode: Encode, is_ready: bool) -> Encode:
        return encode if self.keep is None else self.keep(message, encode, is_ready)

    def pass_on(self, frame: Frame, most_queued: int) -> None:
        """Queue a frame as another process of the run has sent it; drop it if it is too late.

        It is too late after the step that it belongs to, and when the conversation is over.

        Args:
            frame: The frame of the other process.
            most_queued: The most such frames that may be queued, the new one included.

        Raises:
            RemoteProtocolError: If the other process has sent more frames than that.
        """
        buffers = encode_frame(frame)

        def encode() -> list[memoryview]:
            with self._progress:
                self._num_passed_on -= 1
            return buffers

        with self._progress:
            if self._is_over or not self._session.may_send(frame.message):
                return
            if self._num_passed_on >= most_queued:
                raise RemoteProtocolError(
                    f"It sent {frame.message} while {most_queued} such messages waited to be "
                    f"forwarded to {self.peer}."
                )
            self._num_passed_on += 1
            self._queue(frame.message, encode)

    def _queue(
        self, message: m.Message, encode: Callable[[], list[memoryview]], is_small: bool = False
    ) -> None:
        with self._progress:
            self._session.sent(message)
            may_be_next = is_small and self._num_queued == 0 and self._is_at_work
            if not (may_be_next and self._sends_at_once(message, encode)):
                self._num_queued += 1
                self._outgoing.put((message, encode))
        self._note_end()

    @property
    def _is_at_work(self) -> bool:
        return bool(self._threads) and not self._is_over

    def _sends_at_once(self, message: m.Message, encode: Callable[[], list[memoryview]]) -> bool:
        """Send a small frame in the calling thread; false if it would have to wait.

        To wake the writing thread for it takes more time, in which both want the interpreter.
        """
        buffers, start = encode(), time.perf_counter()
        num_bytes = sum(map(len, buffers))
        try:
            is_sent = self.line.try_to_send(type(message).__name__, buffers)
        except (OSError, HeteroError) as error:
            self._end_writing(error)
            return True
        if is_sent and self.on_sent is not None:
            self.on_sent(message, num_bytes, start)
        return is_sent

    def wait_until_sent(self, most_queued: int, look: Callable[[], None] | None = None) -> None:
        """Wait until at most ``most_queued`` frames are still queued, or the channel is over.

        If none is queued any more, the tensors of all frames may change from now on.

        Args:
            look: Called once a second; it may raise to end the wait.
        """
        self._wait_for(lambda: self._num_queued <= most_queued, look)
        if most_queued == 0:
            self.line.own_all()

    @property
    def traffic(self) -> Traffic:
        """The bytes that went over the connections."""
        return self.line.connection.traffic

    @property
    def is_away(self) -> bool:
        """Whether the connection is broken, and may come back."""
        return self.line.is_away and not self._is_over

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent or received any more."""
        return self._is_over

    @property
    def has_ended(self) -> bool:
        """Whether a `Goodbye` or `Failure` ended the conversation."""
        return self._session.state is State.CLOSED

    def report_activity(self, activity: str) -> None:
        """Tell the peer at once what this end does; otherwise the next sign of life tells it."""
        self.activity = activity
        self.send(self._sign_of_life())

    def peer_answers(self, look: Callable[[], None] | None = None) -> bool:
        """Ask for a sign of life; wait until the peer says anything or the channel is over.

        Args:
            look: As in `wait_until_sent`.
        """
        before = self._num_heard
        self.send(m.Ping())
        self._wait_for(lambda: self._num_heard > before, look)
        return self._num_heard > before

    def _wait_for(self, is_so: Callable[[], bool], look: Callable[[], None] | None) -> None:
        with self._progress:
            while not self._progress.wait_for(lambda: is_so() or self._is_over, LOOK_SECONDS):
                if look is not None:
                    look()

    def close(self, last_word: m.Message | None = None) -> None:
        """Send the queued frames and a last message, then end the channel and its threads."""
        if last_word is not None:
            with contextlib.suppress(HeteroError):
                self.send(last_word)
        self._is_closing = True
        self.line.make_final()
        self._outgoing.put(None)
        writers, readers = self._threads[:1], self._threads[1:]
        for thread in writers:
            thread.join(self._deadlines.stop_seconds)
        if self.line.lingering is not None and not self.line.is_away:
            self._let_peer_end(readers)
        self.line.connection.shut_down()
        self._note_over()
        for thread in readers:
            # One that dials again at present ends by itself when it is answered.
            if thread is not threading.current_thread() and not self.line.is_away:
                thread.join()
        # A writing thread whose device hangs is left alone; it finds the connection closed later.
        for thread in writers:
            thread.join(self._deadlines.stop_seconds)
        self.line.connection.close()

    def _let_peer_end(self, readers: list[threading.Thread]) -> None:
        """Wait until the peer has read the last word and ended the connection.

        Closing a connection with unread bytes sends a reset, which may overtake the last word, and
        a peer that lingers would wait for another connection.
        """
        self.line.connection.finish_sending()
        for thread in readers:
            if thread is not threading.current_thread():
                thread.join(self._deadlines.stop_seconds)

    def _read(self, inbox: Inbox, reader: FrameReader) -> None:
        try:
            while True:
                frame = self._next_frame(reader)
                if not isinstance(frame.message, InstantMessage) and not self._forwards(frame):
                    inbox.put(Arrival(self, frame))
                del frame  # the next wait must not keep its tensors alive
        except Exception as error:  # the owner waits for the inbox, so any error must get there
            self._end(inbox, error)

    def _forwards(self, frame: Frame) -> bool:
        return self.forward is not None and self.forward(frame)

    def _next_frame(self, reader: FrameReader) -> Frame:
        while True:
            try:
                frame = self._receive(reader)
            except (OSError, ChannelError) as error:
                self.line.recover(error)
                reader.begin_again()
                self._num_silent_waits, self._peer_work = 0, None
                # It wakes the writing thread, which sends again what the peer has not received.
                self._send_at_once(self._sign_of_life())
                continue
            if frame is None:
                continue
            logger.debug("< %s %s", self.peer, frame)
            self._note(frame.message)
            self.clock.take(frame.message)
            return frame

    def _receive(self, reader: FrameReader) -> Frame | None:
        try:
            frame = self.line.receive(reader)
        except TimeoutError:
            self._on_silence()
            return None
        self._num_silent_waits, self._num_slow_waits, self._peer_work = 0, 0, None
        return frame

    def _note(self, message: m.Message) -> None:
        """Note a message that has come, and answer it if it asks for a sign of life."""
        with self._progress:
            self._session.received(message)
            self._num_heard += 1
            self._progress.notify_all()
        self._note_end()
        self.peer_activity = message.reported_activity or self.peer_activity
        if isinstance(message, m.Pong):
            self.line.acknowledge(message.received)
        elif isinstance(message, m.Ping) or self._owes_acknowledgement(message):
            self._send_at_once(self._sign_of_life())

    def _owes_acknowledgement(self, message: m.Message) -> bool:
        is_own = isinstance(message, InstantMessage)
        return not is_own and not self.has_ended and self.line.owes_acknowledgement()

    def _sign_of_life(self) -> m.Pong:
        return m.Pong(self.activity, self.line.num_received)

    def _note_end(self) -> None:
        """Wait for no other connection when the conversation has ended."""
        if self.has_ended:
            self.line.make_final()

    def _send_at_once(self, message: m.Ping | m.Pong) -> None:
        """Send a sign of life, even while the writing thread waits for its device."""
        # A frame on its way is a sign of life too, so do not wait for the line.
        if self._is_encoding and self.line.try_to_send(
            "a sign of life", encode_frame(Frame(message))
        ):
            logger.debug("> %s %s", self.peer, message)
        else:
            self.send(message)

    def _on_silence(self) -> None:
        # Count timeouts instead of elapsed time, so that a process that was suspended itself does
        # not declare its peer lost.
        self._num_silent_waits += 1
        silence_seconds = self._num_silent_waits * self._deadlines.heartbeat_seconds
        work = self._peer_work = self._peer_work or PeerWork(self.line.connection)
        if work.has_advanced():
            self._note_slow()
        elif silence_seconds >= self._deadlines.silence_seconds:
            self._check_silence(silence_seconds, work.is_visible)
        # The peer may be set to send its signs of life less often than we look.
        self._send_at_once(m.Ping())

    def _note_slow(self) -> None:
        """The peer computes on this machine without a word: that is no silence."""
        self._num_silent_waits = 0
        self._num_slow_waits += 1
        heartbeat_seconds = self._deadlines.heartbeat_seconds
        slow_seconds = self._num_slow_waits * heartbeat_seconds
        if slow_seconds - heartbeat_seconds < self._deadlines.silence_seconds <= slow_seconds:
            logger.warning(
                "%s has said nothing for %.3g s, and its process on this machine computes, so it "
                "is waited for; run less on this machine, or start workers with fewer `--threads`",
                self.peer,
                slow_seconds,
            )

    def _check_silence(self, silence_seconds: float, is_here: bool) -> None:
        """Give the peer up if its machine is silent too, or its process for too long.

        Args:
            silence_seconds: For how long it has said nothing.
            is_here: Whether its process runs on this machine.

        Raises:
            ChannelError: With the reason.
        """
        since_answer = self.line.connection.seconds_since_answer()
        is_long = since_answer is not None and since_answer > _SHARE_OF_SILENCE * silence_seconds
        is_cut_off = is_long and not is_here
        if is_cut_off or silence_seconds >= self._frozen_seconds:
            reason = _FROZEN_HERE if is_here else _reason_of_silence(since_answer, is_cut_off)
            raise ChannelError(
                f"No sign of life from {self.peer} for {silence_seconds:.3g} s{reason}."
            )

    def _end(self, inbox: Inbox, error: Exception) -> None:
        """End the channel after an error: tell the peer if it broke a rule, and our inbox."""
        broke_a_rule = isinstance(error, RemoteProtocolError)
        if broke_a_rule:
            with contextlib.suppress(HeteroError):
                self.send(m.Failure(reason=str(error)))
        if not self._is_closing:
            error = self._encode_error or error
            if not isinstance(error, HeteroError):
                error = ChannelError(reason_of(error, self.peer))
            inbox.put(Arrival(self, error))
        self.line.make_final()
        if not broke_a_rule:
            self.line.connection.shut_down()  # or the writing thread would try to send for a while
        self._outgoing.put(None)
        # The writing thread may still wait for its device; nobody else has to wait for that.
        self._note_over()

    def _write(self) -> None:
        try:
            while (queued := self._next_outgoing()) is not None:
                self._send_now(*queued)
                del queued  # the next wait must not keep the frame's tensors alive
                self._note_sent()
        except (OSError, HeteroError) as error:
            self._end_writing(error)
        finally:
            self._note_over()

    def _end_writing(self, cause: Exception) -> None:
        logger.debug("writing to %s ended: %s", self.peer, cause)
        self.line.make_final()
        self.line.connection.shut_down()
        self._note_over()

    def _next_outgoing(self) -> Queued | None:
        while True:
            try:
                return self._outgoing.get(timeout=self._deadlines.heartbeat_seconds)
            except Empty:
                self.send(self._sign_of_life())

    def _send_now(self, message: m.Message, encode: Callable[[], list[memoryview]]) -> None:
        buffers = self._encoded(encode)
        start, num_bytes = time.perf_counter(), sum(map(len, buffers))
        self.line.send(type(message).__name__, buffers)
        if self.on_sent is not None:
            self.on_sent(message, num_bytes, start)

    def _encoded(self, encode: Encode) -> list[memoryview]:
        self._is_encoding = True
        try:
            return encode()
        except HeteroError as error:
            # The inbox hears of it: what the peer sees is only that the connection ends.
            self._encode_error = error
            raise
        finally:
            self._is_encoding = False

    def _note_sent(self) -> None:
        with self._progress:
            self._num_queued -= 1
            self._progress.notify_all()

    def _note_over(self) -> None:
        with self._progress:
            self._is_over = True
            self._progress.notify_all()


def _reason_of_silence(since_answer: float | None, is_cut_off: bool) -> str:
    if since_answer is None:
        return ""
    if is_cut_off:
        return ", nor from its machine: it is off, or the network between is cut"
    return ": its machine answers, so its process is frozen, or a tunnel to it is cut"


def exchange_over(channel: Channel, inbox: Inbox, patience_seconds: float) -> Exchange:
    """Probes over a channel whose inbox has no other reader.

    Raises:
        ChannelError: When used, if the peer does not answer.
    """

    def exchange(there_bytes: int, back_bytes: int) -> None:
        channel.send(m.Probe(back_bytes), *payload(there_bytes))
        try:
            content = inbox.get(timeout=patience_seconds).content
        except Empty:
            raise ChannelError(
                f"{channel.peer} did not answer a probe within {patience_seconds:.0f} s."
            ) from None
        if isinstance(content, HeteroError):
            raise content
        if isinstance(content.message, m.Paused):
            raise ChannelError(f"{channel.peer} is paused by its owner.")
        if not isinstance(content.message, m.ProbeAnswer):
            raise ChannelError(f"{channel.peer} answered a probe with {content.message}.")

    return exchange


def send_copied(channel: Channel, content: Content, copies: Copies) -> None:
    """Queue a message whose tensors are on the device.

    The calling thread only begins the copies to main memory; the writing thread waits for them.

    Raises:
        LocalProtocolError: If the rules forbid the message, or it cannot be encoded.
    """
    message, tensors = content
    copy = copies.to_host(tensors)
    if copy.is_immediate:
        channel.send(message, *copy.tensors)
    else:
        head = encode_head(Frame(message, copy.tensors))
        channel.send_later(message, partial(_encode_copied, head, copy))


def _encode_copied(head: memoryview, copy: HostCopy) -> list[memoryview]:
    copy.wait()
    return [head, *encode_body(copy.tensors)]


def observe(channel: Channel, peer: int, recorder: Recorder | None) -> None:
    """Tell a recorder of each message that the channel sends to process ``peer``; None stops it."""
    channel.on_sent = None if recorder is None else partial(_note_sent, recorder, peer)


def _note_sent(
    recorder: Recorder, peer: int, message: m.Message, num_bytes: int, start_seconds: float
) -> None:
    if message.key is not None or isinstance(message, m.ReplicaTensors):
        kind = type(message).__name__
        recorder.note_sent(peer, message.key, kind, num_bytes, start_seconds, message.stage_number)


def of_action(action: Action, step: int) -> str:
    """What a stage does when it carries out an action, in words for people."""
    kind = "forward" if action.kind == "F" else "backward"
    return f"the {kind} of micro-batch {action.key.microbatch} in step {step}"
