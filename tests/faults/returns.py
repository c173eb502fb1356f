"""How soon a conversation goes on after its link is back, as a table.

python -m tests.faults.returns    takes about a minute; a link of network namespaces needs root
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.channel import Channel
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import dial
from lightning_hetero.transport.tls import credentials_of
from lightning_hetero.transport.token import Token, write_token_file

from ..conftest import worker_process
from .namespace import THERE, Cable, cable
from .relay import Relay, relay_to

PATIENCE_SECONDS = 60.0
# The times for which a link is away.
AWAY_SECONDS = (0.1, 1.0, 5.0, 12.0, 20.0)


@dataclass
class Talk:
    """A conversation with a worker."""

    channel: Channel
    inbox: Any

    def is_answered(self) -> bool:
        """Ask something, and wait for the answer."""
        self.channel.send(m.DescribeDevice())
        return isinstance(self.inbox.get(timeout=PATIENCE_SECONDS).content, Frame)


@contextmanager
def talk(address: str, token_file: Path) -> Iterator[Talk]:
    identity = Identity(credentials=credentials_of(token_file))
    deadlines = Deadlines(linger_seconds=PATIENCE_SECONDS)
    channel, _ = dial(Address.parse(address), "coordinator", "returns", deadlines, identity)
    inbox: Any = SimpleQueue()
    channel.start(inbox)
    try:
        yield Talk(channel, inbox)
    finally:
        channel.close(m.Goodbye())


def seconds_until_back(
    found: Talk, seconds: float, away: Callable[[], None], back: Callable[[], None]
) -> float:
    """How long after its link is back a conversation goes on."""
    assert found.is_answered()
    away()
    time.sleep(seconds)
    back()
    began = time.monotonic()
    assert found.is_answered()
    return time.monotonic() - began


def stalled(relay: Relay) -> Callable[[], None]:
    """The end of a stall: what stood still is lost."""

    def end() -> None:
        relay.heal()
        relay.reset()

    return end


def measure(line: Cable | None) -> Table:
    table = Table("fault", *(f"after {seconds:g} s" for seconds in AWAY_SECONDS))
    with TemporaryDirectory() as folder, ExitStack() as stack:
        token_file = Path(folder, "token")
        write_token_file(token_file, Token.new())
        worker = stack.enter_context(worker_process("--token-file", str(token_file)))
        relay = stack.enter_context(relay_to(worker.address))
        faults: dict[str, tuple[str, Callable[[], None], Callable[[], None]]] = {
            "RST, and each new connection is ended": (relay.address, relay.pull, relay.plug),
            "stall, then RST": (relay.address, relay.stall, stalled(relay)),
        }
        if line is not None:
            options = ["--listen", f"{THERE}:0", "--token-file", str(token_file)]
            far = stack.enter_context(worker_process(*options, prefix=line.prefix))
            faults["link down"] = (far.address, line.pull, line.plug)
        for name, (address, away, back) in faults.items():
            cells = []
            for seconds in AWAY_SECONDS:
                with talk(address, token_file) as found:
                    cells.append(f"{seconds_until_back(found, seconds, away, back):.2f} s")
            table.add_row(name, *cells)
    return table


def main() -> None:
    logging.getLogger("lightning_hetero").setLevel(logging.ERROR)
    with cable() as line:
        Console(width=120).print(measure(line))


if __name__ == "__main__":
    main()
