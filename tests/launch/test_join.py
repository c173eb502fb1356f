"""The door: who is let in, who is told what, and what strangers get."""

from __future__ import annotations

import errno
import logging
import math
import re
import resource
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest

from lightning_hetero.errors import JoinError, PlanError, WorkerError, WorkerUnreachable
from lightning_hetero.launch import join as joins
from lightning_hetero.launch.launcher import Joining, reachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.address import Address, checked_name
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.handshake import await_opening, dial, join
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token
from lightning_hetero.worker_sources import Launcher

from ..transport.pairs import PATIENCE_SECONDS
from .guests import CALM, LISTENER, WITH_TOKEN, door, knock, with_versions


def next_note(joined: joins.Connection) -> str:
    """The next word of the coordinator to a worker that waits."""
    message = await_opening(joined, PATIENCE_SECONDS, lambda: False)
    assert isinstance(message, m.Welcome)
    return message.note


def test_who_comes_is_told_who_is_missing_and_begins_in_the_order_of_names() -> None:
    with door(least=2) as opened:
        first = knock(opened, "gpu10")
        second = knock(opened, "gpu2", listener=Address("127.0.0.1", 17))
        opened.wait(PATIENCE_SECONDS)
        assert list(opened.begin(None).items()) == [
            ("gpu2", Address("127.0.0.1", 17)),
            ("gpu10", LISTENER),
        ]
        assert first.note == "it waits for one more worker"
        assert second.note == "the run begins"


@pytest.mark.follows(
    "as it has left again; look at its output, and start it again",
)
def test_a_session_opens_over_the_connection_that_the_worker_has_dialled() -> None:
    with door() as opened:
        joined = knock(opened, "a")
        opened.wait(PATIENCE_SECONDS)
        opened.begin(None)
        with ThreadPoolExecutor(1) as pool:
            admitted = pool.submit(opened.admit, "a", "session")
            hello = await_opening(joined.connection, PATIENCE_SECONDS, lambda: False)
            assert isinstance(hello, m.Hello)
            assert (hello.role, hello.session) == ("coordinator", "session")
            joins.send_buffers(
                joined.connection,
                joins.encode_frame(joins.Frame(m.Welcome(m.PROTOCOL_VERSION))),
                PATIENCE_SECONDS,
            )
            channel, _, where = admitted.result(PATIENCE_SECONDS)
        channel.close()
        assert where == LISTENER
        with pytest.raises(WorkerUnreachable, match="No worker named a waits at .* left again"):
            opened.admit("a", "again")
        knock(opened, "a")
        assert opened.names() == ["a"]


def test_a_second_process_waits_apart_for_its_session_alone() -> None:
    with door() as opened, ThreadPoolExecutor(1) as pool:
        knock(opened, "a")
        opened.wait(PATIENCE_SECONDS)
        opened.begin(None)
        admitted = pool.submit(opened.admit_beside, LISTENER, "second")
        others = [knock(opened, "a", session=each) for each in ("another", "second")]
        assert opened.names() == ["a"]
        assert opened.spares([], math.inf) == ["a"]
        hello = await_opening(others[1].connection, PATIENCE_SECONDS, lambda: False)
        assert isinstance(hello, m.Hello)
        assert (hello.role, hello.session) == ("coordinator", "second")
        joins.send_buffers(
            others[1].connection,
            joins.encode_frame(joins.Frame(m.Welcome(m.PROTOCOL_VERSION))),
            PATIENCE_SECONDS,
        )
        channel, _ = admitted.result(PATIENCE_SECONDS)
        channel.close()
        assert list(opened._seconds) == ["another"]
        others[0].connection.close()
        assert opened.names() == ["a"]
        assert opened._seconds == {}


def test_a_second_process_that_does_not_come_is_named_with_its_worker() -> None:
    with door(deadlines=replace(CALM, connect_seconds=0.05)) as opened:
        expected = f"second process of the worker at {LISTENER} has not dialled {opened.address}"
        with pytest.raises(WorkerUnreachable, match=expected + ".*; the worker's output shows"):
            opened.admit_beside(LISTENER, "second")


def test_a_wildcard_is_replaced_by_the_way_to_the_coordinator() -> None:
    with door() as opened:
        joined = knock(opened, "a", listener=Address("0.0.0.0", 17))  # noqa: S104
        opened.wait(PATIENCE_SECONDS)
        assert opened.begin(None) == {"a": Address("127.0.0.1", 17)}
        joined.connection.close()


def test_those_beyond_most_wait_as_spares_and_so_do_late_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with door() as opened, caplog.at_level(logging.INFO):
        guests = {name: knock(opened, name) for name in ("c", "b", "a")}
        opened.wait(PATIENCE_SECONDS)
        assert list(opened.begin(most=2)) == ["b", "c"]
        spare = "the run has begun with b and c, so it waits as a spare"
        assert next_note(guests["a"].connection) == spare
        late = knock(opened, "d")
        assert late.note == spare
    assert [late.is_spare, *(guest.is_spare for guest in guests.values())] == [True, *[False] * 3]
    assert (
        "a (cpu, from 127.0.0.1) waits as a spare: the run takes 2 workers at most" in caplog.text
    )
    said = (
        "d (cpu, from 127.0.0.1) has joined; the run goes on with b and c, and the new worker waits"
    )
    assert said in caplog.text


def test_spares_may_join_up_to_the_most_in_the_order_in_which_they_came() -> None:
    with door() as opened:
        for name in ("c", "a", "b"):
            knock(opened, name)
        opened.wait(PATIENCE_SECONDS)
        assert opened.spares(["x"], math.inf) == ["c", "a", "b"]
        assert opened.spares(["x"], 2) == ["c", "a"]
        assert opened.spares(["x"], -1) == []
        assert opened.spares(["a"], math.inf) == ["c", "b"]
        opened.note_members(["x10", "x2"])
        spare = "the run has begun with x2 and x10, so it waits as a spare"
        assert knock(opened, "d").note == spare


def test_a_plan_s_workers_are_waited_for_and_come_before_others() -> None:
    with door(least=1, named=["slow", "fast"]) as opened:
        others = [knock(opened, name) for name in ("x", "fast")]
        assert others[1].note == "it waits for slow"
        with pytest.raises(
            JoinError,
            match=r"x and fast joined. Missing: slow\..* killed at another .*`linger_seconds`",
        ):
            opened.wait(0.01)
        knock(opened, "slow")
        opened.wait(PATIENCE_SECONDS)
        assert list(opened.begin(most=2)) == ["fast", "slow"]


def test_one_that_comes_while_no_file_can_be_opened_is_let_in_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors, accept = [OSError(errno.EMFILE, "Too many open files")], socket.socket.accept

    def accept_next(listener: socket.socket) -> Any:
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr("lightning_hetero.transport.connection._NO_FILES_SECONDS", 0.0)
    monkeypatch.setattr(socket.socket, "accept", accept_next)
    with door() as opened:
        knock(opened, "a")
        assert opened.names() == ["a"]
    assert "this process cannot open it: [Errno 24] Too many open files" in caplog.text


def test_fifty_workers_that_come_at_once_are_all_let_in() -> None:
    names = [f"w{number}" for number in range(50)]
    with door(least=50) as opened, ThreadPoolExecutor(50) as pool:
        joined = list(pool.map(lambda name: knock(opened, name), names))
        opened.wait(PATIENCE_SECONDS)
        assert list(opened.begin(most=40)) == sorted(
            opened._members, key=lambda name: int(name[1:])
        )
        assert len(opened._members) == 40
        told = [each for each in joined if each.note]
        assert len(told) == 50


@pytest.fixture
def many_files() -> Iterator[None]:
    """A process that may have some thousands of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_half_open_strangers_keep_nobody_out() -> None:
    with door(least=50) as opened, ExitStack() as strangers, ThreadPoolExecutor(10) as pool:
        where = (opened.address.host, opened.address.port)
        for _ in range(500):
            strangers.enter_context(socket.create_connection(where, PATIENCE_SECONDS))
        list(pool.map(lambda number: knock(opened, f"w{number}"), range(50)))
        opened.wait(PATIENCE_SECONDS)
        assert len(opened.begin(None)) == 50


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\nHost: door\r\n\r\n", b"\x16\x03\x01\x00\x05hello"]
)
def test_a_stranger_gets_no_byte(said: bytes) -> None:
    with door() as opened:
        with socket.create_connection((opened.address.host, opened.address.port)) as stranger:
            stranger.settimeout(PATIENCE_SECONDS)
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            got = b""
            with suppress(ConnectionError):
                got = stranger.recv(2**16)
        # What looks like TLS is answered by TLS: an alert, and no word of ours.
        assert len(got) <= (7 if said.startswith(b"\x16") else 0)
        knock(opened, "a")


def test_a_stranger_that_speaks_tls_gets_no_word() -> None:
    """Neither without a certificate, nor with that of another token."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with door() as opened:
        where = (opened.address.host, opened.address.port)
        for each in (context, Credentials(Token.new()).context(is_server=False)):
            each.verify_mode = ssl.CERT_NONE
            with (
                socket.create_connection(where, PATIENCE_SECONDS) as plain,
                suppress(ssl.SSLError, ConnectionError),
                each.wrap_socket(plain) as stranger,
            ):
                stranger.sendall(b"hello")
                assert stranger.recv(2**16) == b""
        with pytest.raises(JoinError, match="do not trust each other.*the tokens differ"):
            knock(opened, "a", Identity(credentials=Credentials(Token.new())))
        told = "did not answer as a coordinator that waits.* This process has no token: if"
        with pytest.raises(JoinError, match=told):
            knock(opened, "a", Identity())
        with pytest.raises(JoinError, match="one more worker"):
            opened.wait(0.01)


def test_a_name_is_taken_once_and_free_again_when_its_worker_has_left() -> None:
    with door() as opened:
        first = knock(opened, "a")
        with pytest.raises(JoinError, match="named a has joined already, from 127.0.0.1; .*--nam"):
            knock(opened, "a")
        first.connection.close()
        knock(opened, "a")
        opened.wait(PATIENCE_SECONDS)
        assert list(opened.begin(None)) == ["a"]


def test_a_version_that_does_not_fit_is_told_to_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    newer = with_versions(transformers="6.0.0")
    here = with_versions(transformers="5.1.0")
    with door(identity=here) as opened, caplog.at_level(logging.INFO):
        why = r"worker that joins has transformers? ?6.0.0|has transformers 5.1.0 and .* has 6.0.0"
        with pytest.raises(JoinError, match=why):
            knock(opened, "a", newer)
        with pytest.raises(JoinError, match=r"The worker a was refused: .* same major version"):
            opened.wait(0.01)
    assert "The worker a was refused: " in caplog.text


@pytest.mark.parametrize("name", ["", "coordinator", "a b", "x" * 65, "a\nb"])
def test_a_name_that_cannot_stand_in_a_plan_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="is not a name for a worker"):
        checked_name(name)
    with door() as opened, pytest.raises(JoinError, match="is not a name for a worker"):
        knock(opened, name)


@pytest.mark.follows(
    "name the address of a worker, or start workers with `lightning-hetero worker --join …`",
)
def test_only_workers_that_join_are_talked_to() -> None:
    told = "a coordinator waits here for joining workers"
    with door() as opened:
        with pytest.raises(WorkerUnreachable, match=told):
            dial(opened.address, "watcher", "", CALM, WITH_TOKEN)
        knock(opened, "a")
        assert opened.names() == ["a"]


def test_too_few_in_time_is_an_error_with_the_remedy() -> None:
    with door(least=3) as opened:
        knock(opened, "a")
        expected = r"waited 0.01 s at 127.0.0.1:[0-9]+ for workers: a joined. Missing: 2 more w"
        with pytest.raises(JoinError, match=expected) as caught:
            opened.wait(0.01)
        assert f"worker --join {opened.address}`" in str(caught.value)


def test_a_fault_of_a_launcher_ends_the_wait() -> None:
    said = r"still needs one more worker\. ssh says no\."
    with door() as opened, pytest.raises(JoinError, match=said):
        opened.wait(PATIENCE_SECONDS, lambda is_late: ["ssh says no."])


def test_after_the_end_nobody_listens_and_who_waits_hears_it() -> None:
    with door() as opened:
        joined = knock(opened, "a")
    with pytest.raises(JoinError, match="No coordinator waits for workers at"):
        knock(opened, "b")
    with pytest.raises((joins.ChannelError, OSError)):
        await_opening(joined.connection, PATIENCE_SECONDS, lambda: False)
    assert all(thread.name != "door" for thread in threading.enumerate())


@pytest.mark.follows(
    "name its file with `token_file=` of the strategy if it is in another place; or listen on "
    "127.0.0.1.",
    "Make a token with `lightning-hetero token`, copy it to all machines, and name its file "
    "with `token_file=` of the strategy",
)
def test_beyond_loopback_a_door_needs_a_token() -> None:
    told = "A coordinator without a token listens on loopback only, .* `token_file=`"
    with pytest.raises(WorkerError, match=told):
        joins.Door(Address("0.0.0.0", 0), Identity(), CALM, 1)  # noqa: S104
    with pytest.raises(JoinError, match="on another machine, so it takes a token"):
        join(Address("192.0.2.1", 7070), "a", LISTENER, CALM, Identity())
    joins.Door(Address("0.0.0.0", 0), WITH_TOKEN, CALM, 1).close()  # noqa: S104
    joins.Door(Address("127.0.0.1", 0), Identity(), CALM, 1).close()


def test_a_port_that_is_in_use_is_an_error_with_the_remedy_for_a_coordinator() -> None:
    with door() as opened:
        told = f"Cannot listen on {opened.address}: .* `listen=` here and `--join` of the workers"
        with pytest.raises(WorkerError, match=told):
            joins.Door(opened.address, WITH_TOKEN, CALM, 1)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"least": 0}, "`least` of Joining is 0"),
        ({"least": 3, "most": 2}, "`most` of Joining is 2; .* `least` .3."),
        ({"wait_seconds": 0}, "`wait_seconds` of Joining is 0"),
        ({"listen": "7070"}, "'7070' is not an address"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        Joining(**wrong)  # type: ignore[arg-type]


def test_joining_is_a_launcher_that_starts_nothing() -> None:
    joining: Launcher = Joining()
    assert isinstance(joining, Launcher)
    joining.start(LISTENER, None)
    joining.stop()
    assert joining.faults(is_late=True) == []


def test_others_reach_a_wildcard_under_an_address_of_this_machine() -> None:
    found = reachable(Address("0.0.0.0", 7), "127.0.0.1")  # noqa: S104
    assert found == Address("127.0.0.1", 7)
    assert reachable(Address("10.0.0.1", 7)) == Address("10.0.0.1", 7)
    nowhere = reachable(Address("0.0.0.0", 7), "no such machine.invalid")  # noqa: S104
    assert re.fullmatch(r"\S+:7", str(nowhere))
