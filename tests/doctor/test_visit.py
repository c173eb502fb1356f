"""The doctor before real listeners, one for each hop that can fail."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from lightning_hetero.doctor.checks import CHECKS, Finding, Report, WantedPlan
from lightning_hetero.doctor.visit import Options, visit
from lightning_hetero.errors import TokenError
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame, encode_frame
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.handshake import dial
from lightning_hetero.transport.tls import Authority, Credentials, _load_certificate, utc_now
from lightning_hetero.transport.token import Token

from ..launch.guests import WITH_TOKEN, door
from ..planner.profiles import device, profile
from ..transport.credentials import OURS, THEIRS, TOKEN, at
from ..transport.pairs import PATIENCE_SECONDS, QUICK, closed_address, worker_thread

Answer = Callable[[socket.socket], None]


def seen(
    address: Address,
    credentials: Credentials | TokenError | None = None,
    wanted: WantedPlan | None = None,
    connect_seconds: float = PATIENCE_SECONDS,
) -> Report:
    return visit(address, Options(credentials, m.Equipment(), connect_seconds, 0.02, wanted))


def failure(report: Report) -> Finding:
    """The finding of the check that failed; all later checks were skipped."""
    assert [finding.check for finding in report.findings] == list(CHECKS)
    assert report.failing is not None
    behind = report.findings[CHECKS.index(report.failing.check) + 1 :]
    assert {finding.outcome for finding in behind} <= {"skipped"}
    return report.failing


@contextmanager
def listener(answer: Answer) -> Iterator[Address]:
    """A peer that answers one connection with this function."""

    def serve() -> None:
        connected, _ = listening.accept()
        with connected:
            connected.settimeout(PATIENCE_SECONDS)
            answer(connected)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE_SECONDS)
        thread = threading.Thread(target=serve)
        thread.start()
        yield Address(*listening.getsockname())
        thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def greet_as_mail_server(connected: socket.socket) -> None:
    connected.sendall(b"220 mail.example ESMTP ready, who are you?\r\n")


def speak_tls_1_2(connected: socket.socket) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, Authority(TOKEN).issue(utc_now()))
    with pytest.raises(OSError):  # noqa: PT011 - OpenSSL has several classes for it
        context.wrap_socket(connected, server_side=True)


def welcome_in_protocol(protocol: int) -> Answer:
    def welcome(connected: socket.socket) -> None:
        for buffer in encode_frame(Frame(m.Welcome(protocol))):
            connected.sendall(buffer)
        connected.recv(2**16)

    return welcome


@pytest.mark.parametrize("credentials", [None, OURS], ids=["on one machine", "with a token"])
def test_a_healthy_worker_passes_and_serves_on(credentials: Credentials | None) -> None:
    with worker_thread(credentials) as address:
        for _ in range(2):
            report = seen(address, credentials)
            assert report.is_usable
            assert report.machine
            assert report.bytes_per_second > 0
        outcomes = {finding.check: finding.outcome for finding in report.findings}
        assert outcomes.pop("plan") == "skipped"
        assert outcomes.pop("TLS") == ("skipped" if credentials is None else "passed")
        assert set(outcomes.values()) == {"passed"}
        assert abs(float(report.findings[5].figures["offset_seconds"])) < 5


def test_the_name() -> None:
    found = failure(seen(Address("no-such-machine.invalid", 9999)))
    assert found.check == "name"
    assert "the name 'no-such-machine.invalid' has no address" in found.text


def test_the_route() -> None:
    # No socket may connect to the broadcast address.
    found = failure(seen(Address("255.255.255.255", 9999)))
    assert found.check == "route"
    assert "255.255.255.255" in found.text


def test_a_closed_port() -> None:
    address = closed_address()
    found = failure(seen(address))
    assert found.check == "port"
    assert "nothing listens at port" in found.text
    assert f"`lightning-hetero worker --listen {address}` there" in found.remedy


def test_the_port_of_a_coordinator() -> None:
    with door() as opened:
        found = failure(seen(opened.address, WITH_TOKEN.credentials))
    assert found.check == "worker"
    assert "a coordinator waits here for joining workers" in found.text
    assert f"`lightning-hetero worker --join {opened.address}`" in found.remedy


def test_a_name_with_several_addresses_is_tried_at_each() -> None:
    with worker_thread() as address:
        report = seen(Address("localhost", address.port))
        assert report.is_usable
        # Where localhost has an IPv6 address too, nobody listens there.
        assert report.findings[2].figures["host"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("credentials", "text"),
    [
        (None, "this end has none"),
        (THEIRS, "tokens differ"),
        (TokenError("There is no token file 'x'."), "There is no token file 'x'"),
    ],
    ids=["none", "another", "unusable"],
)
def test_the_token(credentials: Credentials | TokenError | None, text: str) -> None:
    with worker_thread(OURS) as address:
        found = failure(seen(address, credentials))
        assert found.check == "token"
        assert text in found.text + found.remedy
        assert seen(address, OURS).is_usable


def test_no_token_for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Address, "is_loopback", False)
    said: list[bytes] = []

    def note(connected: socket.socket) -> None:
        said.append(connected.recv(2**16))

    with listener(note) as address:
        found = failure(seen(address))
    assert found.check == "token"
    assert "is on another machine" in found.text
    assert said == [b""]  # the doctor sent nothing


def test_a_worker_without_a_token() -> None:
    with worker_thread() as address:
        found = failure(seen(address, OURS))
    assert found.check == "TLS"
    assert "does not speak TLS" in found.text


@pytest.mark.parametrize("days", [-9, 9])
def test_clocks_that_are_days_apart(days: float) -> None:
    with worker_thread(Credentials(TOKEN, at(days))) as address:
        found = failure(seen(address, OURS))
    assert found.check == "clock"
    assert found.remedy == "set them"


@pytest.mark.parametrize(
    ("answer", "credentials", "check", "text"),
    [
        (greet_as_mail_server, None, "worker", "did not answer as a worker"),
        (greet_as_mail_server, OURS, "TLS", "does not speak TLS"),
        (speak_tls_1_2, OURS, "TLS", "does not speak TLS 1.3"),
        (welcome_in_protocol(0), None, "version", f"speaks protocol {m.PROTOCOL_VERSION}"),
        (lambda connected: None, OURS, "TLS", "did not answer as a worker"),
        (lambda connected: None, None, "worker", "did not answer as a worker"),
    ],
    ids=["mail", "mail, token", "TLS 1.2", "old protocol", "hangs up, token", "hangs up"],
)
def test_a_peer_that_is_not_a_worker_of_this_version(
    answer: Answer, credentials: Credentials | None, check: str, text: str
) -> None:
    with listener(answer) as address:
        found = failure(seen(address, credentials))
    assert found.check == check
    assert text in found.text


def test_a_busy_worker() -> None:
    with worker_thread() as address:
        first, _ = dial(address, "coordinator", "a", QUICK, Identity())
        first.start(SimpleQueue())
        found = failure(seen(address))
        first.close(m.Goodbye())
    assert found.check == "worker"
    assert "busy" in found.text


def test_large_messages_that_do_not_get_through() -> None:
    """The path's MTU is smaller than that of both interfaces."""

    def swallow(connected: socket.socket) -> None:
        for buffer in encode_frame(Frame(m.Welcome(m.PROTOCOL_VERSION))):
            connected.sendall(buffer)
        connected.recv(2**16)  # Hello, and perhaps the first probe
        while connected.recv(2**16):
            pass

    with listener(swallow) as address:
        found = failure(seen(address, connect_seconds=0.3))
    assert found.check == "MTU"
    assert "mtu 1280" in found.remedy


def test_the_link_is_held_against_a_plan() -> None:
    with worker_thread() as address:
        measured = profile(8, [device(str(address), 1, 2)], batch_size=16)
        plan = Plan([StagePlan([str(address)], (0, 8))], micro_batches=4)
        found = seen(address, wanted=WantedPlan(measured, plan)).findings[-1]
        assert (found.check, found.outcome) == ("plan", "passed")
        elsewhere = profile(8, [device("other:1", 1, 2)], batch_size=16)
        found = seen(address, wanted=WantedPlan(elsewhere)).findings[-1]
        assert found.text == f"the plan has no stage on {address}"


def test_a_token_never_stands_in_what_is_found() -> None:
    token = Token.new()
    with worker_thread(Credentials(token)) as address:
        assert token.to_text() not in str(seen(address, Credentials(token)))
