"""A line: below a channel, it sends and receives frames over a connection.

A line breaks for good with its connection. A line with `Lingering` goes on over another connection
(`reconnection`), and the users of its channel do not notice.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import ChannelError, HeteroError, RemoteProtocolError, WorkerError
from ..protocol.frames import Frame, FrameReader
from .connection import Connection, send_buffers
from .deadlines import Deadlines

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
    while (num_bytes := connection.receive_into(missing, sure_bytes=len(missing))) > 0:
        frame = reader.advance(num_bytes)
        if frame is not None or not connection.has_ahead:
            return frame
        missing = reader.buffer()
    try:
        reader.close()
    except RemoteProtocolError as error:
        raise ChannelError(
            f"{peer} ended the connection in the middle of a message, as happens when a process is "
            "killed."
        ) from error
    raise ChannelError(f"{peer} ended the connection without a Goodbye.")


class Line:
    """Sends and receives frames over a connection. Two threads use it: one sends, one receives.

    Args:
        connection: The connection. The line closes it.
        peer: Name of the other end, for messages to people.
        deadlines: How long each kind of waiting may take.

    Attributes:
        connection: The present connection.
        is_away: Whether it has broken, and another connection may take its place.
        lingering: The agreement of the two ends; None if the line breaks for good.
    """

    lingering: Lingering | None = None

    def __init__(self, connection: Connection, peer: str, deadlines: Deadlines) -> None:
        self.connection = connection
        self.is_away = False
        self._peer = peer
        self._deadlines = deadlines
        # Held while a frame is written or the connection is replaced.
        self._sending = threading.Lock()

    @property
    def num_received(self) -> int:
        """The number of whole frames received; stays 0 without lingering."""
        return 0

    def make_final(self) -> None:
        """Make the present connection the last."""

    def give_up(self, reason: str) -> None:
        """Stop waiting for another connection if this one is away, because the peer has ended."""

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
            self._write(name, buffers)

    def try_to_send(self, name: str, buffers: list[memoryview]) -> bool:
        """Send a small frame without waiting; false if this is not possible at present.

        It is not possible while another thread sends, while the connection is away or full, and
        while other frames have to go first.
        """
        if not self._sending.acquire(blocking=False):
            return False
        try:
            is_free = self._is_free and self.connection.has_room()
            if is_free:
                self._write(name, buffers)
            return is_free
        finally:
            self._sending.release()

    @property
    def _is_free(self) -> bool:
        """Whether a frame may go before all others."""
        return True

    def _write(self, name: str, buffers: list[memoryview]) -> bool:
        """Write a frame; false if the connection is away."""
        send_buffers(self.connection, buffers, self._deadlines.silence_seconds, True)
        return True

    def own_all(self) -> None:
        """Copy all frames kept for repetition: their tensors may change from now on."""

    def receive(self, reader: FrameReader) -> Frame | None:
        """Read arrived bytes; return the frame if they complete one.

        Raises:
            TimeoutError: If nothing arrives within the connection's timeout.
            OSError: If the connection broke; call `leave`.
            ChannelError: Likewise.
            RemoteProtocolError: If the bytes are not a frame.
        """
        return receive_some(self.connection, reader, self._peer)

    def owes_acknowledgement(self) -> bool:
        """Whether this end must now report its number of received frames to the peer."""
        return False

    def acknowledge(self, count: int) -> None:
        """Forget the frames received by the peer.

        Raises:
            RemoteProtocolError: If the peer cannot have received so many.
        """

    def leave(self, cause: Exception) -> str:
        """Leave the broken connection; only the reading thread may call it.

        Returns:
            The reason, as a sentence. `come_back` has to follow.

        Raises:
            OSError: The cause, if it was the last connection.
            ChannelError: Likewise.
        """
        raise cause

    def come_back(self) -> None:
        """Wait until another connection is there. An incomplete frame comes again as a whole.

        Raises:
            ChannelError: If another connection did not come in time.
            RemoteProtocolError: If the peer came back with wrong numbers.
        """

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
        raise WorkerError("This conversation ends with its connection.")
