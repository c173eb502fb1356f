"""Made-up workers that knock at a door, and doors for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from lightning_hetero.launch.join import Door
from lightning_hetero.protocol.messages import Equipment
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import Joined, join
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token

from ..transport.pairs import PATIENCE_SECONDS

# Many handshakes at the same time take their turns on a small machine.
CALM = Deadlines(connect_seconds=PATIENCE_SECONDS, heartbeat_seconds=0.5, silence_seconds=5.0)
TOKEN = Token.new()
WITH_TOKEN = Identity(Equipment(device="cpu"), Credentials(TOKEN))
LISTENER = Address("127.0.0.1", 4321)
# A connection that nobody refers to is closed.
_joined: list[Joined] = []


@contextmanager
def door(
    least: int = 1,
    named: Sequence[str] = (),
    identity: Identity = WITH_TOKEN,
    deadlines: Deadlines = CALM,
) -> Iterator[Door]:
    """A door on a free loopback port, for the block."""
    opened = Door(Address("127.0.0.1", 0), identity, deadlines, least, named)
    try:
        yield opened
    finally:
        opened.close()
        for joined in _joined:
            joined.connection.close()
        _joined.clear()


def knock(
    at: Door,
    name: str,
    identity: Identity = WITH_TOKEN,
    listener: Address = LISTENER,
    session: str = "",
) -> Joined:
    """Join as a worker of that name does, and stay until the block of the door ends.

    With a session, join as its second process does.
    """
    joined = join(at.address, name, listener, CALM, identity, session)
    _joined.append(joined)
    return joined


def with_versions(**versions: str) -> Identity:
    """A worker with the token and these versions."""
    return replace(WITH_TOKEN, equipment=Equipment(versions=versions))
