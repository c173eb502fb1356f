"""Credentials of two tokens, and clocks that are wrong."""

from __future__ import annotations

import datetime
from collections.abc import Callable

from lightning_hetero.transport import tls
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token

TOKEN, OTHER_TOKEN = Token.new(), Token.new()
OURS, THEIRS = Credentials(TOKEN), Credentials(OTHER_TOKEN)


def at(days: float) -> Callable[[], datetime.datetime]:
    """A clock that is wrong by some days."""
    return lambda: tls.utc_now() + datetime.timedelta(days=days)
