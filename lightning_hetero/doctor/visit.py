"""Carries the checks out on a real worker, which it dials as a coordinator would.

Measures the link to a worker that has welcomed us: large messages, latency, bandwidth.

By which interface and local address this machine reaches another one.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty
from typing import Any

from ..errors import ChannelError, HeteroError, PlanError, ProtocolError, TokenError, TrustError
from ..plan import COORDINATOR
from ..planner.profile import Link, fit_link
from ..protocol import messages as m
from ..protocol.frames import Frame, OpeningReader, encode_frame
from ..protocol.session import Session, coordinator_session
from ..transport.address import Address
from ..transport.channel import Channel, Inbox, exchange_over, send_buffers
from ..transport.connection import Connection, SocketConnection, prepare_socket
from ..transport.deadlines import Deadlines
from ..transport.handshake import receive_opening
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

# Linux's numbers, which Python does not name: of ioctl, of IPPROTO_IP and of IPPROTO_IPV6.
_SIOCGIFADDR = 0x8915
_IP_MTU = 14
_IPV6_MTU = 24

_INTERFACES = Path("/sys/class/net")
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")

IS_LINUX = sys.platform == "linux"


@dataclass(frozen=True)
class Target:
    """One of the addresses that a name stands for."""

    family: socket.AddressFamily
    where: tuple[Any, ...]

    @property
    def host(self) -> str:
        """The numbers of the host."""
        return str(self.where[0])


@dataclass(frozen=True)
class Route:
    """How a target is reached.

    Args:
        source: The local address that is used.
        interface: The interface that has it; empty where the system does not say.
    """

    source: str
    interface: str

    def __str__(self) -> str:
        return f"from {self.source}" + (f" by {self.interface}" if self.interface else "")


def resolve(host: str, port: int) -> list[Target]:
    """The addresses that a name stands for.

    Raises:
        OSError: If nobody knows it.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # An address may be listed once for each way to have learned of it.
    return list(dict.fromkeys(Target(family, where) for family, _, _, _, where in found))


def route_to(target: Target) -> Route:
    """How this machine would reach a target; nothing is sent.

    Raises:
        OSError: If there is no way.
    """
    with socket.socket(target.family, socket.SOCK_DGRAM) as asking:
        asking.connect(target.where)
        source = str(asking.getsockname()[0])
    return Route(source, _interface_of(source, target.family))


def path_mtu(connected: socket.socket) -> int | None:
    """The largest packet that the way of a connection takes, as far as is known by now; None where
    the system does not say."""
    if not IS_LINUX:
        return None
    is_ipv6 = connected.family == socket.AF_INET6
    level = socket.IPPROTO_IPV6 if is_ipv6 else socket.IPPROTO_IP
    with contextlib.suppress(OSError):
        return connected.getsockopt(level, _IPV6_MTU if is_ipv6 else _IP_MTU)
    return None


def interface_mtu(interface: str) -> int | None:
    """The largest packet that an interface takes; None where the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        return int((_INTERFACES / interface / "mtu").read_text())
    return None


def _interface_of(source: str, family: socket.AddressFamily) -> str:
    if not IS_LINUX:
        return ""
    find = _with_ipv6 if family == socket.AF_INET6 else _with_ipv4
    return find(source.partition("%")[0])


def _with_ipv4(source: str) -> str:
    import fcntl  # not on every system, and used on Linux only

    wanted = socket.inet_aton(source)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                # struct ifreq: 16 bytes of the name, and a sockaddr_in with the address behind 4.
                if fcntl.ioctl(asking, _SIOCGIFADDR, request)[20:24] == wanted:
                    return name
    return "lo" if source.startswith("127.") else ""


def _with_ipv6(source: str) -> str:
    wanted = socket.inet_pton(socket.AF_INET6, source).hex()
    with contextlib.suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            number, *_, name = line.split()
            if number == wanted:
                return name
    return ""


# More than any packet, so that it only gets through where large ones do.
_LARGE_BYTES = 2**16
# Of IP; a loopback interface takes one more byte.
_LARGEST_PACKET = 2**16 - 1


def check_mtu(
    channel: Channel,
    inbox: Inbox,
    connected: socket.socket,
    route: Route | None,
    patience_seconds: float,
) -> Finding:
    """Whether packets as large as the interface makes them get through."""
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
    path, own = path_mtu(connected), None if route is None else interface_mtu(route.interface)
    text = "large messages get through both ways"
    if path is not None:
        text += f"; packets of {path} bytes"
    if path is not None and own is not None and path < min(own, _LARGEST_PACKET):
        text += f", while {route.interface if route else ''} sends {own}"
    return Finding("MTU", "passed", text, "", {} if path is None else {"path_mtu_bytes": path})


def check_link(
    channel: Channel,
    inbox: Inbox,
    connect_seconds: float,
    measure_seconds: float,
    wanted: Wanted | None,
) -> Iterator[Finding]:
    """What the link takes, and whether a plan can live with that."""
    exchange = exchange_over(channel, inbox, connect_seconds + 10 * measure_seconds)
    try:
        found = measure_link(exchange, measure_seconds)
    except HeteroError as error:
        yield Finding("latency", "failed", f"the link broke while it was measured: {error}")
        return
    worker = channel.peer
    there = fit_link(COORDINATOR, worker, [(s.num_bytes, s.seconds) for s in found.there])
    back = fit_link(worker, COORDINATOR, [(s.num_bytes, s.seconds) for s in found.back])
    yield _latency(there, back)
    yield _bandwidth(there, back)
    if wanted is None:
        yield Finding("plan", "skipped", "none was given; --profile and --plan name one")
        return
    try:
        yield against_plan(wanted, worker, [there, back])
    except PlanError as error:
        yield Finding("plan", "failed", str(error).rstrip("."))


def _latency(there: Link, back: Link) -> Finding:
    both_seconds = there.latency_seconds + back.latency_seconds
    text = f"a small message and its answer take {1000 * both_seconds:.2f} ms"
    figures = {"round_trip_seconds": both_seconds}
    return Finding("latency", "passed", text, "", figures)


def _bandwidth(there: Link, back: Link) -> Finding:
    amounts = [8 * link.bytes_per_second / 1e6 for link in (there, back)]
    text = f"{amounts[0]:,.0f} Mbit/s there, {amounts[1]:,.0f} Mbit/s back"
    figures = {
        "there_bytes_per_second": there.bytes_per_second,
        "back_bytes_per_second": back.bytes_per_second,
    }
    return Finding("bandwidth", "passed", text, "", figures)


def machine_of(channel: Channel, inbox: Inbox, patience_seconds: float) -> str:
    """What tells the worker's machine from others; empty if it does not say in time."""
    channel.send(m.DescribeDevice())
    with contextlib.suppress(Empty):
        content = inbox.get(timeout=patience_seconds).content
        if isinstance(content, Frame) and isinstance(content.message, m.DeviceDescribed):
            return content.message.memory.partition("/")[0]
    return ""


_SESSION = "doctor"


@dataclass(frozen=True)
class Options:
    """What all visits share.

    Args:
        credentials: That this end has the token; None without one, an error if it is of no use.
        equipment: What this process runs on.
        connect_seconds: To be connected, to be greeted, and for the answer to a small message.
        measure_seconds: About how long to measure a link.
        wanted: A plan's needs, if the link is to be held against them.
    """

    credentials: Credentials | TokenError | None
    equipment: m.Equipment
    connect_seconds: float = 10.0
    measure_seconds: float = 2.0
    wanted: Wanted | None = None


@dataclass
class _Way:
    """What is known of the way to a worker; it grows from check to check."""

    targets: list[Target] = field(default_factory=list)
    routes: dict[Target, Route] = field(default_factory=dict)
    taken: Target | None = None
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
    opening = _Opening(SocketConnection(connected), options.credentials, options.connect_seconds)
    yield from opening.findings(options.equipment, address)
    if opening.connection is not None:
        yield from _measured(opening.connection, opening.session, connected, address, options, way)


def _name(address: Address, way: _Way) -> Finding:
    try:
        way.targets = resolve(address.host, address.port)
    except OSError as error:
        text = f"nobody knows {address.host!r}: {error.strerror or error}"
        remedy = (
            "write the worker's address in numbers; names that end in .local need mDNS on both "
            "machines and do not pass through VPNs"
        )
        return Finding("name", "failed", text, remedy)
    hosts = [target.host for target in way.targets]
    if hosts == [address.host]:
        return Finding("name", "passed", "given in numbers")
    return Finding("name", "passed", f"{address.host} is {', '.join(hosts)}")


def _route(way: _Way) -> Finding:
    faults = []
    for target in way.targets:
        try:
            way.routes[target] = route_to(target)
        except OSError as error:
            faults.append(f"{target.host}: {error.strerror or error}")
    if not way.routes:
        remedy = "see whether the network, or the VPN, is up on this machine"
        return Finding("route", "failed", f"no way to {'; '.join(faults)}", remedy)
    first, *others = way.routes.items()
    figures = {"source": first[1].source, "interface": first[1].interface}
    if not others:
        return Finding("route", "passed", str(first[1]), "", figures)
    text = ", ".join(f"{target.host} {route}" for target, route in way.routes.items())
    return Finding("route", "passed", text, "", figures)


def _port(address: Address, options: Options, way: _Way) -> tuple[Finding, socket.socket | None]:
    """Connect to the address that answers first, of all that the name stands for."""
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
            f"the others; name it in `workers` to be sure of it"
        )
    figures: dict[str, float | str] = {"connect_seconds": seconds, "host": way.taken.host}
    return Finding("port", "passed", text, "", figures), connected


def _connect(target: Target, seconds: float) -> tuple[socket.socket | OSError, float]:
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
            f"the machine is there, and nothing listens at port {address.port}",
            f"start `lightning-hetero worker --listen 0.0.0.0:{address.port}` there; one that "
            "listens on 127.0.0.1 is not reached from elsewhere",
        )
    if isinstance(error, TimeoutError):
        return (
            f"nothing comes back from port {address.port}",
            f"see whether the machine is on, and let TCP port {address.port} through its firewall",
        )
    return "; ".join(faults), "see whether the two machines are in the same network, or VPN"


class _Opening:
    """TLS and Hello with whoever answered, as far as they go.

    Attributes:
        connection: For the conversation, if the worker welcomes us.
        session: Its rules.
    """

    def __init__(
        self, plain: Connection, credentials: Credentials | None, patience_seconds: float
    ) -> None:
        self._plain = plain
        self._credentials = credentials
        self._patience_seconds = patience_seconds
        self.connection: Connection | None = None
        self.session: Session = coordinator_session()

    def findings(self, here: m.Equipment, address: Address) -> Iterator[Finding]:
        is_secured = self._credentials is not None
        try:
            connection = secured(self._plain, self._credentials, False, self._patience_seconds)
        except TrustError as error:
            yield from distrusted(error)
            return
        except (ChannelError, OSError) as error:
            yield from broken_off(error, is_secured)
            return
        try:
            greeting = self._greet(connection, is_secured)
        except TrustError as error:
            yield from distrusted(error)
            return
        except (ChannelError, ProtocolError, OSError) as error:
            yield from silent(error) if is_secured else broken_off(error, is_secured)
            return
        answers = list(heard(greeting, here, address))
        if all(answer.outcome != "failed" for answer in answers):
            self.session.received(greeting.answer)
            self.connection = connection
        yield from answers

    def _greet(self, connection: Connection, is_secured: bool) -> Greeting:
        # Without our equipment: what differs is said here, and not refused there.
        hello = m.Hello(m.PROTOCOL_VERSION, "coordinator", _SESSION)
        self.session.sent(hello)
        sent_at_seconds = time.time()
        send_buffers(connection, encode_frame(Frame(hello)), self._patience_seconds)
        reader = OpeningReader()
        answer = receive_opening(connection, self._patience_seconds, reader)
        return Greeting(is_secured, answer, reader.version, sent_at_seconds, time.time())


def _measured(
    connection: Connection,
    session: Session,
    connected: socket.socket,
    address: Address,
    options: Options,
    way: _Way,
) -> Iterator[Finding]:
    deadlines = replace(Deadlines(), stop_seconds=options.connect_seconds)
    channel, inbox = Channel(connection, session, str(address), deadlines), Inbox()
    channel.start(inbox)
    try:
        route = None if way.taken is None else way.routes[way.taken]
        yield check_mtu(channel, inbox, connected, route, options.connect_seconds)
        yield from check_link(
            channel, inbox, options.connect_seconds, options.measure_seconds, options.wanted
        )
        way.machine = machine_of(channel, inbox, options.connect_seconds)
    finally:
        channel.close(m.Goodbye())
