"""Reconnection: when the connection of a channel breaks, its line goes on over another one.

    the end that has dialled                    the end that was dialled
    breaks ▶ away ▶ dials again ─ Hello: secret, frames received ─▶ breaks ▶ away
             back ◀─────────────── Welcome: frames received ────── back
    sends the other frames again                sends the other frames again

Each end keeps the frames not yet acknowledged by the other end; `resumption` has the rules. A line
without `Lingering` does not keep frames, and breaks for good.

Two threads of a channel use its line. The sending thread waits while the connection is away; the
receiving thread gets the next connection.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import ChannelError, HeteroError, RemoteProtocolError, WorkerError
from ..protocol.frames import Frame, FrameReader
from .connection import Connection, send_buffers
from .deadlines import Deadlines
from .resumption import Ledger, pauses

logger = logging.getLogger(__name__)

# For the reading thread to leave the old connection after its shutdown.
_LEAVE_SECONDS = 5.0
_SECRET_BYTES = 32

# Opens another connection. Gets the number of the attempt and the number of frames received so far;
# returns the connection and the peer's number of received frames.
Redial = Callable[[int, int], tuple[Connection, int]]


class PeerGone(ChannelError):
    """The peer's process has ended, or does not know the conversation any more."""


@dataclass(frozen=True)
class Lingering:
    """The agreement of two ends on the time after their connection has broken.

    Args:
        seconds: How long each end keeps the conversation.
        secret: Only the two ends know it.
        redial: Opens another connection; absent at the dialled end.
    """

    seconds: float
    secret: str = field(default_factory=lambda: secrets.token_hex(_SECRET_BYTES), repr=False)
    redial: Redial | None = None

    def is_secret(self, text: str) -> bool:
        """Whether a peer knows the secret."""
        return secrets.compare_digest(text.encode(), self.secret.encode())


def reason_of(cause: Exception, peer: str) -> str:
    """Why a connection broke, as a sentence."""
    if isinstance(cause, HeteroError):
        return str(cause)
    return f"The connection to {peer} was cut ({cause})."


def receive_some(
    connection: Connection, reader: FrameReader, peer: str = "The peer"
) -> Frame | None:
    """Read the arrived bytes; return the frame if they complete one.

    Raises:
        TimeoutError: If nothing arrives within the connection's timeout.
        ChannelError: If the peer has ended the connection.
        RemoteProtocolError: If the bytes are not a frame.
    """
    missing = reader.buffer()
    num_bytes = connection.receive_into(missing, sure_bytes=len(missing))
    if num_bytes > 0:
        return reader.advance(num_bytes)
    try:
        reader.close()
    except RemoteProtocolError as error:
        raise ChannelError(
            f"{peer} ended the connection in the middle of a message, as happens when a process is "
            "killed."
        ) from error
    raise ChannelError(f"{peer} ended the connection without a Goodbye.")


class Line:
    """Sends and receives frames over a connection, and over the next one when it breaks.

    Args:
        connection: The first connection. The line closes each connection.
        peer: Name of the other end, for messages to people.
        deadlines: How long each kind of waiting may take.
        lingering: The agreement of the two ends; absent if the line breaks for good.

    Attributes:
        connection: The present connection.
        is_away: Whether it has broken, and another connection may take its place.
        on_away: Called with the reason when the connection has broken.
        on_back: Called when another connection has taken its place.
    """

    def __init__(
        self,
        connection: Connection,
        peer: str,
        deadlines: Deadlines,
        lingering: Lingering | None = None,
    ) -> None:
        self.connection = connection
        self.is_away = False
        self.on_away: Callable[[str], None] = lambda _reason: None
        self.on_back: Callable[[], None] = lambda: None
        self._peer = peer
        self._deadlines = deadlines
        self._lingering = lingering
        self._ledger = Ledger()
        # Held while a frame is written or the connection is replaced.
        self._sending = threading.Lock()
        # Held while this end answers a peer that has dialled again.
        self._answering = threading.Lock()
        self._changed = threading.Condition()
        # Whether the present connection is the last.
        self._is_final = False
        # Whether the reading thread has left the broken connection.
        self._is_parked = False
        self._reason = ""
        self._num_again = 0
        # The peer broke a rule when it came back, or a frame cannot be sent again.
        self._obstacle: HeteroError | None = None
        self._attempt = 0

    @property
    def lingering(self) -> Lingering | None:
        """The agreement of the two ends; absent if the line breaks for good."""
        return self._lingering

    @property
    def num_received(self) -> int:
        """The number of whole frames received; stays 0 without lingering."""
        return self._ledger.num_received

    def make_final(self) -> None:
        """Make the present connection the last."""
        with self._changed:
            self._is_final = True
            self._changed.notify_all()

    def give_up(self, reason: str) -> None:
        """Stop waiting for another connection if this one is away, because the peer has ended."""
        with self._changed:
            if self.is_away:
                self._reason = f"{self._reason} {reason}"
                self._is_final = True
                self._changed.notify_all()

    def send(self, name: str, buffers: list[memoryview]) -> None:
        """Send a frame; while the connection is away, wait until another one is there.

        Args:
            name: The kind of frame, for messages to people.
            buffers: Its bytes. They must not change before the peer has received them, or before
                `own_all`.

        Raises:
            OSError: If the connection broke for good.
            ChannelError: Likewise, or if the peer reads nothing for too long.
        """
        with self._sending:
            is_written = self._write(name, buffers)
        while not is_written:
            with self._changed:
                self._changed.wait_for(lambda: self._is_final or not self.is_away)
            with self._sending:
                is_written = self._write_due()

    def try_to_send(self, name: str, buffers: list[memoryview]) -> bool:
        """Send a small frame without waiting; false if this is not possible at present.

        It is not possible while another thread sends, while the connection is away or full, and
        while other frames have to go first.
        """
        if not self._sending.acquire(blocking=False):
            return False
        try:
            is_free = not self.is_away and not self._ledger.has_due and self.connection.has_room()
            if is_free:
                self._write(name, buffers)
            return is_free
        finally:
            self._sending.release()

    def own_all(self) -> None:
        """Copy all frames kept for repetition: their tensors may change from now on."""
        if self._lingering is not None:
            with self._sending:
                self._ledger.own_all()

    def receive(self, reader: FrameReader) -> Frame | None:
        """Read arrived bytes; return the frame if they complete one.

        Raises:
            TimeoutError: If nothing arrives within the connection's timeout.
            OSError: If the connection broke; call `recover`.
            ChannelError: Likewise.
            RemoteProtocolError: If the bytes are not a frame.
        """
        frame = receive_some(self.connection, reader, self._peer)
        if frame is not None and self._lingering is not None:
            self._ledger.note_received()
        return frame

    def owes_acknowledgement(self) -> bool:
        """Whether this end must now report its number of received frames to the peer."""
        return self._lingering is not None and self._ledger.owes_acknowledgement(
            self.connection.traffic.received_bytes,
            time.monotonic(),
            self._deadlines.heartbeat_seconds,
        )

    def acknowledge(self, count: int) -> None:
        """Forget the frames received by the peer.

        Raises:
            RemoteProtocolError: If the peer cannot have received so many.
        """
        if self._lingering is not None:
            self._ledger.acknowledge(count)

    def recover(self, cause: Exception) -> None:
        """Wait until another connection takes the place of the broken one.

        Only the reading thread may call it. An incomplete frame comes again as a whole.

        Raises:
            OSError: The cause, if it was the last connection.
            ChannelError: Likewise, or if another connection did not come in time.
            RemoteProtocolError: If the peer came back with wrong numbers.
        """
        if self._lingering is None or self._is_final:
            raise cause
        began_seconds = time.monotonic()
        self._break(cause)
        logger.warning(
            "the connection to %s broke: %s; waiting up to %g s for it to come back",
            *(self._peer, self._reason.rstrip("."), self._lingering.seconds),
        )
        self.on_away(self._reason)
        with self._changed:
            self._is_parked = True
            self._changed.notify_all()
        end_seconds = began_seconds + self._lingering.seconds
        if self._lingering.redial is None:
            self._await_peer(end_seconds)
        else:
            self._dial_again(self._lingering.redial, end_seconds)
        logger.warning(
            "the connection to %s is back after %.1f s; %d frames are sent again",
            *(self._peer, time.monotonic() - began_seconds, self._num_again),
        )
        self.on_back()

    def resume(
        self, connection: Connection, attempt: int, count: int, welcome: Callable[[int], None]
    ) -> None:
        """Go on over the peer's new connection in place of the broken one.

        Any thread may call it. This end may not have noticed the break of the old connection.

        Args:
            attempt: The number of the peer's attempt; later ones have higher numbers.
            count: The number of frames received by the peer.
            welcome: Reports to the peer the number of its frames received here.

        Raises:
            OSError: If the peer has to dial again.
            ChannelError: Likewise, or if a frame cannot be sent again.
            WorkerError: If the conversation is over.
            RemoteProtocolError: If the number is wrong; the line ends too.
        """
        with self._answering:
            with self._changed:
                if attempt <= self._attempt:
                    raise ChannelError("The peer has dialled again since.")
                self._attempt = attempt
            self._break(ChannelError("The peer has dialled again."))
            self._wait_until_parked()
            self._go_on(connection, count, welcome)

    def _write(self, name: str, buffers: list[memoryview]) -> bool:
        """Write a frame; false if the connection is away."""
        if self._lingering is None:
            send_buffers(self.connection, buffers, self._deadlines.silence_seconds, True)
            return True
        self._ledger.keep(name, buffers)
        return self._write_due()

    def _write_due(self) -> bool:
        """Write the frames that are due; false if the connection is away."""
        if self.is_away:
            if self._is_final:
                raise ChannelError(f"The connection to {self._peer} is broken.")
            return False
        try:
            while (due := self._ledger.next_due()) is not None:
                send_buffers(self.connection, due, self._deadlines.silence_seconds, True)
        except (OSError, ChannelError) as error:
            if self._is_final:
                raise
            self._break(error)
            return False
        return True

    def _break(self, cause: Exception) -> None:
        """Note that the connection is broken, and why; the first cause counts."""
        with self._changed:
            if not self.is_away:
                self.is_away, self._reason = True, reason_of(cause, self._peer)
                self.connection.shut_down()  # wakes the other thread

    def _wait_until_parked(self) -> None:
        with self._changed:
            is_in_time = self._changed.wait_for(
                lambda: self._is_parked or self._is_final, _LEAVE_SECONDS
            )
            if self._is_final:
                raise WorkerError("This conversation is over.")
        if not is_in_time:
            raise ChannelError("The old connection is still in use.")

    def _await_peer(self, end_seconds: float) -> None:
        """Wait until the peer has dialled again."""
        with self._changed:
            # The next connection may be broken too before this thread wakes.
            self._changed.wait_for(
                lambda: not self._is_parked or self._is_final or self._obstacle is not None,
                end_seconds - time.monotonic(),
            )
            if self._is_parked:
                raise self._obstacle or self._given_up()

    def _dial_again(self, redial: Redial, end_seconds: float) -> None:
        """Dial until the peer answers."""
        latest = ""
        for pause_seconds in pauses():
            with self._changed:
                self._changed.wait_for(lambda: self._is_final, pause_seconds)
                if self._is_final or time.monotonic() > end_seconds:
                    raise self._given_up(latest)
            self._attempt += 1
            try:
                connection, count = redial(self._attempt, self.num_received)
            except PeerGone as error:
                raise ChannelError(f"{self._reason} {error}") from error
            except (OSError, HeteroError) as error:
                logger.debug("dialling %s again: %s", self._peer, error)
                latest = str(error)
                continue
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(connection.close)
                self._go_on(connection, count)
                on_failure.pop_all()
            return

    def _given_up(self, latest: str = "") -> ChannelError:
        """The error for a lost connection; the line does not go on after it."""
        if self._is_final or self._lingering is None:
            return ChannelError(self._reason)
        self._is_final = True
        text = f"{self._reason} It did not come back within {self._lingering.seconds:g} s."
        return ChannelError(f"{text} The last attempt: {latest}" if latest else text)

    def _go_on(
        self, connection: Connection, count: int, welcome: Callable[[int], None] | None = None
    ) -> None:
        """Put a connection in the place of the broken one; the reading thread is parked."""
        with self._sending:
            self._resume_ledger(count)
            if welcome is not None:
                welcome(self.num_received)
            connection.set_timeout(self._deadlines.heartbeat_seconds)
            connection.traffic.add(self.connection.traffic)
            with self._changed:
                if self._is_final:
                    raise WorkerError("This conversation is over.")
                self.connection.close()
                self.connection, self.is_away, self._is_parked = connection, False, False
                self._changed.notify_all()

    def _resume_ledger(self, count: int) -> None:
        try:
            self._num_again = self._ledger.resume(count)
        except HeteroError as error:
            with self._changed:
                self._obstacle = error
                self._changed.notify_all()
            raise
