"""The lobby: connections whose handshake is not over. It is small, and nobody can occupy it."""

from __future__ import annotations

import threading

from ...transport.connection import Connection


class Lobby:
    """Holds at most so many connections; for a newcomer the stranger that is there longest must go.

    An honest handshake takes milliseconds, so whoever is there longest when many push in is one of
    those who only take room.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        # In the order in which they came; the value says whether they are strangers.
        self._is_stranger: dict[Connection, bool] = {}

    def enter(self, connection: Connection) -> None:
        """Take a connection in, as soon as one has left if they are too many."""
        with self._changed:
            while len(self._is_stranger) >= self._most:
                self._send_one_away()
                self._changed.wait()
            self._is_stranger[connection] = True

    def introduce(self, connection: Connection) -> None:
        """Note that a connection has said who it is; it is not sent away any more."""
        with self._changed:
            self._is_stranger[connection] = False

    def leave(self, connection: Connection) -> None:
        """A connection's handshake is over, in whatever way."""
        with self._changed:
            del self._is_stranger[connection]
            self._changed.notify_all()

    def _send_one_away(self) -> None:
        oldest = next((c for c, is_stranger in self._is_stranger.items() if is_stranger), None)
        if oldest is not None:
            # Which wakes its thread, and that makes it leave.
            oldest.shut_down()
