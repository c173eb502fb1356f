"""A channel: a connection for frames, with a thread for each direction.

The reading thread fills tensors in place. The writing thread sends large tensors from their own
memory. When its queue is empty, it sends a sign of life, so the other end hears a busy process too.
A small frame skips the empty queue if the connection has room: the calling thread sends it at once.
While the writing thread waits for the device to finish a tensor, the reading thread sends the signs
of life. All arrivals, and the channel's end, go to one inbox: the computing thread never waits for
the network.

Below a channel is its line (`line`). The line may replace a broken connection; the users of the
channel do not notice.
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
from .line import Lingering, reason_of
from .peer_clock import PeerClock
from .wings import line_over

logger = logging.getLogger(__name__)

# A message, and the encoder of its frame.
Queued = tuple[m.Message, Callable[[], list[memoryview]]]

# Keeps a message before it is queued. Its arguments are the message, the encoder of the frame, and
# whether the encoder may be called at once. It returns the encoder for the channel.
Keep = Callable[[m.Message, Encode, bool], Encode]

# Gets a sent message, the bytes of its frame, and the start of sending.
OnSent = Callable[[m.Message, int, float], None]

# How often a waiting thread looks whether this process has to end.
LOOK_SECONDS = 1.0

# Relative to the silence. A running machine acknowledges at least twice in this time, even while
# its receive window is closed and it only gets window probes.
_SHARE_OF_SILENCE = 0.7

_FROZEN_HERE = ": its process is frozen, since it has used almost no CPU time on this machine"


@dataclass(frozen=True)
class Arrival:
    """An arrival over a channel: a frame, or the error at the channel's end."""

    channel: Channel
    content: Frame | HeteroError
    moment_seconds: float = field(default_factory=lambda: time.perf_counter())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The frame's tensors; empty for an error."""
        return self.content.tensors if isinstance(self.content, Frame) else ()


Inbox = SimpleQueue[Arrival]

# Carries out a message of one class; gets its tensors too.
Handler = Callable[[Any, tuple[Tensor, ...]], None]


class Channel:
    """One end of a conversation after its handshake. Start it with `start`, end it with `close`.

    Args:
        connection: The connection. The channel closes it.
        session: The session, in its state after the handshake.
        peer: Name of the other end, for messages to people.
        frozen_seconds: The longest silence of a peer while its machine still answers. The default
            is the deadline for any silence.
        lingering: The agreement of the two ends on a broken connection. Without it, the channel
            ends with its connection.

    Attributes:
        line: The connections, one after the other.
        activity: The present work of this end, in words for people at the other end.
        peer_activity: The peer's latest report of its activity; empty at first.
        clock: Compares the peer's clock with ours.
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
        self.line = line_over(connection, peer, deadlines, lingering)
        self._frozen_seconds = frozen_seconds or deadlines.silence_seconds
        self.activity = ""
        self.peer_activity = ""
        self._session = session
        self._deadlines = deadlines
        self._progress = threading.Condition()
        self._num_queued = 0
        self._num_passed_on = 0
        self._is_over = False
        # The error of an encoder, if it has ended the channel.
        self._encode_error: HeteroError | None = None
        self.clock = PeerClock(self.send)
        self._on_sent: OnSent | None = None
        self._forward: Callable[[Frame], bool] | None = None
        self._on_break: Callable[[str], None] = _ignore
        self._keep: Keep | None = None
        self._outgoing: SimpleQueue[Queued | None] = SimpleQueue()
        self._is_encoding = False
        self._is_closing = False
        self._num_heard = 0
        self._num_silent_waits = 0
        # Looks at the peer's process while the peer is silent; how often it saw the process
        # compute.
        self._peer_work: PeerWork | None = None
        self._num_slow_waits = 0
        # The writing thread, then the reading one; fewer if the system gives none.
        self._threads: list[threading.Thread] = []

    def start(self, inbox: Inbox, pool: BufferPool | None = None) -> None:
        """Begin to read and write; arrivals go to ``inbox``, tensors in buffers of ``pool``.

        Raises:
            ChannelError: If the system refuses this process a thread; the peer gets the reason.
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

    def report_sent(self, on_sent: OnSent | None) -> None:
        """Report each message after it is sent, in a thread of the channel or in the sender's
        thread; None ends the reports."""
        self._on_sent = on_sent

    @property
    def on_sent(self) -> OnSent | None:
        """The receiver of reports of sent messages."""
        return self._on_sent

    def report_breaks(self, on_break: Callable[[str], None]) -> None:
        """Report in the reading thread why the connection broke, as a sentence, and by an empty
        text that another connection has taken its place."""
        self._on_break = on_break

    def forward_by(self, forward: Callable[[Frame], bool]) -> None:
        """Offer each frame in the reading thread; a frame that is taken does not reach the
        inbox."""
        self._forward = forward

    def keep_by(self, keep: Keep | None) -> None:
        """Keep sent messages for a process in the peer's place, if there may be one."""
        self._keep = keep

    def _without_threads(self, cause: RuntimeError) -> ChannelError:
        """Report to the peer why this end cannot talk, and end the channel."""
        reason = (
            f"This process cannot start a thread for the connection with {self.peer} ({cause}): "
            "raise its allowed number of processes and threads (`ulimit -u`, or `pids.max` of "
            "its control group), or its memory."
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
        """Queue a frame for the writing thread to encode; the encoder may wait for its tensors.

        Raises:
            LocalProtocolError: If the rules forbid the message.
        """
        logger.debug("> %s %s", self.peer, message)
        self._queue(message, self._kept(message, encode, is_ready=False))

    def send_again(self, message: m.Message, read: Callable[[], bytes]) -> None:
        """Queue a kept frame; the writing thread reads it when its turn comes.

        Raises:
            LocalProtocolError: If the rules forbid the message.
        """
        logger.debug("> %s again %s", self.peer, message)
        self._queue(message, lambda: [memoryview(read())])

    def _kept(self, message: m.Message, encode: Encode, is_ready: bool) -> Encode:
        return encode if self._keep is None else self._keep(message, encode, is_ready)

    def pass_on(self, frame: Frame, most_queued: int) -> None:
        """Queue a frame exactly as another process of the run has sent it; drop a late frame.

        A frame is late after its own step, and when the conversation is over.

        Args:
            frame: The frame of the other process.
            most_queued: The most such frames that may be queued, the new one included.

        Raises:
            RemoteProtocolError: If the other process has sent more frames than ``most_queued``.
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
        """Send a small frame in the calling thread; false if the frame would have to wait.

        Waking the writing thread takes longer, and then both threads want the interpreter.
        """
        buffers, start = encode(), time.perf_counter()
        num_bytes = sum(map(len, buffers))
        try:
            is_sent = self.line.try_to_send(type(message).__name__, buffers)
        except (OSError, HeteroError) as error:
            self._end_writing(error)
            return True
        if is_sent and self._on_sent is not None:
            self._on_sent(message, num_bytes, start)
        return is_sent

    def wait_until_sent(self, most_queued: int, look: Callable[[], None] | None = None) -> None:
        """Wait until at most ``most_queued`` frames are still queued, or the channel is over.

        When the queue is empty, the tensors of all frames may change from now on.

        Args:
            look: Called once a second; it may raise to end the wait.
        """
        self._wait_for(lambda: self._num_queued <= most_queued, look)
        if most_queued == 0:
            self.line.own_all()

    @property
    def traffic(self) -> Traffic:
        """The bytes sent and received over all connections."""
        return self.line.connection.traffic

    @property
    def is_away(self) -> bool:
        """Whether the connection is broken, and may come back."""
        return self.line.is_away and not self._is_over

    @property
    def is_over(self) -> bool:
        """Whether sending and receiving have ended."""
        return self._is_over

    @property
    def has_ended(self) -> bool:
        """Whether a `Goodbye` or `Failure` ended the conversation."""
        return self._session.state is State.CLOSED

    def note_activity(self, activity: str, at_once: bool = False) -> None:
        """Note this end's activity; the next sign of life reports it, or a new one ``at_once``."""
        is_new, self.activity = activity != self.activity, activity
        if at_once and is_new:
            self.send(self._sign_of_life())

    def peer_answers(self, look: Callable[[], None] | None = None) -> bool:
        """Ask for a sign of life; wait for any message of the peer, or for the channel's end.

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
            # A thread in the middle of dialling again ends by itself after the answer.
            if thread is not threading.current_thread() and not self.line.is_away:
                thread.join()
        # If the device hangs, leave the writing thread alone; it finds the connection closed later.
        for thread in writers:
            thread.join(self._deadlines.stop_seconds)
        self.line.connection.close()

    def _let_peer_end(self, readers: list[threading.Thread]) -> None:
        """Wait until the peer has read the last word and ended the connection.

        Closing a connection with unread bytes sends a reset. The reset may overtake the last word,
        and a lingering peer would then wait for another connection.
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
        return self._forward is not None and self._forward(frame)

    def _next_frame(self, reader: FrameReader) -> Frame:
        while True:
            try:
                frame = self._receive(reader)
            except (OSError, ChannelError) as error:
                self._on_break(self.line.leave(error))
                self.line.come_back()
                self._on_break("")
                reader.begin_again()
                self._num_silent_waits, self._peer_work = 0, None
                # It wakes the writing thread, which repeats the frames not yet received.
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
        """Note a received message, and answer it if it asks for a sign of life."""
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
        """Stop waiting for another connection when the conversation has ended."""
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
        # Count timeouts instead of elapsed time: after a suspension of its own, a process must not
        # declare its peer lost.
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
        """Start counting anew: the peer computes on this machine, so its silence does not count."""
        self._num_silent_waits = 0
        self._num_slow_waits += 1
        heartbeat_seconds = self._deadlines.heartbeat_seconds
        slow_seconds = self._num_slow_waits * heartbeat_seconds
        if slow_seconds - heartbeat_seconds < self._deadlines.silence_seconds <= slow_seconds:
            logger.warning(
                "%s has said nothing for %.3g s, but its process on this machine computes, so "
                "the wait goes on; run less on this machine, or start workers with fewer "
                "`--threads`",
                self.peer,
                slow_seconds,
            )

    def _check_silence(self, silence_seconds: float, is_here: bool) -> None:
        """Give the peer up if its machine is silent too, or its process for too long.

        Args:
            silence_seconds: The length of its silence.
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
        """End the channel after an error: report it to our inbox, and a broken rule to the peer."""
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
        # The writing thread may still wait for its device; the other threads need not wait.
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
        if self._on_sent is not None:
            self._on_sent(message, num_bytes, start)

    def _encoded(self, encode: Encode) -> list[memoryview]:
        self._is_encoding = True
        try:
            return encode()
        except HeteroError as error:
            # Keep the error for the inbox: the peer sees only the end of the connection.
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


def _ignore(_reason: str) -> None:
    """The breaks of a connection interest nobody."""


def _reason_of_silence(since_answer: float | None, is_cut_off: bool) -> str:
    if since_answer is None:
        return ""
    if is_cut_off:
        return ", nor from its machine: it is off, or the network between is cut"
    return ": its machine answers, so its process is frozen, or a tunnel to it is cut"


def send_copied(channel: Channel, content: Content, copies: Copies) -> None:
    """Queue a message with tensors on the device.

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
    """Report each message from this channel to process ``peer`` to a recorder; None stops this."""
    channel.report_sent(None if recorder is None else partial(_note_sent, recorder, peer))


def _note_sent(
    recorder: Recorder, peer: int, message: m.Message, num_bytes: int, start_seconds: float
) -> None:
    if message.key is not None or isinstance(message, m.ReplicaTensors):
        kind = type(message).__name__
        recorder.note_sent(peer, message.key, kind, num_bytes, start_seconds, message.stage_number)


def of_action(action: Action, step: int) -> str:
    """A stage's work in an action, in words for people."""
    kind = "forward" if action.kind == "F" else "backward"
    return f"the {kind} of micro-batch {action.key.microbatch} in step {step}"
