from __future__ import annotations

from queue import SimpleQueue

import pytest

from lightning_hetero.errors import WorkerError, WorkerUnreachable
from lightning_hetero.runtime.address import Address
from lightning_hetero.runtime.handshake import dial
from lightning_hetero.runtime.worker import address_of, listen
from lightning_hetero.wire import messages as m
from lightning_hetero.wire.session import coordinator_session

from .pairs import QUICK, worker_thread


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "strix.local"])  # noqa: S104
def test_only_loopback_is_listened_on(host: str) -> None:
    with pytest.raises(WorkerError, match="loopback only"):
        listen(Address(host, 0))


def test_a_port_in_use_is_named() -> None:
    with listen(Address("127.0.0.1", 0)) as listener:
        taken = address_of(listener)
        with pytest.raises(WorkerError, match=f"Cannot listen on {taken}"):
            listen(taken)


def test_one_coordinator_at_a_time_and_then_the_next() -> None:
    with worker_thread() as address:
        first, _ = dial(address, coordinator_session(), "coordinator", "a", QUICK)
        first.start(SimpleQueue())
        with pytest.raises(WorkerUnreachable, match="busy with another coordinator"):
            dial(address, coordinator_session(), "coordinator", "b", QUICK)
        first.close(m.Goodbye())
        second, _ = dial(address, coordinator_session(), "coordinator", "c", QUICK)
        second.start(SimpleQueue())
        second.close()
