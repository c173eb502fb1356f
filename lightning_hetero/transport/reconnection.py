"""Reconnection: when the connection of a channel breaks, its line goes on over another one.

    the end that has dialled                    the end that was dialled
    breaks ▶ away ▶ dials again ─ Hello: secret, frames received ─▶ breaks ▶ away
             back ◀─────────────── Welcome: frames received ────── back
    sends the other frames again                sends the other frames again

Each end keeps the frames not yet acknowledged by the other end; `resumption` has the rules.

Two threads of a channel use its line. The sending thread waits while the connection is away; the
receiving thread gets the next connection.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from ..errors import ChannelError, HeteroError, WorkerError
from ..protocol.frames import Frame, FrameReader
from .connection import Connection, send_buffers
from .deadlines import Deadlines
from .line import Line, Lingering, PeerGone, Redial, reason_of
from .resumption import Ledger, pauses

logger = logging.getLogger(__name__)

# For the reading thread to leave the old connection after its shutdown.
_LEAVE_SECONDS = 5.0


class LingeringLine(Line):
    """A line that goes on over the next connection when one breaks.

    Args:
        connection: The first connection. The line closes each connection.
        peer: Name of the other end, for messages to people.
        deadlines: How long each kind of waiting may take.
        lingering: The agreement of the two ends.
    """

    lingering: Lingering

    def __init__(
        self, connection: Connection, peer: str, deadlines: Deadlines, lingering: Lingering
    ) -> None:
        super().__init__(connection, peer, deadlines)
        self.lingering = lingering
        self._ledger = Ledger()
        # Held while this end answers a peer that has dialled again.
        self._answering = threading.Lock()
        self._changed = threading.Condition()
        # Whether the present connection is the last.
        self._is_final = False
        # Whether the reading thread has left the broken connection, and since when.
        self._is_parked = False
        self._left_at_seconds = 0.0
        self._reason = ""
        self._num_again = 0
        # The peer broke a rule when it came back, or a frame cannot be sent again.
        self._obstacle: HeteroError | None = None
        self._attempt = 0

    @property
    def num_received(self) -> int:
        return self._ledger.num_received

    def make_final(self) -> None:
        with self._changed:
            self._is_final = True
            self._changed.notify_all()

    def give_up(self, reason: str) -> None:
        with self._changed:
            if self.is_away:
                self._reason = f"{self._reason} {reason}"
                self._is_final = True
                self._changed.notify_all()

    def send(self, name: str, buffers: list[memoryview]) -> None:
        with self._sending:
            is_written = self._write(name, buffers)
        while not is_written:
            with self._changed:
                self._changed.wait_for(lambda: self._is_final or not self.is_away)
            with self._sending:
                is_written = self._write_due()

    @property
    def _is_free(self) -> bool:
        return not self.is_away and not self._ledger.has_due

    def own_all(self) -> None:
        with self._sending:
            self._ledger.own_all()

    def receive(self, reader: FrameReader) -> Frame | None:
        frame = super().receive(reader)
        if frame is not None:
            self._ledger.note_received()
        return frame

    def owes_acknowledgement(self) -> bool:
        return self._ledger.owes_acknowledgement(
            self.connection.traffic.received_bytes,
            time.monotonic(),
            self._deadlines.heartbeat_seconds,
        )

    def acknowledge(self, count: int) -> None:
        self._ledger.acknowledge(count)

    def leave(self, cause: Exception) -> str:
        if self._is_final:
            raise cause
        self._left_at_seconds = time.monotonic()
        self._break(cause)
        logger.warning(
            "the connection to %s broke: %s; waiting up to %g s for it to come back",
            *(self._peer, self._reason.rstrip("."), self.lingering.seconds),
        )
        return self._reason

    def come_back(self) -> None:
        with self._changed:
            self._is_parked = True
            self._changed.notify_all()
        end_seconds = self._left_at_seconds + self.lingering.seconds
        if self.lingering.redial is None:
            self._await_peer(end_seconds)
        else:
            self._dial_again(self.lingering.redial, end_seconds)
        logger.warning(
            "the connection to %s is back after %.1f s; %d frames are sent again",
            *(self._peer, time.monotonic() - self._left_at_seconds, self._num_again),
        )

    def resume(
        self, connection: Connection, attempt: int, count: int, welcome: Callable[[int], None]
    ) -> None:
        with self._answering:
            with self._changed:
                if attempt <= self._attempt:
                    raise ChannelError("The peer has dialled again since.")
                self._attempt = attempt
            self._break(ChannelError("The peer has dialled again."))
            self._wait_until_parked()
            self._go_on(connection, count, welcome)

    def _write(self, name: str, buffers: list[memoryview]) -> bool:
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
        if self._is_final:
            return ChannelError(self._reason)
        self._is_final = True
        text = f"{self._reason} It did not come back within {self.lingering.seconds:g} s."
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
