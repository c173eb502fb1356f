"""Runs the checks of the doctor on a real worker, hop by hop: name, route, port, greeting, link.

The doctor dials as a coordinator does. Each hop that works gives the next hop what it needs.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
from ..transport.channel import Channel, Inbox, exchange_over
from ..transport.connection import Connection, SocketConnection, prepare_socket
from ..transport.deadlines import Deadlines
from ..transport.handshake import greet
from ..transport.link_probe import measure_link
from ..transport.tls import Credentials, secured
from .checks import (
    Finding,
    Greeting,
    Report,
    Wanted,
    against_plan,
    broken_off,
    completed,
    distrusted,
    heard,
    no_token,
    silent,
    unusable_token,
)

_SESSION = "doctor"
# Socket options of Linux that Python does not name, of IPPROTO_IP and of IPPROTO_IPV6.
_IP_MTU = 14
_IPV6_MTU = 24
# Larger than any packet, so it passes only where large packets pass.
_LARGE_BYTES = 2**16
# The limit of IP; a loopback interface takes one byte more.
_LARGEST_PACKET = 2**16 - 1


@dataclass(frozen=True)
class Options:
    """What all visits share.

    Args:
        credentials: Proof that this end has the token; None without a token, an error if the token
            cannot be used.
        equipment: The hardware and the versions of this process.
        connect_seconds: Deadline to connect, for the greeting, and for the answer to a small
            message.
        measure_seconds: About how long to measure a link.
        wanted: The model and plan whose needs the link must meet; None checks no plan.
    """

    credentials: Credentials | TokenError | None
    equipment: m.Equipment
    connect_seconds: float = 10.0
    measure_seconds: float = 2.0
    wanted: Wanted | None = None


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


@dataclass
class _Way:
    """The way to a worker, as far as the checks have come."""

    targets: list[_Target] = field(default_factory=list)
    routes: dict[_Target, _Route] = field(default_factory=dict)
    taken: _Target | None = None
    machine: str = ""


def visit(address: Address, options: Options) -> Report:
    """Check the way to one worker, hop by hop."""
    way = _Way()
    with contextlib.ExitStack() as stack:
        findings = list(completed(_checks(address, options, way, stack)))
    return Report(str(address), findings, way.machine)


def _checks(
    address: Address, options: Options, way: _Way, stack: contextlib.ExitStack
) -> Iterator[Finding]:
    yield _name(address, way)
    yield _route(way)
    port, connected = _port(address, options, way)
    yield port
    if connected is None:
        return
    stack.callback(connected.close)
    if isinstance(options.credentials, TokenError):
        yield from unusable_token(str(options.credentials).rstrip("."))
        return
    if options.credentials is None and not address.is_loopback:
        yield from no_token(address)
        return
    plain = SocketConnection(connected)
    opened = yield from _opening(plain, options.credentials, options, address)
    if opened is not None:
        yield from _conversation(*opened, connected, address, options, way)


def _name(address: Address, way: _Way) -> Finding:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        text = f"the name {address.host!r} has no address: {error.strerror or error}"
        remedy = (
            "write the worker's IP address; names that end in .local need mDNS on both machines "
            "and do not pass through VPNs"
        )
        return Finding("name", "failed", text, remedy)
    # The system lists an address once for each source that it knows it from.
    way.targets = list(dict.fromkeys(_Target(family, where) for family, _, _, _, where in found))
    hosts = [target.host for target in way.targets]
    if hosts == [address.host]:
        return Finding("name", "passed", "an IP address")
    return Finding("name", "passed", f"{address.host} is {', '.join(hosts)}")


def _route(way: _Way) -> Finding:
    faults = []
    for target in way.targets:
        try:
            way.routes[target] = _route_to(target)
        except OSError as error:
            faults.append(f"{target.host}: {error.strerror or error}")
    if not way.routes:
        remedy = "check that the network, or the VPN, is up on this machine"
        return Finding("route", "failed", f"no route to {'; '.join(faults)}", remedy)
    first, *others = way.routes.items()
    figures = {"source": first[1].source, "interface": first[1].interface}
    if not others:
        return Finding("route", "passed", str(first[1]), "", figures)
    text = ", ".join(f"{target.host} {route}" for target, route in way.routes.items())
    return Finding("route", "passed", text, "", figures)


def _route_to(target: _Target) -> _Route:
    """Ask the system for the route; connecting a UDP socket sends nothing."""
    with socket.socket(target.family, socket.SOCK_DGRAM) as asking:
        asking.connect(target.where)
        source = str(asking.getsockname()[0])
    return _Route(source, _interface_of(source.partition("%")[0]))


def _interface_of(source: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        # A link-local IPv6 address carries the name of its interface behind a percent sign.
        if any(each.address.partition("%")[0] == source for each in addresses):
            return str(name)
    # All of 127.0.0.0/8 is on this interface, which lists only its first address.
    return "lo" if sys.platform == "linux" and source.startswith("127.") else ""


def _port(address: Address, options: Options, way: _Way) -> tuple[Finding, socket.socket | None]:
    """Connect to every address of the name, and keep the connection that answered first."""
    tried = [(target, *_connect(target, options.connect_seconds)) for target in way.routes]
    answered = [
        (seconds, target, found)
        for target, found, seconds in tried
        if isinstance(found, socket.socket)
    ]
    faults = [f"{target.host}: {found}" for target, found, _ in tried if isinstance(found, OSError)]
    if not answered:
        return Finding("port", "failed", *_why_closed(address, tried[0][1], faults)), None
    answered.sort(key=lambda one: one[0])
    seconds, way.taken, connected = answered[0]
    for _, _, other in answered[1:]:
        other.close()
    text = f"answers in {1000 * seconds:.2f} ms"
    if len(tried) > 1:
        text = (
            f"of {len(tried)} addresses {way.taken.host} {text}, {way.routes[way.taken]}, before "
            "the others; write it in `workers` to always use it"
        )
    figures: dict[str, float | str] = {"connect_seconds": seconds, "host": way.taken.host}
    return Finding("port", "passed", text, "", figures), connected


def _connect(target: _Target, seconds: float) -> tuple[socket.socket | OSError, float]:
    connected = socket.socket(target.family, socket.SOCK_STREAM)
    connected.settimeout(seconds)
    start = time.perf_counter()
    try:
        connected.connect(target.where)
        took_seconds = time.perf_counter() - start
        prepare_socket(connected)
    except OSError as error:
        connected.close()
        return error, time.perf_counter() - start
    return connected, took_seconds


def _why_closed(
    address: Address, error: socket.socket | OSError, faults: Sequence[str]
) -> tuple[str, str]:
    if isinstance(error, ConnectionRefusedError):
        return (
            f"the machine answers, but nothing listens at port {address.port}",
            f"start `lightning-hetero worker --listen 0.0.0.0:{address.port}` there; a worker that "
            "listens on 127.0.0.1 cannot be reached from other machines",
        )
    if isinstance(error, TimeoutError):
        return (
            f"no answer from port {address.port}",
            f"check that the machine is on and that its firewall opens TCP port {address.port}",
        )
    return "; ".join(faults), "check that the two machines are in the same network, or VPN"


def _opening(
    plain: Connection, credentials: Credentials | None, options: Options, address: Address
) -> Generator[Finding, None, tuple[Connection, Session] | None]:
    """Agree on TLS and say Hello. The connection and its rules, if the worker welcomes us."""
    session, is_secured = opening_session("coordinator"), credentials is not None
    connection: Connection | None = None
    try:
        connection = secured(plain, credentials, False, options.connect_seconds)
        greeting = _greeting(connection, session, is_secured, options.connect_seconds)
    except TrustError as error:
        yield from distrusted(error)
        return None
    except (ChannelError, ProtocolError, OSError) as error:
        has_agreed = is_secured and connection is not None
        yield from silent(error) if has_agreed else broken_off(error, is_secured)
        return None
    answers = list(heard(greeting, options.equipment, address))
    yield from answers
    if any(answer.outcome == "failed" for answer in answers):
        return None
    session.received(greeting.answer)
    return connection, session


def _greeting(
    connection: Connection, session: Session, is_secured: bool, patience_seconds: float
) -> Greeting:
    # Without our equipment, so that the doctor reports what differs and the worker refuses nothing.
    hello = m.Hello(m.PROTOCOL_VERSION, "coordinator", _SESSION)
    reader, sent_at_seconds = OpeningReader(), time.time()
    answer = greet(connection, session, hello, patience_seconds, reader)
    return Greeting(is_secured, answer, reader.version, sent_at_seconds, time.time())


def _conversation(
    connection: Connection,
    session: Session,
    connected: socket.socket,
    address: Address,
    options: Options,
    way: _Way,
) -> Iterator[Finding]:
    """Measure the link to a worker that has welcomed us."""
    deadlines = replace(Deadlines(), stop_seconds=options.connect_seconds)
    channel, inbox = Channel(connection, session, str(address), deadlines), Inbox()
    channel.start(inbox)
    try:
        interface = "" if way.taken is None else way.routes[way.taken].interface
        yield _mtu(channel, inbox, connected, interface, options.connect_seconds)
        yield from _link(channel, inbox, options)
        way.machine = _machine_of(channel, inbox, options.connect_seconds)
    finally:
        channel.close(m.Goodbye())


def _mtu(
    channel: Channel,
    inbox: Inbox,
    connected: socket.socket,
    interface: str,
    patience_seconds: float,
) -> Finding:
    """Whether the path passes packets as large as the interface sends."""
    exchange = exchange_over(channel, inbox, patience_seconds)
    try:
        exchange(1, 1)
        exchange(_LARGE_BYTES, _LARGE_BYTES)
    except HeteroError as error:
        remedy = (
            "lower the MTU of the interface on both machines, to 1280 to begin with (`ip link set "
            "dev NAME mtu 1280`, or `MTU = 1280` in a WireGuard file)"
        )
        return Finding("MTU", "failed", f"large messages do not get through: {error}", remedy)
    path, stats = _path_mtu(connected), psutil.net_if_stats().get(interface)
    text = "large messages get through both ways"
    if path is not None:
        text += f"; packets of {path} bytes"
    if path is not None and stats is not None and path < min(stats.mtu, _LARGEST_PACKET):
        text += f", while {interface} sends {stats.mtu}"
    return Finding("MTU", "passed", text, "", {} if path is None else {"path_mtu_bytes": path})


def _path_mtu(connected: socket.socket) -> int | None:
    """The largest packet of the connection's path that is known so far; None if the system does
    not say."""
    if sys.platform != "linux":
        return None
    is_ipv6 = connected.family == socket.AF_INET6
    level = socket.IPPROTO_IPV6 if is_ipv6 else socket.IPPROTO_IP
    with contextlib.suppress(OSError):
        return connected.getsockopt(level, _IPV6_MTU if is_ipv6 else _IP_MTU)
    return None


def _link(channel: Channel, inbox: Inbox, options: Options) -> Iterator[Finding]:
    """Latency and bandwidth, and whether they meet the needs of a plan."""
    patience_seconds = options.connect_seconds + 10 * options.measure_seconds
    exchange = exchange_over(channel, inbox, patience_seconds)
    try:
        found = measure_link(exchange, options.measure_seconds)
    except HeteroError as error:
        yield Finding("latency", "failed", f"the link broke during the measurement: {error}")
        return
    worker = channel.peer
    there = fit_link(COORDINATOR, worker, [(s.num_bytes, s.seconds) for s in found.there])
    back = fit_link(worker, COORDINATOR, [(s.num_bytes, s.seconds) for s in found.back])
    yield _latency(there, back)
    yield _bandwidth(there, back)
    if options.wanted is None:
        yield Finding("plan", "skipped", "no plan was given; name one with --profile and --plan")
        return
    try:
        yield against_plan(options.wanted, worker, [there, back])
    except PlanError as error:
        yield Finding("plan", "failed", str(error).rstrip("."))


def _latency(there: Link, back: Link) -> Finding:
    both_seconds = there.latency_seconds + back.latency_seconds
    text = f"a small message and its answer take {1000 * both_seconds:.2f} ms"
    return Finding("latency", "passed", text, "", {"round_trip_seconds": both_seconds})


def _bandwidth(there: Link, back: Link) -> Finding:
    amounts = [8 * link.bytes_per_second / 1e6 for link in (there, back)]
    text = f"{amounts[0]:,.0f} Mbit/s there, {amounts[1]:,.0f} Mbit/s back"
    figures = {
        "there_bytes_per_second": there.bytes_per_second,
        "back_bytes_per_second": back.bytes_per_second,
    }
    return Finding("bandwidth", "passed", text, "", figures)


def _machine_of(channel: Channel, inbox: Inbox, patience_seconds: float) -> str:
    """The identity of the worker's machine; empty if the worker does not answer in time."""
    channel.send(m.DescribeDevice())
    with contextlib.suppress(Empty):
        content = inbox.get(timeout=patience_seconds).content
        if isinstance(content, Frame) and isinstance(content.message, m.DeviceDescribed):
            return content.message.memory.partition("/")[0]
    return ""
