"""Takes connections within limits: how many handshakes run at once, and how many refused ones the
log names.

Anyone may connect to a port. So the handshakes of strangers take bounded room, and refused
connections take a bounded number of lines in the log.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from .connection import Connection, SocketConnection, accept

logger = logging.getLogger(__name__)

# The most handshakes at the same time.
MOST_GREETINGS = 16
# Refused connections get at most one line in the log for an address in this time.
SECONDS_OF_A_LINE = 60.0
# The most addresses with a count of their own. A stranger may have any number of addresses.
_MOST_ADDRESSES = 128
_OTHER_ADDRESSES = "other addresses"


class Lobby:
    """Holds the connections during their handshakes, at most so many of them.

    In a full lobby, a newcomer displaces the oldest stranger. An honest handshake takes
    milliseconds, so the oldest stranger most likely only takes room.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        # In the order of their arrival; a stranger has not said who it is.
        self._is_stranger: dict[Connection, bool] = {}

    def enter(self, connection: Connection) -> None:
        """Take a connection in; when the lobby is full, wait until another connection has left."""
        with self._changed:
            while len(self._is_stranger) >= self._most:
                self._send_one_away()
                self._changed.wait()
            self._is_stranger[connection] = True

    def introduce(self, connection: Connection) -> None:
        """Note the end of a connection's Hello. Newcomers do not displace it any more."""
        with self._changed:
            self._is_stranger[connection] = False

    def leave(self, connection: Connection) -> None:
        """Note the end of a connection's handshake, with or without success."""
        with self._changed:
            del self._is_stranger[connection]
            self._changed.notify_all()

    def wait_until_empty(self, patience_seconds: float) -> None:
        """Wait until all handshakes have ended, but not for longer."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_stranger, patience_seconds)

    def _send_one_away(self) -> None:
        oldest = next((c for c, is_stranger in self._is_stranger.items() if is_stranger), None)
        if oldest is not None:
            # This wakes its thread, which then leaves.
            oldest.shut_down()


@dataclass
class _RefusedAddress:
    """The refused connections of an address since its last line in the log."""

    told_at: float
    num_left_out: int = 0
    last_reason: str = ""


class RefusalLog:
    """Logs refused connections: at most one line for an address and minute.

    Anyone may connect, and a line for each connection would fill the disk. The log counts the
    omitted lines, and reports the number at the end of the minute.

    Args:
        now: The present time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        # In the order of their last lines.
        self._refused: dict[str, _RefusedAddress] = {}

    def note(self, host: str, port: int, reason: str) -> None:
        """Log a refused connection, or count it."""
        with self._lock:
            is_known = host in self._refused or len(self._refused) < _MOST_ADDRESSES
            whose = host if is_known else _OTHER_ADDRESSES
            if (refused := self._refused.get(whose)) is not None:
                refused.num_left_out += 1
                refused.last_reason = reason
            else:
                self._refused[whose] = _RefusedAddress(self._now())
                logger.warning("connection from %s:%d refused: %s", host, port, reason)

    def tell_left_out(self, at_once: bool = False) -> None:
        """Log the number of omitted lines of past minutes, ``at_once`` of the present one too."""
        with self._lock:
            now = self._now()
            while self._refused:
                host, refused = next(iter(self._refused.items()))
                seconds = now - refused.told_at
                if seconds < SECONDS_OF_A_LINE and not at_once:
                    break
                del self._refused[host]
                if refused.num_left_out > 0:
                    logger.warning(
                        "connections from %s refused in %.0f s without a line: %d, the last: %s",
                        host,
                        seconds,
                        refused.num_left_out,
                        refused.last_reason,
                    )
                    if not at_once:
                        self._refused[host] = _RefusedAddress(now)


class Reception:
    """Takes connections from a listener, and leads each through its handshake in a thread.

    Args:
        listener: A listening socket; `take_connections` closes it.
        greet: Leads a connection from a host and a port through its handshake. It must let the
            connection leave the lobby.
        most: The most handshakes at the same time.

    Attributes:
        lobby: The connections in their handshakes.
        refusals: The log of refused connections.
        over: Set by `end`.
    """

    def __init__(
        self,
        listener: socket.socket,
        greet: Callable[[SocketConnection, str, int], None],
        most: int = MOST_GREETINGS,
    ) -> None:
        # Several processes may wait for the same listener, and one of them is the first.
        listener.setblocking(False)
        self._listener = listener
        self._greet = greet
        self.lobby = Lobby(most)
        self.refusals = RefusalLog()
        self.over = threading.Event()
        self._ending, self._ended = socket.socketpair()

    def end(self) -> None:
        """Stop taking connections."""
        self.over.set()
        self._ending.close()  # wakes `take_connections`

    def take_connections(self, pause_seconds: Callable[[], float] = lambda: 0.0) -> None:
        """Take connections until `end` is called.

        Args:
            pause_seconds: How long to leave a connection to other processes first.
        """
        with self._listener, self._ended, selectors.DefaultSelector() as arrivals:
            arrivals.register(self._listener, selectors.EVENT_READ)
            arrivals.register(self._ended, selectors.EVENT_READ)
            while not self.over.is_set():
                arrivals.select(SECONDS_OF_A_LINE)
                self.refusals.tell_left_out()
                self.over.wait(pause_seconds())
                # The peer may have gone, or another process may have accepted it.
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    self._accept()
        self.refusals.tell_left_out(at_once=True)

    def _accept(self) -> None:
        if self.over.is_set():
            return
        connected, place = accept(self._listener)
        connected.setblocking(True)
        connection = SocketConnection(connected)
        self.lobby.enter(connection)
        thread = threading.Thread(target=self._greet, args=(connection, *place), daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The machine is out of threads. The handshake does not need one, and a session reports
            # the lack to its peer.
            self._greet(connection, *place)
