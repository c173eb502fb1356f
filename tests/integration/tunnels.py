"""Addresses under which only the coordinator reaches the workers, as through SSH tunnels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from lightning_hetero.transport import handshake
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.connection import SocketConnection
from lightning_hetero.transport.deadlines import Deadlines

from ..faults.relay import relay_to

FORWARDED = "cannot reach .*the coordinator forwards what passes between the two"


class Ends(list[str]):
    """Addresses of tunnels.

    Attributes:
        reset: Resets the connections through the tunnels.
    """

    reset: Callable[[], None]


@contextmanager
def tunnels_to(workers: Sequence[str]) -> Iterator[Ends]:
    """Addresses under which only the coordinator reaches the workers.

    The address of each worker but the first is the one at which the worker before it listens.
    """
    ends = Ends(["127.0.0.1:1", *workers[:-1]])
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        relays = [stack.enter_context(relay_to(worker)) for worker in workers]
        tunnel_to = {end: relay.address for end, relay in zip(ends, relays, strict=True)}

        def reset() -> None:
            for relay in relays:
                relay.reset()

        ends.reset = reset
        connect = handshake._connect

        def through_tunnel(address: Address, deadlines: Deadlines) -> SocketConnection:
            return connect(Address.parse(tunnel_to[str(address)]), deadlines)

        # The workers are processes of their own, so they do not see the tunnels.
        patch.setattr(handshake, "_connect", through_tunnel)
        yield ends
