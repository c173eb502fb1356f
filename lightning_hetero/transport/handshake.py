"""How a conversation is opened: dial, TLS, Hello, Welcome, each within its deadline."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from ..errors import (
    ChannelError,
    JoinError,
    RemoteProtocolError,
    TrustError,
    WorkerError,
    WorkerUnreachable,
)
from ..protocol import messages as m
from ..protocol.frames import Frame, OpeningReader, encode_frame
from ..protocol.session import Role, Session, opening_session
from .address import Address, advice
from .channel import Channel
from .compatibility import Identity, Party, obstacles
from .connection import (
    Connection,
    SocketConnection,
    keep_alive,
    prepare_socket,
    send_buffers,
)
from .deadlines import Deadlines
from .line import Lingering, PeerGone, receive_some
from .process_names import has_ended, own_name
from .tls import Credentials, secured
from .wings import linger_seconds

logger = logging.getLogger(__name__)

# The length of the queue before `accept`. The system drops further connections, and a peer tries
# again after a second: a burst of strangers must not slow a coordinator in this way.
_MOST_WAITING = 1024

_CUT_OFF = (ChannelError, ConnectionResetError, BrokenPipeError)
_MAY_NEED_IT = (
    "This process has no token: if the coordinator has one, copy its token file to this machine."
)

# To connect again: a few round trips, and at least this.
_LEAST_CONNECT_SECONDS = 0.5
_CONNECT_MARGIN = 4.0

# Names of the roles for people.
ROLES: dict[str, str] = {
    "coordinator": "the coordinator",
    "neighbor": "the upstream worker",
    "watcher": "the watcher",
    "joiner": "the worker that joins",
}
# A worker answers these roles.
WORKER_ROLES: tuple[Role, ...] = ("coordinator", "neighbor", "watcher")


def listen(
    address: Address, credentials: Credentials | None = None, for_workers: bool = False
) -> socket.socket:
    """Open a listening socket; port 0 takes a free one. Without credentials it is on loopback.

    Args:
        address: Where to listen.
        credentials: Prove possession of the token; absent without a token.
        for_workers: Whether this process is a coordinator and waits for workers; false for a
            worker.

    Raises:
        WorkerError: If strangers could connect without a token, or the address is not available.
    """
    if credentials is None and not address.is_loopback:
        raise WorkerError(
            f"{'A coordinator' if for_workers else 'A worker'} without a token listens on loopback "
            f"only, and {address} is not: anyone could use it. Make a token with "
            "`lightning-hetero token`, copy it to all machines, and name its file with "
            f"{'`token_file=` of the strategy' if for_workers else '`--token-file`'} if it is in "
            "another place; or listen on 127.0.0.1."
        )
    return open_port(address, for_workers)


def open_port(address: Address, for_workers: bool = False) -> socket.socket:
    """Open a listening socket, for strangers too; port 0 takes a free one.

    Args:
        address: Where to listen.
        for_workers: Whether this process is a coordinator and waits for workers.

    Raises:
        WorkerError: If the address is not available.
    """
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        where = (address.host, address.port)
        return socket.create_server(where, family=family, backlog=_MOST_WAITING)
    except OSError as error:
        raise WorkerError(_why_not_listening(address, error, for_workers)) from error


def _why_not_listening(address: Address, error: OSError, for_workers: bool) -> str:
    free = Address(address.host, 0)
    if error.errno == errno.EADDRINUSE:
        remedy = f"`--listen`, such as `--listen {free}` for any free port"
        if for_workers:
            remedy = "`listen=` here and `--join` of the workers"
        return (
            f"Cannot listen on {address}: another process uses this port. Choose another one with "
            f"{remedy}, or end that process."
        )
    reason = str(error) if error.errno is None else os.strerror(error.errno)
    option = '`listen="HOST:PORT"`' if for_workers else "`--listen HOST:PORT`"
    return (
        f"Cannot listen on {address}: {reason}. Choose an address of this machine and a port with "
        f"{option}."
    )


def address_of(listener: socket.socket) -> Address:
    """Where a socket listens."""
    host, port = listener.getsockname()[:2]
    return Address(host, port)


def dial(
    address: Address,
    role: Role,
    session_name: str,
    deadlines: Deadlines,
    identity: Identity,
    member: int = 0,
) -> tuple[Channel, m.Welcome]:
    """Connect to a worker and open a conversation; the caller has to start the channel.

    Args:
        deadlines: How long each kind of waiting may take. This end asks for its ``linger_seconds``.
        member: The number of this process, if it is a worker of a run.

    Raises:
        WorkerUnreachable: If a worker does not answer there, or one end refuses the other.
    """
    asked_seconds = linger_seconds(deadlines.linger_seconds)
    hello = m.Hello(
        m.PROTOCOL_VERSION,
        role,
        session_name,
        identity.equipment,
        member,
        asked_seconds,
        process=own_name() if role == "coordinator" else "",
    )
    call = _OpeningCall(address, hello, deadlines, identity.credentials)
    try:
        opened = call.open()
    except WorkerUnreachable as error:
        raise WorkerUnreachable(f"{error} {advice(address)}") from None
    return call.channel(opened), opened.welcome


class _ConversationRefused(WorkerUnreachable):
    """The worker has refused the conversation.

    Attributes:
        away: The name of the process that the worker waits for, if any; else empty.
    """

    away = ""


class _SessionEnds(_ConversationRefused):
    """The answering process ends with its session; a new process takes its place."""


class _NobodyListens(WorkerUnreachable):
    """The worker's machine has answered: the port is not in use."""


@dataclass(frozen=True)
class _Opened:
    """A connection on which both ends have greeted each other.

    Args:
        connect_seconds: How long connecting took: about a round trip.
    """

    connection: Connection
    session: Session
    welcome: m.Welcome
    connect_seconds: float


@dataclass(frozen=True)
class _OpeningCall:
    """A call to a worker, to open a conversation or to go on with it.

    Args:
        address: Where the worker listens.
        hello: The first message.
        deadlines: How long each kind of waiting may take.
        credentials: Prove possession of the token; absent without a token.
        has_joined_again: Whether another process of the worker waits at the door by now.
    """

    address: Address
    hello: m.Hello
    deadlines: Deadlines
    credentials: Credentials | None
    has_joined_again: Callable[[], bool] = lambda: False

    def open(self) -> _Opened:
        """Open a conversation. Dial once more while one process of the worker replaces another, or
        if the worker waits for an ended coordinator.

        Raises:
            WorkerUnreachable: If a worker does not answer there, or one end refuses the other.
        """
        if self.credentials is None and not self.address.is_loopback:
            raise WorkerUnreachable(
                f"The worker at {self.address} is on another machine, so it takes a token: make "
                "one with `lightning-hetero token`, and copy it to all machines as that command "
                "says."
            )
        end, hello = time.monotonic() + self.deadlines.connect_seconds, self.hello
        while True:
            try:
                return self._open(hello, self.deadlines)
            except _SessionEnds:
                # The next process listens at the same address already, or will in a moment.
                if time.monotonic() > end:
                    raise
            except _ConversationRefused as error:
                if error.away == hello.ended or not has_ended(error.away):
                    raise
                logger.info(
                    "the worker at %s has waited for the killed coordinator of another run on "
                    "this machine; it takes this run instead",
                    self.address,
                )
                end = time.monotonic() + self.deadlines.connect_seconds
                hello = msgspec.structs.replace(hello, ended=error.away)

    def channel(self, opened: _Opened) -> Channel:
        """The channel over a connection; it lingers if both ends want to linger."""
        welcome, lingering = opened.welcome, None
        if welcome.secret:
            redial = partial(self.open_again, welcome.secret, opened.connect_seconds)
            seconds = min(welcome.linger_seconds, self.hello.linger_seconds)
            lingering = Lingering(seconds, welcome.secret, redial)
        name = str(self.address)
        return Channel(opened.connection, opened.session, name, self.deadlines, lingering=lingering)

    def open_again(
        self, secret: str, connect_seconds: float, attempt: int, received: int
    ) -> tuple[Connection, int]:
        """Open another connection for a running conversation.

        Args:
            secret: The secret in the worker's first Welcome.
            connect_seconds: How long connecting took when the conversation was opened.
            attempt: The number of this attempt.
            received: The number of frames received by this end.

        Returns:
            The connection, and the number of frames received by the worker.

        Raises:
            PeerGone: If the worker's process has ended or has a successor at the door, or does not
                know the conversation.
            WorkerUnreachable: If the worker does not answer, for example because the network is
                away.
        """
        if self.has_joined_again():
            raise PeerGone("Another process has joined since under its name.")
        hello = msgspec.structs.replace(
            self.hello, secret=secret, attempt=attempt, received=received
        )
        # While the network is away, the system repeats a lost packet after ever longer pauses. So
        # this attempt is short, and the next attempt begins soon.
        seconds = max(_LEAST_CONNECT_SECONDS, _CONNECT_MARGIN * connect_seconds)
        quick_seconds = min(seconds, self.deadlines.connect_seconds)
        try:
            opened = self._open(hello, replace(self.deadlines, connect_seconds=quick_seconds))
        except _SessionEnds:
            raise
        except (_ConversationRefused, _NobodyListens) as error:
            raise PeerGone(str(error)) from error
        return opened.connection, opened.welcome.received

    def _open(self, hello: m.Hello, connecting: Deadlines) -> _Opened:
        began_seconds, session = time.monotonic(), opening_session(hello.role)
        plain = _connect(self.address, connecting)
        connect_seconds = time.monotonic() - began_seconds
        with ExitStack() as on_failure:
            on_failure.callback(plain.close)
            far = _Far(f"the worker at {self.address}", "a worker")
            with _explained(far):
                seconds = self.deadlines.connect_seconds
                connection = secured(plain, self.credentials, False, seconds)
                welcome = _ask_to_talk(connection, session, hello, far.name, seconds)
            on_failure.pop_all()
        return _Opened(connection, session, welcome, connect_seconds)


def open_over(
    connection: Connection,
    address: Address,
    session_name: str,
    deadlines: Deadlines,
    identity: Identity,
    has_joined_again: Callable[[], bool],
) -> tuple[Channel, m.Welcome]:
    """Open a conversation as the coordinator, after the worker has dialled.

    If the connection breaks, and both ends linger, this end dials the worker's address.

    Args:
        connection: Connected and, with a token, under TLS; the channel closes it.
        address: Where the worker listens; it is the worker's name in errors.
        session_name: The name of the conversation.
        deadlines: How long each kind of waiting may take. This end asks for its ``linger_seconds``.
        identity: The credentials and equipment of this process.
        has_joined_again: Whether another process of the worker waits at the door by now. Then the
            process of the broken connection never comes back.

    Raises:
        WorkerUnreachable: If the worker refuses.
        OSError: If the connection fails; likewise `ChannelError` and `RemoteProtocolError`.
    """
    hello = m.Hello(
        m.PROTOCOL_VERSION,
        "coordinator",
        session_name,
        identity.equipment,
        linger_seconds=linger_seconds(deadlines.linger_seconds),
        process=own_name(),
    )
    began_seconds, session = time.monotonic(), opening_session(hello.role)
    there = f"the worker at {address}"
    welcome = _ask_to_talk(connection, session, hello, there, deadlines.connect_seconds)
    opened = _Opened(connection, session, welcome, time.monotonic() - began_seconds)
    call = _OpeningCall(address, hello, deadlines, identity.credentials, has_joined_again)
    return call.channel(opened), welcome


@dataclass(frozen=True)
class Joined:
    """A worker's connection to a coordinator after joining.

    Args:
        connection: Connected and, with a token, under TLS.
        plain: The connection below.
        note: The coordinator's words on how long to wait.
        is_spare: Whether the run has begun without the worker.
        run: The name of the run.
    """

    connection: Connection
    plain: SocketConnection
    note: str
    is_spare: bool
    run: str


def join(
    address: Address,
    name: str,
    listener: Address,
    deadlines: Deadlines,
    identity: Identity,
    session_name: str = "",
) -> Joined:
    """Dial a waiting coordinator, and offer to work for it.

    Args:
        address: Where the coordinator listens.
        name: The name of this worker in plans.
        listener: Where this worker listens for its neighbors. If its host means all interfaces, the
            host of the interface to the coordinator replaces it.
        deadlines: How long each kind of waiting may take.
        identity: The credentials and equipment of this process.
        session_name: The only session for this process; empty if it takes any.

    Raises:
        JoinError: If a coordinator does not answer there, or one end refuses the other.
    """
    if identity.credentials is None and not address.is_loopback:
        raise JoinError(
            f"The coordinator at {address} is on another machine, so it takes a token: copy the "
            "coordinator's token file to this machine, as `lightning-hetero token` says there."
        )
    try:
        return _join(address, name, listener, deadlines, identity, session_name)
    except WorkerUnreachable as error:
        # A door with a token does not answer a peer without TLS at all, not even to ask for TLS.
        is_mute = identity.credentials is None and isinstance(error.__cause__, _CUT_OFF)
        raise JoinError(f"{error} {_MAY_NEED_IT}" if is_mute else str(error)) from error


def _join(
    address: Address,
    name: str,
    listener: Address,
    deadlines: Deadlines,
    identity: Identity,
    session_name: str,
) -> Joined:
    plain = _connect(address, deadlines, for_workers=True)
    with ExitStack() as on_failure:
        on_failure.callback(plain.close)
        keep_alive(plain.socket)
        offered = _reachable(listener, plain.socket.getsockname()[0])
        hello = m.Hello(
            m.PROTOCOL_VERSION,
            "joiner",
            session_name,
            equipment=identity.equipment,
            name=name,
            address=str(offered),
        )
        connection, welcome = _greet_door(plain, address, hello, deadlines, identity)
        on_failure.pop_all()
    return Joined(connection, plain, welcome.note, welcome.is_spare, welcome.run)


def run_at(address: Address, own: str, deadlines: Deadlines, identity: Identity) -> str:
    """The name of the run of the coordinator at an address.

    Args:
        address: Where the coordinator listens.
        own: The name of this worker's run; it may be the same run.
        deadlines: How long each kind of waiting may take.
        identity: The credentials and equipment of this process.

    Raises:
        WorkerUnreachable: If a coordinator does not answer there, or one end refuses the other.
    """
    hello = m.Hello(m.PROTOCOL_VERSION, "joiner", equipment=identity.equipment, run=own)
    plain = _connect(address, deadlines, for_workers=True)
    with ExitStack() as at_end:
        at_end.callback(plain.close)
        connection, welcome = _greet_door(plain, address, hello, deadlines, identity)
        at_end.callback(connection.close)
    return welcome.run


def _greet_door(
    plain: SocketConnection,
    address: Address,
    hello: m.Hello,
    deadlines: Deadlines,
    identity: Identity,
) -> tuple[Connection, m.Welcome]:
    far = _Far(f"the coordinator at {address}", "a coordinator that waits for workers")
    with _explained(far):
        seconds = deadlines.connect_seconds
        connection = secured(plain, identity.credentials, False, seconds)
        session = opening_session("joiner")
        return connection, _ask_to_talk(connection, session, hello, far.name, seconds)


def _anywhere(address: Address) -> Address:
    """Where a worker has to listen to be reached at an address. A machine's own name may mean
    loopback on the machine itself, as on Debian.
    """
    everywhere = "::" if ":" in address.host else "0.0.0.0"  # noqa: S104
    return address if address.is_loopback else Address(everywhere, address.port)


def _reachable(listener: Address, own_host: str) -> Address:
    """The address to dial for other machines, if this process reaches them from ``own_host``."""
    is_any = listener.host in ("0.0.0.0", "::")  # noqa: S104 - compared, not listened on
    return Address(own_host, listener.port) if is_any else listener


@dataclass(frozen=True)
class _Far:
    """The other end in errors: its name, and its expected kind."""

    name: str
    kind: str


@contextmanager
def _explained(far: _Far) -> Iterator[None]:
    """Inside, failures of an opening become errors with the name of the other end.

    Raises:
        WorkerUnreachable: In place of each.
    """
    try:
        yield
    except TrustError as error:
        name = far.name[0].upper() + far.name[1:]
        raise WorkerUnreachable(
            f"{name} and this process do not trust each other. {error}"
        ) from error
    except (OSError, ChannelError, RemoteProtocolError) as error:
        address = far.name.rpartition(" ")[2]
        raise WorkerUnreachable(
            f"The listener at {address} did not answer as {far.kind}: {error}"
        ) from error


def receive_hello(connection: Connection, deadlines: Deadlines, identity: Identity) -> m.Hello:
    """Receive the Hello of a newly connected peer.

    Raises:
        ChannelError: If it does not come in time.
        TrustError: If the peer speaks TLS, and this end has no token.
        RemoteProtocolError: If the message is not a Hello, or this end cannot work with the peer.
    """
    message = receive_opening(connection, deadlines.connect_seconds)
    return check_hello(message, identity, "the worker", WORKER_ROLES)


def check_hello(
    message: m.Message, identity: Identity, here: str, roles: Sequence[Role]
) -> m.Hello:
    """Check a first message: it must be a Hello of a compatible peer.

    Args:
        message: The first message of the peer.
        identity: The credentials and equipment of this process.
        here: The name of this end inside a sentence, such as ``"the worker"``.
        roles: The roles of the peers to answer.

    Raises:
        RemoteProtocolError: If it is another message, or the peer does not fit, with the reason for
            the peer.
    """
    if not isinstance(message, m.Hello):
        raise RemoteProtocolError(f"A conversation opens with Hello, not with {message}.")
    ours = Party(here, m.PROTOCOL_VERSION, identity.equipment)
    theirs = Party(ROLES.get(message.role, "the peer"), message.protocol, message.equipment)
    if found := obstacles(ours, theirs):
        raise RemoteProtocolError(" ".join(found))
    if message.role not in roles:
        raise RemoteProtocolError(
            f"This {here.removeprefix('the ')} talks to a {' or a '.join(roles)}, not to a "
            f"{message.role!r}."
        )
    return message


def _connect(address: Address, deadlines: Deadlines, for_workers: bool = False) -> SocketConnection:
    """Connect to a worker, or, ``for_workers``, to a waiting coordinator."""
    try:
        host_and_port = (address.host, address.port)
        connected = socket.create_connection(host_and_port, deadlines.connect_seconds)
        prepare_socket(connected)
    except socket.gaierror as error:
        whose = "coordinator's" if for_workers else "worker's"
        raise WorkerUnreachable(
            f"The host name {address.host!r} of {address} cannot be resolved on this machine: "
            f"{error.strerror}. Check how it is written, or write the {whose} IP address."
        ) from error
    except OSError as error:
        if for_workers:
            raise WorkerUnreachable(
                f"No coordinator waits for workers at {address}: {error}. It waits there at the "
                "start of each run and during the run."
            ) from error
        is_refused = isinstance(error, ConnectionRefusedError)
        raise (_NobodyListens if is_refused else WorkerUnreachable)(
            f"No worker answers at {address}: {error}. See that `lightning-hetero worker` runs "
            f"there, with `--listen {_anywhere(address)}`, or with `--join` if it dials the "
            "coordinator."
        ) from error
    return SocketConnection(connected)


def greet(
    connection: Connection,
    session: Session,
    hello: m.Hello,
    patience_seconds: float,
    reader: OpeningReader | None = None,
) -> m.Message:
    """Say Hello and return the first message of the peer.

    Raises:
        ChannelError: If the answer is late, or the peer ends the connection.
        TrustError: If one end speaks TLS and the other has no token.
        RemoteProtocolError: If the peer says something else.
    """
    session.sent(hello)
    send_buffers(connection, encode_frame(Frame(hello)), patience_seconds)
    return receive_opening(connection, patience_seconds, reader)


def _ask_to_talk(
    connection: Connection, session: Session, hello: m.Hello, there_name: str, seconds: float
) -> m.Welcome:
    """Say Hello and return the Welcome of the other end. Errors begin with ``there_name``."""
    answer = greet(connection, session, hello, seconds)
    if not isinstance(answer, m.Welcome):
        reason = answer.reason if isinstance(answer, m.Failure) else str(answer)
        is_replaced = isinstance(answer, m.Failure) and answer.is_replaced
        refusal = _SessionEnds if is_replaced else _ConversationRefused
        error = refusal(f"{there_name[0].upper()}{there_name[1:]} refused: {reason}")
        error.away = answer.away if isinstance(answer, m.Failure) else ""
        raise error
    here = Party(ROLES[hello.role], hello.protocol, hello.equipment)
    there = Party(there_name, answer.protocol, answer.equipment)
    if found := obstacles(here, there):
        raise WorkerUnreachable(" ".join(found))
    session.received(answer)
    return answer


def receive_opening(
    connection: Connection, patience_seconds: float, reader: OpeningReader | None = None
) -> m.Message:
    """Receive the first message of a peer: a Hello, or its answer, a Welcome or Failure.

    Raises:
        ChannelError: If it does not come in time, or the peer ends the connection.
        TrustError: If the peer speaks TLS, and this end has no token.
        RemoteProtocolError: If the bytes are another message, or not a message.
    """
    reader = reader or OpeningReader()
    end = time.monotonic() + patience_seconds
    while (left_seconds := end - time.monotonic()) > 0:
        connection.set_timeout(left_seconds)
        try:
            frame = receive_some(connection, reader)
        except TimeoutError:
            break
        if frame is not None:
            return frame.message
    raise ChannelError(f"Nothing came within {patience_seconds} s.")


def await_opening(
    connection: Connection, look_seconds: float, is_over: Callable[[], bool]
) -> m.Message | None:
    """Wait for the next Hello, Welcome or Failure, however long it takes.

    Args:
        connection: Connected and, with a token, under TLS.
        look_seconds: How often to look whether the wait is over.
        is_over: Whether to end the wait.

    Returns:
        The message; None if the wait was over before it came.

    Raises:
        OSError: If the connection fails.
        ChannelError: If the peer ends the connection.
        RemoteProtocolError: If the bytes are another message, or not a message.
    """
    reader = OpeningReader()
    connection.set_timeout(look_seconds)
    while not is_over():
        try:
            frame = receive_some(connection, reader)
        except TimeoutError:
            continue
        if frame is not None:
            return frame.message
    return None
