"""A worker's session whose connection breaks: who may go on with it, and who may not."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from lightning_hetero.errors import ChannelError, HeteroError, WorkerUnreachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame
from lightning_hetero.protocol.session import opening_session
from lightning_hetero.transport import handshake
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.channel import Channel
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.connection import SocketConnection
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import dial, greet
from lightning_hetero.transport.process_names import own_name
from lightning_hetero.transport.tls import Credentials, secured
from lightning_hetero.transport.token import Token
from lightning_hetero.worker.owner import Owner
from lightning_hetero.worker.worker import Worker

from ..faults.relay import Relay, relay_to
from ..transport.pairs import PATIENCE_SECONDS, End, serving_worker

SECONDS = 60.0
DEADLINES = Deadlines(busy_seconds=0.1, linger_seconds=SECONDS)


class Talk:
    """A coordinator's conversation with a worker, over a relay."""

    def __init__(
        self,
        worker: Worker,
        address: Address,
        relay: Relay,
        deadlines: Deadlines,
        credentials: Credentials | None,
    ) -> None:
        self.worker, self.address, self.relay = worker, address, relay
        self.identity = Identity(credentials=credentials)
        self.channel, _ = dial(
            Address.parse(relay.address), "coordinator", "secret name", deadlines, self.identity
        )
        self.end = End(self.channel, SimpleQueue())
        self.channel.start(self.end.inbox)

    def dialled(self) -> Channel:
        """The channel of another run, which dials the worker itself."""
        return dial(self.address, "coordinator", "another run", DEADLINES, self.identity)[0]

    def is_answered(self) -> bool:
        """Whether the worker answers a question."""
        self.channel.send(m.DescribeDevice())
        content = self.end.next().content
        return isinstance(content, Frame) and isinstance(content.message, m.DeviceDescribed)

    def error(self) -> HeteroError:
        error = self.end.next().content
        assert isinstance(error, HeteroError), error
        return error

    @property
    def secret(self) -> str:
        lingering = self.channel.line.lingering
        assert lingering is not None
        return lingering.secret

    def say(self, **fields: Any) -> m.Message:
        """What the worker answers to somebody else's Hello."""
        hello = m.Hello(m.PROTOCOL_VERSION, "coordinator", "secret name", **fields)
        return said(self.address, hello, self.identity.credentials)


def said(address: Address, hello: m.Hello, credentials: Credentials | None) -> m.Message:
    connected = socket.create_connection((address.host, address.port), PATIENCE_SECONDS)
    with connected:
        connection = secured(SocketConnection(connected), credentials, False, PATIENCE_SECONDS)
        return greet(connection, opening_session(hello.role), hello, PATIENCE_SECONDS)


@contextmanager
def talk(
    owner: Owner | None = None,
    deadlines: Deadlines = DEADLINES,
    credentials: Credentials | None = None,
) -> Iterator[Talk]:
    at_worker = Deadlines(busy_seconds=0.1)
    with (
        serving_worker(credentials, at_worker, owner=owner) as (worker, address),
        relay_to(str(address)) as relay,
    ):
        found = Talk(worker, address, relay, deadlines, credentials)
        try:
            yield found
        finally:
            found.channel.close(m.Goodbye())


@pytest.fixture(params=[False, True], ids=["without a token", "with a token"])
def credentials(request: pytest.FixtureRequest) -> Credentials | None:
    return Credentials(Token.new()) if request.param else None


def test_a_conversation_goes_on_after_its_connection_broke(
    credentials: Credentials | None,
) -> None:
    with talk(credentials=credentials) as found:
        assert found.is_answered()
        for _ in range(3):
            found.relay.reset()
            assert found.is_answered()
        assert found.channel.traffic.sent_bytes > 0


def test_a_stranger_learns_nothing_and_delays_nothing(credentials: Credentials | None) -> None:
    with talk(credentials=credentials) as found:
        found.relay.pull()
        wrong = [found.secret[:-1] + "x", "", "\N{SNOWMAN}", "0" * 64]
        strangers = [{"secret": secret, "attempt": 2**30} for secret in wrong]
        answers = {str(found.say(**stranger)) for stranger in strangers if stranger["secret"]}
        answers.add(
            str(said(found.address, m.Hello(m.PROTOCOL_VERSION, "neighbor", "x"), credentials))
        )
        assert len(answers) == 1
        assert "does not serve the session" in answers.pop()
        with ExitStack() as silent:
            for _ in range(40):
                where = (found.address.host, found.address.port)
                silent.enter_context(socket.create_connection(where, PATIENCE_SECONDS))
            found.relay.plug()
            assert found.is_answered()


def test_without_the_token_the_secret_is_of_no_use() -> None:
    with talk(credentials=Credentials(Token.new())) as found:
        found.relay.pull()
        hello = m.Hello(
            m.PROTOCOL_VERSION, "coordinator", "secret name", secret=found.secret, attempt=2**30
        )
        for other in (None, Credentials(Token.new())):
            with pytest.raises(HeteroError):
                said(found.address, hello, other)
        found.relay.plug()
        assert found.is_answered()


@pytest.mark.parametrize("received", [2**20, 10])
def test_a_wrong_number_ends_the_conversation_with_the_rule(received: int) -> None:
    with talk() as found:
        assert found.is_answered()
        answer = found.say(secret=found.secret, attempt=2**30, received=received)
        assert isinstance(answer, m.Failure)
        assert f"It says that {received} frames have come, and" in answer.reason
        assert "does not serve the session" in str(found.error())


@pytest.mark.follows(
    "try again later, use another worker, or restart this worker if the other run is over"
)
def test_another_coordinator_is_told_why_the_worker_is_busy() -> None:
    with talk() as found:
        found.relay.pull()
        answer = found.say()
        assert isinstance(answer, m.Failure)
        assert "the connection to its coordinator broke, and it waits up to 60 s" in answer.reason
        assert "restart this worker if the other run is over" in answer.reason
        found.relay.plug()
        assert found.is_answered()
        found.channel.close(m.Goodbye())
        with found.worker._session_changed:
            assert found.worker._session_changed.wait_for(
                lambda: found.worker._session is None, PATIENCE_SECONDS
            )
        channel = found.dialled()
        channel.start(SimpleQueue())
        channel.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes have no names")
@pytest.mark.parametrize("is_killed", [True, False])
def test_the_run_behind_a_killed_one_gets_the_worker(
    is_killed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the same machine, where it is seen that the coordinator for which it waits has ended."""
    place, number, began = own_name().split()
    name = f"{place} {number} {'0' if is_killed else began}"
    with monkeypatch.context() as patch, ExitStack() as talks:
        patch.setattr(handshake, "own_name", lambda: name)
        found = talks.enter_context(talk())
        found.channel.line.make_final()  # as a killed process, which dials no more
        patch.undo()
        found.relay.pull()
        if not is_killed:
            with pytest.raises(WorkerUnreachable, match="it waits up to 60 s for it to come back"):
                found.dialled()
            found.worker.give_up_coordinator("The test is over.")
            return
        with caplog.at_level(logging.INFO):
            channel = found.dialled()
        channel.start(SimpleQueue())
        channel.close()
        assert (
            f"the worker at {found.address} has waited for the killed coordinator of an"
            in caplog.text
        )


def test_a_worker_is_free_when_the_time_is_over() -> None:
    with talk(deadlines=replace(DEADLINES, linger_seconds=0.2)) as found:
        found.relay.pull()
        assert "It did not come back within 0.2 s." in str(found.error())
        with found.worker._session_changed:
            assert found.worker._session_changed.wait_for(
                lambda: found.worker._session is None, PATIENCE_SECONDS
            )


def test_a_worker_that_has_ended_is_lost_at_once() -> None:
    with talk() as found:
        assert found.is_answered()
        found.worker.stop()
        found.worker._reception._listener.close()
        found.relay.pull()
        found.relay.close()
        assert "No worker answers at" in str(found.error())


@pytest.mark.parametrize(
    ("allowed", "asked", "expected"), [(120.0, 60.0, 60.0), (5.0, 60.0, 5.0), (0.0, 60.0, None)]
)
def test_the_owner_bounds_the_time(allowed: float, asked: float, expected: float | None) -> None:
    with talk(Owner(linger_seconds=allowed), replace(DEADLINES, linger_seconds=asked)) as found:
        lingering = found.channel.line.lingering
        assert (None if lingering is None else lingering.seconds) == expected
        if expected is None:
            found.relay.reset()
            assert isinstance(found.error(), ChannelError)


def test_who_does_not_ask_for_time_gets_none() -> None:
    with talk(deadlines=Deadlines()) as found:
        assert found.channel.line.lingering is None
        found.relay.reset()
        assert isinstance(found.error(), ChannelError)


def test_a_worker_knows_a_neighbor_by_its_own_secret() -> None:
    """One worker of the run cannot take another one's place."""
    with talk() as found:
        neighbor, _ = dial(found.address, "neighbor", "secret name", DEADLINES, Identity(), 3)
        inbox: SimpleQueue[Any] = SimpleQueue()
        neighbor.start(inbox)
        assert neighbor.line.lingering is not None
        assert neighbor.line.lingering.secret != found.secret
        neighbor.line.connection.shut_down()
        assert neighbor.peer_answers()
        assert found.is_answered()
        neighbor.close(m.Goodbye())
