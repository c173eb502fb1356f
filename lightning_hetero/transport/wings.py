"""The wing that a channel takes in: it makes its line here, and imports no wing."""

from __future__ import annotations

from ..optional import has_wing
from .connection import Connection
from .deadlines import Deadlines
from .line import Line, Lingering


def line_over(
    connection: Connection, peer: str, deadlines: Deadlines, lingering: Lingering | None
) -> Line:
    """The line of a channel.

    Args:
        connection: The first connection. The line closes each connection.
        peer: Name of the other end, for messages to people.
        deadlines: How long each kind of waiting may take.
        lingering: The agreement of the two ends; None if the line breaks for good.
    """
    if lingering is None:
        return Line(connection, peer, deadlines)
    from .reconnection import LingeringLine

    return LingeringLine(connection, peer, deadlines, lingering)


def linger_seconds(wanted_seconds: float) -> float:
    """How long this end can keep a conversation whose connection broke: not at all without the
    wing."""
    return wanted_seconds if has_wing("transport.reconnection") else 0.0
