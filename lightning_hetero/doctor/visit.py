"""Carries the checks out on a real worker, which it dials as a coordinator would."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..errors import ChannelError, ProtocolError, TokenError, TrustError
from ..protocol import messages as m
from ..protocol.frames import Frame, OpeningReader, encode_frame
from ..protocol.session import Session, coordinator_session
from ..transport.address import Address
from ..transport.channel import Channel, send_buffers
from ..transport.connection import Connection, SocketConnection, prepare_socket
from ..transport.deadlines import Deadlines
from ..transport.handshake import receive_opening
from ..transport.link_probe import new_inbox
from ..transport.tls import Credentials, secured
from .demand import Wanted
from .findings import Finding, Report, completed
from .greeting import Greeting, broken_off, distrusted, heard, no_token, silent, unusable_token
from .measuring import check_link, check_mtu, machine_of
from .route import Route, Target, resolve, route_to

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
    channel, inbox = Channel(connection, session, str(address), deadlines), new_inbox()
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
