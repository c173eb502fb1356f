"""Runs the checks of the doctor on a real worker, hop by hop: name, route, port, greeting, link.

The doctor dials as a coordinator does. Each working hop supplies the input of the next hop.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty
from typing import Any

import psutil  # type: ignore[import-untyped]

from ..errors import ChannelError, HeteroError, PlanError, ProtocolError, TokenError, TrustError
from ..plan import COORDINATOR
from ..planner.profile import Link, fit_link
from ..protocol import messages as m
from ..protocol.frames import Frame, OpeningReader
from ..protocol.session import Session, opening_session
from ..transport.address import Address
from ..transport.channel import Channel, Inbox
from ..transport.connection import Connection, SocketConnection, prepare_socket
from ..transport.deadlines import Deadlines
from ..transport.handshake import greet
from ..transport.link_probe import Exchange, exchange_over, measure_link
from ..transport.tls import Credentials, credentials_of, secured
from . import checks
from .checks import Finding, Greeting, Report, WantedPlan, failed, passed

_SESSION = "doctor"
# Socket options of Linux without a name in Python, of IPPROTO_IP and of IPPROTO_IPV6.
_IP_MTU = 14
_IPV6_MTU = 24
# Larger than any packet, so it passes only where large packets pass.
_LARGE_BYTES = 2**16
# The limit of IP; a loopback interface takes one byte more.
_LARGEST_PACKET = 2**16 - 1


def credentials_or_error(token_file: Path | None) -> Credentials | TokenError | None:
    """The credentials of a token, or its error: a finding of the doctor."""
    try:
        return credentials_of(token_file)
    except TokenError as error:
        return error


@dataclass(frozen=True)
class Options:
    """The settings of all visits.

    Args:
        credentials: Proof of this end's token; absent without a token, an error if the token is
            unusable.
        equipment: The hardware and the versions of this process.
        connect_seconds: Deadline to connect, for the greeting, and for the answer to a small
            message.
        measure_seconds: About how long to measure a link.
        wanted: The model and plan. If given, the link must meet their needs.
    """

    credentials: Credentials | TokenError | None
    equipment: m.Equipment
    connect_seconds: float = 10.0
    measure_seconds: float = 2.0
    wanted: WantedPlan | None = None


@dataclass(frozen=True)
class _Target:
    """One of the IP addresses of a name, as `socket` writes it."""

    family: socket.AddressFamily
    where: tuple[Any, ...]

    @property
    def host(self) -> str:
        return str(self.where[0])


@dataclass(frozen=True)
class _Route:
    """How this machine reaches a target.

    Args:
        source: The local IP address.
        interface: The interface with that address; empty if the system does not say.
    """

    source: str
    interface: str

    def __str__(self) -> str:
        return f"from {self.source}" + (f" by {self.interface}" if self.interface else "")


def visit(address: Address, options: Options) -> Report:
    """Check the way to one worker, hop by hop."""
    visited = _WayToWorker(address, options)
    with contextlib.closing(visited.findings()) as found:
        findings = list(checks.completed(found))
    return Report(str(address), findings, visited.machine)


class _WayToWorker:
    """The way to a worker, as far as the checks have come."""

    def __init__(self, address: Address, options: Options) -> None:
        self._address = address
        self._options = options
        self._targets: list[_Target] = []
        self._routes: dict[_Target, _Route] = {}
        self._interface = ""
        self.machine = ""

    def findings(self) -> Generator[Finding, None, None]:
        yield self._name()
        yield self._route()
        port, connected = self._port()
        yield port
        if connected is not None:
            with connected:
                yield from self._from_greeting_on(connected)

    def _from_greeting_on(self, connected: socket.socket) -> Iterator[Finding]:
        credentials = self._options.credentials
        if isinstance(credentials, TokenError):
            yield from checks.no_token(str(credentials).rstrip("."))
        elif credentials is None and not self._address.is_loopback:
            text = f"this end has no token, and {self._address} is on another machine"
            yield from checks.no_token(text, checks.COPY_ITS_FILE)
        else:
            opened = yield from self._opening(SocketConnection(connected), credentials)
            if opened is not None:
                yield from self._conversation(*opened, connected)

    def _name(self) -> Finding:
        name = self._address.host
        try:
            found = socket.getaddrinfo(name, self._address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            text = f"the name {name!r} has no address: {error.strerror or error}"
            remedy = (
                "write the worker's IP address; names that end in .local need mDNS on both "
                "machines and do not pass through VPNs"
            )
            return failed("name", text, remedy)
        # The system lists an address once for each of its sources.
        targets = [_Target(family, where) for family, _, _, _, where in found]
        self._targets = list(dict.fromkeys(targets))
        hosts = [target.host for target in self._targets]
        text = "an IP address" if hosts == [name] else f"{name} is {', '.join(hosts)}"
        return passed("name", text)

    def _route(self) -> Finding:
        faults = []
        for target in self._targets:
            try:
                self._routes[target] = _route_to(target)
            except OSError as error:
                faults.append(f"{target.host}: {error.strerror or error}")
        if not self._routes:
            remedy = "check that the network, or the VPN, is up on this machine"
            return failed("route", f"no route to {'; '.join(faults)}", remedy)
        first, *others = self._routes.values()
        each = ", ".join(f"{target.host} {route}" for target, route in self._routes.items())
        text = each if others else str(first)
        return passed("route", text, source=first.source, interface=first.interface)

    def _port(self) -> tuple[Finding, socket.socket | None]:
        """Connect to every address of the name, and keep the first answering connection."""
        answered, errors = [], {}
        for target in self._routes:
            try:
                answered.append((*_connect(target, self._options.connect_seconds), target))
            except OSError as error:
                errors[target] = error
        if not answered:
            return failed("port", *_why_closed(self._address, errors)), None
        answered.sort(key=lambda one: one[0])
        seconds, connected, taken = answered[0]
        for _, other, _ in answered[1:]:
            other.close()
        route = self._routes[taken]
        self._interface = route.interface
        text = f"answers in {1000 * seconds:.2f} ms"
        if len(self._routes) > 1:
            text = (
                f"of {len(self._routes)} addresses {taken.host} {text}, {route}, before the "
                "others; write it in `workers` to always use it"
            )
        return passed("port", text, connect_seconds=seconds, host=taken.host), connected

    def _opening(
        self, plain: Connection, credentials: Credentials | None
    ) -> Generator[Finding, None, tuple[Connection, Session] | None]:
        """Agree on TLS and say Hello. The connection and its rules, if the worker welcomes us."""
        session, is_secured = opening_session("coordinator"), credentials is not None
        connection: Connection | None = None
        try:
            connection = secured(plain, credentials, False, self._options.connect_seconds)
            greeting = self._greeting(connection, session, is_secured)
        except TrustError as error:
            yield from checks.distrusted(error)
            return None
        except (ChannelError, ProtocolError, OSError) as error:
            has_agreed = is_secured and connection is not None
            yield from checks.silent(error) if has_agreed else checks.broken_off(error, is_secured)
            return None
        answers = list(checks.heard(greeting, self._options.equipment, self._address))
        yield from answers
        if any(answer.outcome == "failed" for answer in answers):
            return None
        session.received(greeting.answer)
        return connection, session

    def _greeting(self, connection: Connection, session: Session, is_secured: bool) -> Greeting:
        # A Hello without our equipment: the doctor reports differences, the worker refuses none.
        hello = m.Hello(m.PROTOCOL_VERSION, "coordinator", _SESSION)
        reader, sent_at_seconds = OpeningReader(), time.time()
        answer = greet(connection, session, hello, self._options.connect_seconds, reader)
        return Greeting(is_secured, answer, reader.version, sent_at_seconds, time.time())

    def _conversation(
        self, connection: Connection, session: Session, connected: socket.socket
    ) -> Iterator[Finding]:
        """Measure the link to a worker after its Welcome."""
        patience_seconds = self._options.connect_seconds
        deadlines = replace(Deadlines(), stop_seconds=patience_seconds)
        channel, inbox = Channel(connection, session, str(self._address), deadlines), Inbox()
        channel.start(inbox)
        try:
            yield self._mtu(exchange_over(channel, inbox, patience_seconds), connected)
            measuring_seconds = patience_seconds + 10 * self._options.measure_seconds
            yield from self._link(exchange_over(channel, inbox, measuring_seconds))
            self.machine = _machine_of(channel, inbox, patience_seconds)
        finally:
            channel.close(m.Goodbye())

    def _mtu(self, exchange: Exchange, connected: socket.socket) -> Finding:
        """Whether the path passes packets as large as the interface sends."""
        try:
            exchange(1, 1)
            exchange(_LARGE_BYTES, _LARGE_BYTES)
        except HeteroError as error:
            remedy = (
                "lower the MTU of the interface on both machines, to 1280 to begin with (`ip link "
                "set dev NAME mtu 1280`, or `MTU = 1280` in a WireGuard file)"
            )
            return failed("MTU", f"large messages do not get through: {error}", remedy)
        path, stats = _path_mtu(connected), psutil.net_if_stats().get(self._interface)
        text = "large messages get through both ways"
        if path is not None:
            text += f"; packets of {path} bytes"
        if path is not None and stats is not None and path < min(stats.mtu, _LARGEST_PACKET):
            text += f", while {self._interface} sends {stats.mtu}"
        return passed("MTU", text, **({} if path is None else {"path_mtu_bytes": path}))

    def _link(self, exchange: Exchange) -> Iterator[Finding]:
        """Latency and bandwidth, and whether they meet the needs of a plan."""
        try:
            found = measure_link(exchange, self._options.measure_seconds)
        except HeteroError as error:
            yield failed("latency", f"the link broke during the measurement: {error}")
            return
        worker = str(self._address)
        there = fit_link(COORDINATOR, worker, [(s.num_bytes, s.seconds) for s in found.there])
        back = fit_link(worker, COORDINATOR, [(s.num_bytes, s.seconds) for s in found.back])
        yield _latency(there, back)
        yield _bandwidth(there, back)
        wanted = self._options.wanted
        if wanted is None:
            text = "no plan was given; name one with --profile and --plan"
            yield Finding("plan", "skipped", text)
            return
        try:
            yield checks.against_plan(wanted, worker, [there, back])
        except PlanError as error:
            yield failed("plan", str(error).rstrip("."))


def _route_to(target: _Target) -> _Route:
    """Ask the system for the route; connecting a UDP socket does not send a packet."""
    with socket.socket(target.family, socket.SOCK_DGRAM) as asking:
        asking.connect(target.where)
        source = str(asking.getsockname()[0])
    return _Route(source, _interface_of(source.partition("%")[0]))


def _interface_of(source: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        # A link-local IPv6 address carries the name of its interface after a percent sign.
        if any(each.address.partition("%")[0] == source for each in addresses):
            return str(name)
    # All of 127.0.0.0/8 is on this interface, which lists only its first address.
    return "lo" if sys.platform == "linux" and source.startswith("127.") else ""


def _connect(target: _Target, seconds: float) -> tuple[float, socket.socket]:
    """Connect, and measure how long that takes."""
    connected = socket.socket(target.family, socket.SOCK_STREAM)
    connected.settimeout(seconds)
    start = time.perf_counter()
    try:
        connected.connect(target.where)
        took_seconds = time.perf_counter() - start
        prepare_socket(connected)
    except OSError:
        connected.close()
        raise
    return took_seconds, connected


def _why_closed(address: Address, errors: Mapping[_Target, OSError]) -> tuple[str, str]:
    """The fault, from the error at each address of the name, and the remedy."""
    error = next(iter(errors.values()))
    if isinstance(error, ConnectionRefusedError):
        # A worker without a token, as on one's own machine, listens on loopback only.
        listen, why = str(address), ""
        if not address.is_loopback:
            listen = f"0.0.0.0:{address.port}"
            why = "; other machines cannot reach a worker on 127.0.0.1"
        return (
            f"the machine answers, but nothing listens at port {address.port}",
            f"start `lightning-hetero worker --listen {listen}` there{why}",
        )
    if isinstance(error, TimeoutError):
        return (
            f"no answer from port {address.port}",
            f"check that the machine is on and that its firewall opens TCP port {address.port}",
        )
    faults = "; ".join(f"{target.host}: {fault}" for target, fault in errors.items())
    return faults, "check that the two machines are in the same network, or VPN"


def _path_mtu(connected: socket.socket) -> int | None:
    """The largest packet on the connection's path known so far, if the system reports it."""
    if sys.platform != "linux":
        return None
    is_ipv6 = connected.family == socket.AF_INET6
    level = socket.IPPROTO_IPV6 if is_ipv6 else socket.IPPROTO_IP
    with contextlib.suppress(OSError):
        return connected.getsockopt(level, _IPV6_MTU if is_ipv6 else _IP_MTU)
    return None


def _latency(there: Link, back: Link) -> Finding:
    both_seconds = there.latency_seconds + back.latency_seconds
    text = f"a small message and its answer take {1000 * both_seconds:.2f} ms"
    return passed("latency", text, round_trip_seconds=both_seconds)


def _bandwidth(there: Link, back: Link) -> Finding:
    rates = there.bytes_per_second, back.bytes_per_second
    text = f"{8e-6 * rates[0]:,.0f} Mbit/s there, {8e-6 * rates[1]:,.0f} Mbit/s back"
    return passed(
        "bandwidth", text, there_bytes_per_second=rates[0], back_bytes_per_second=rates[1]
    )


def _machine_of(channel: Channel, inbox: Inbox, patience_seconds: float) -> str:
    """The identity of the worker's machine; empty if the worker does not answer in time."""
    channel.send(m.DescribeDevice())
    with contextlib.suppress(Empty):
        content = inbox.get(timeout=patience_seconds).content
        if isinstance(content, Frame) and isinstance(content.message, m.DeviceDescribed):
            return content.message.memory.partition("/")[0]
    return ""
