from __future__ import annotations

import socket
from contextlib import ExitStack
from queue import SimpleQueue

import pytest

from lightning_hetero.errors import WorkerError, WorkerUnreachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.session import coordinator_session
from lightning_hetero.runtime.worker.worker import address_of, listen
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import Identity, dial
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token

from ...transport.pairs import PATIENCE_SECONDS, QUICK, worker_thread


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "strix.local"])  # noqa: S104
def test_only_loopback_is_listened_on(host: str) -> None:
    with pytest.raises(WorkerError, match=r"without a token.*loopback only.*hetero token"):
        listen(Address(host, 0))


def test_a_port_in_use_is_named() -> None:
    with listen(Address("127.0.0.1", 0)) as listener:
        taken = address_of(listener)
        with pytest.raises(WorkerError, match=f"Cannot listen on {taken}"):
            listen(taken)


def test_one_coordinator_at_a_time_and_then_the_next() -> None:
    with worker_thread() as address:
        first, _ = dial(address, coordinator_session(), "coordinator", "a", QUICK, Identity())
        first.start(SimpleQueue())
        with pytest.raises(WorkerUnreachable, match="busy with another coordinator"):
            dial(address, coordinator_session(), "coordinator", "b", QUICK, Identity())
        first.close(m.Goodbye())
        second, _ = dial(address, coordinator_session(), "coordinator", "c", QUICK, Identity())
        second.start(SimpleQueue())
        second.close()


@pytest.mark.parametrize("credentials", [None, Credentials(Token.new())], ids=["plain", "TLS"])
def test_silent_strangers_do_not_keep_others_out(credentials: Credentials | None) -> None:
    """They would be heard out for far longer than the coordinator is ready to wait."""
    identity = Identity(credentials=credentials)
    hour = Deadlines(connect_seconds=3600.0)
    with worker_thread(credentials, hour) as address, ExitStack() as strangers:
        where = (address.host, address.port)
        for _ in range(40):
            strangers.enter_context(socket.create_connection(where, PATIENCE_SECONDS))
        channel, _ = dial(address, coordinator_session(), "coordinator", "a", QUICK, identity)
        channel.start(SimpleQueue())
        channel.close(m.Goodbye())


def test_a_worker_may_listen_beyond_loopback_with_a_token() -> None:
    credentials = Credentials(Token.new())
    with listen(Address("0.0.0.0", 0), credentials) as listener:  # noqa: S104
        assert not address_of(listener).is_loopback
