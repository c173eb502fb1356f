"""The coordinator's door: workers dial it, introduce themselves, and wait for the run to take them.

    worker ── TLS, Hello ──▶ greeting ──▶ waiting ── our Hello ──▶ member of the run
                              │ refused, with reason  │ a spare: waits on

The door does not answer a peer without the token: without TLS, the peer does not get a single byte.
If a peer has the token but cannot be used, the door reports the reason. A waiting worker is silent,
and the wait takes no thread in either process. A second process of a worker (see
`worker.second_processes`) comes for one session, and waits apart. The worker's end is in
`worker.join`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..errors import (
    ChannelError,
    HeteroError,
    JoinError,
    PlanError,
    RemoteProtocolError,
    WorkerUnreachable,
)
from ..protocol import messages as m
from ..protocol.frames import Frame, encode_frame
from ..protocol.session import Session, answering_session
from ..transport.address import Address, checked_name
from ..transport.channel import Channel
from ..transport.compatibility import Identity
from ..transport.connection import (
    Connection,
    SocketConnection,
    keep_alive,
    prepare_socket,
    send_buffers,
)
from ..transport.deadlines import Deadlines
from ..transport.handshake import (
    WORKER_ROLES,
    address_of,
    check_hello,
    listen,
    open_over,
    receive_opening,
)
from ..transport.reception import Reception
from ..transport.tls import secured
from .launcher import reachable

logger = logging.getLogger(__name__)

# Time for a worker to read a word of ours.
_WORD_SECONDS = 1.0
# The most waiting workers at the same time; each takes an open file.
_MOST_GUESTS = 512
# A scheduler starts all workers at once, and a busy machine greets them one after the other.
_MOST_GREETINGS = 128
# The most sentences on refused workers in the error of a run with too few workers.
_MOST_REFUSED = 8
_RUN_BYTES = 8
# Between two looks for workers that have left, and between two lines about missing workers.
_LOOK_SECONDS = 1.0
_LINE_SECONDS = 30.0


@dataclass(frozen=True, eq=False)
class Guest:
    """A worker waiting at the door.

    Args:
        name: Its name in plans.
        address: Where it listens for its neighbors.
        equipment: Its hardware and software.
        host: Where it has dialled from.
        connection: Connected and, with a token, under TLS.
        plain: The connection below.
        session: The only session of a second process; empty for a worker, which takes any session.
    """

    name: str
    address: Address
    equipment: m.Equipment
    host: str
    connection: Connection
    plain: SocketConnection
    session: str = ""

    @property
    def has_left(self) -> bool:
        """Whether the connection has ended: an honest worker is silent while it waits."""
        arrivals = select.poll()
        arrivals.register(self.plain.socket, select.POLLIN)
        return bool(arrivals.poll(0))

    def tell(self, note: str) -> None:
        """Report to the worker that it is a spare, and how long to wait. If it has left, do
        nothing.
        """
        with contextlib.suppress(OSError, ChannelError):
            word = encode_frame(Frame(m.Welcome(m.PROTOCOL_VERSION, note=note, is_spare=True)))
            send_buffers(self.connection, word, _WORD_SECONDS)

    def __str__(self) -> str:
        device = self.equipment.device_name or self.equipment.device
        return f"{self.name} ({device}, from {self.host})" if device else self.name


@dataclass(eq=False)
class Door:
    """Takes dialling workers in until `close`.

    Args:
        where: Where the door listens; port 0 takes a free port, and ``address`` then has it.
        identity: The credentials and equipment of this process.
        deadlines: How long each kind of waiting may take.
        least: How many workers the run needs.
        named: The workers of the plan; empty if any worker will do.
        say: Takes each line about coming and leaving workers, in any thread.

    Raises:
        WorkerError: If the address is not available, or is beyond loopback without a token.
    """

    where: Address
    identity: Identity
    deadlines: Deadlines
    least: int
    named: Sequence[str] = ()
    say: Callable[[str], None] = logger.info

    def __post_init__(self) -> None:
        # Shows a worker without its coordinator whether another run is here by now.
        self._run = secrets.token_hex(_RUN_BYTES)
        # The names of the workers of the run; empty until it begins.
        self._members: list[str] = []
        listener = listen(self.where, self.identity.credentials, for_workers=True)
        self.address = address_of(listener)
        self._changed = threading.Condition()
        # In the order of their arrival.
        self._guests: dict[str, Guest] = {}
        # Second processes, by their sessions.
        self._seconds: dict[str, Guest] = {}
        self._refused: deque[str] = deque(maxlen=_MOST_REFUSED)
        self._reception = Reception(listener, self._greet, _MOST_GREETINGS)
        take = self._reception.take_connections
        self._thread = threading.Thread(target=take, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send all waiting workers away. The port is closed to further calls."""
        with self._changed:
            self._reception.end()
            guests = [*self._guests.values(), *self._seconds.values()]
            self._guests, self._seconds = {}, {}
        self._thread.join()
        for guest in guests:
            guest.connection.close()

    def wait(
        self, wait_seconds: float, faults: Callable[[bool], Sequence[str]] = lambda is_late: ()
    ) -> None:
        """Wait for the workers of the run.

        Args:
            wait_seconds: The longest wait.
            faults: As in `Launcher`.

        Raises:
            JoinError: If too few come in time, or there is a fault.
        """
        begin = told = time.monotonic()
        if missing := self._missing():
            self.say(f"waiting at {self.address} for {missing} to join")
        while missing := self._missing():
            now = time.monotonic()
            if found := faults(False):
                words = " ".join([f"The run still needs {missing}.", *found, *self._refused])
                raise JoinError(words)
            if now - begin >= wait_seconds:
                raise JoinError(self._too_few(missing, wait_seconds, faults(True)))
            if now - told >= _LINE_SECONDS:
                told, left_seconds = now, wait_seconds - (now - begin)
                self.say(f"still waiting for {missing}, for {left_seconds:.0f} s at most")
            with self._changed:
                self._changed.wait(min(_LOOK_SECONDS, wait_seconds - (now - begin)))

    def begin(self, most: int | None) -> dict[str, Address]:
        """Choose the run's workers among the waiting workers; the others wait on as spares.

        Args:
            most: Take so many, in the order of their arrival, but all workers named by the plan.
                The default is all.

        Returns:
            By the workers' names, in the order of the names, where they listen.
        """
        with self._changed:
            self._forget_gone()
            guests = dict(self._guests)
            first = [name for name in self.named if name in guests]
            others = [name for name in guests if name not in first]
            count = len(guests) if most is None else max(0, most - len(first))
            taken = sorted([*first, *others[:count]], key=_in_order)
            self._members = taken
        for name in others[count:]:
            guests[name].tell(self._note(name))
            self.say(f"{guests[name]} waits as a spare: the run takes {len(taken)} workers at most")
        return {name: guests[name].address for name in taken}

    def names(self) -> Sequence[str]:
        """The names of the waiting workers."""
        with self._changed:
            self._forget_gone()
            return list(self._guests)

    def spares(self, used: Collection[str], room: float) -> list[str]:
        """The names of the workers that may join the run, in the order of their arrival.

        Args:
            used: Names already in the run.
            room: How many workers the run still takes.
        """
        found = [name for name in self.names() if name not in used]
        return [name for number, name in enumerate(found) if number < room]

    def note_members(self, names: Collection[str]) -> None:
        """Note the workers of the run."""
        with self._changed:
            self._members = sorted(names, key=_in_order)

    def admit(self, name: str, session_name: str) -> tuple[Channel, m.Welcome, Address]:
        """Open the conversation with a waiting worker.

        Args:
            name: The worker's name.
            session_name: The name of the conversation.

        Returns:
            The channel, not started yet; the worker's Welcome; where it listens.

        Raises:
            WorkerUnreachable: If it has left, or refuses.
        """
        with self._changed:
            guest = self._guests.pop(name, None)
        if guest is None:
            raise WorkerUnreachable(
                f"No worker named {name} waits at {self.address}, as it has left again; look at "
                "its output, and start it again."
            )
        return *self._open(guest, session_name, lambda: name in self.names()), guest.address

    def admit_beside(self, address: Address, session_name: str) -> tuple[Channel, m.Welcome]:
        """Open the conversation with a worker's second process, once it comes to this door.

        It dials as its worker did, since this process may have no way to the worker's address.

        Raises:
            WorkerUnreachable: If it does not come in time, has left, or refuses.
        """
        seconds = self.deadlines.connect_seconds
        with self._changed:
            self._changed.wait_for(lambda: session_name in self._seconds, seconds)
            guest = self._seconds.pop(session_name, None)
        if guest is None:
            raise WorkerUnreachable(
                f"The second process of the worker at {address} has not dialled {self.address} "
                f"within {seconds:g} s; the worker's output shows the reason."
            )
        return self._open(guest, session_name, lambda: False)

    def _open(
        self, guest: Guest, session_name: str, has_joined_again: Callable[[], bool]
    ) -> tuple[Channel, m.Welcome]:
        """Open a conversation over a guest's connection.

        Raises:
            WorkerUnreachable: If the guest has left, or refuses.
        """
        try:
            return open_over(
                guest.connection,
                guest.address,
                session_name,
                self.deadlines,
                self.identity,
                has_joined_again,
            )
        except (OSError, ChannelError, RemoteProtocolError) as error:
            guest.connection.close()
            raise WorkerUnreachable(
                f"The worker {guest} has joined and did not answer when the run began: {error}"
            ) from error
        except BaseException:
            guest.connection.close()
            raise

    def _greet(self, plain: SocketConnection, host: str, port: int) -> None:
        """Lead a connection through its handshake, and let the worker wait."""
        seconds = self.deadlines.connect_seconds
        try:
            prepare_socket(plain.socket)
            keep_alive(plain.socket)
            connection = secured(plain, self.identity.credentials, True, seconds, is_mute=True)
            message = receive_opening(connection, seconds)
        except (OSError, HeteroError) as error:
            # A stranger, so far: do not answer.
            self._reception.refusals.note(host, port, str(error))
            plain.close()
        except Exception:
            logger.exception("connection from %s:%d failed", host, port)
            plain.close()
        else:
            self._reception.lobby.introduce(plain)
            self._hear(connection, plain, message, host)
        finally:
            self._reception.lobby.leave(plain)

    def _hear(
        self, connection: Connection, plain: SocketConnection, message: m.Message, host: str
    ) -> None:
        """Let a worker wait after its Hello, or report the reason for a refusal."""
        name = message.name if isinstance(message, m.Hello) else ""
        who = f"worker {name}" if name else f"peer at {host}"
        try:
            hello = self._checked(message)
            if hello.run:
                self._tell_run(connection, hello)
                plain.close_after_last_word(_WORD_SECONDS)
                return
            self._let_in(_guest_of(connection, plain, hello, host), hello)
        except (RemoteProtocolError, JoinError, PlanError) as error:
            self._refuse(connection, who, str(error))
            plain.close_after_last_word(_WORD_SECONDS)
        except (OSError, HeteroError) as error:
            self.say(f"the {who} left while it joined: {error}")
            plain.close()

    def _checked(self, message: m.Message) -> m.Hello:
        if isinstance(message, m.Hello) and message.role in WORKER_ROLES:
            raise RemoteProtocolError(
                f"{self.address} is not a worker's address: a coordinator waits here for joining "
                "workers; name the address of a worker, or start workers with `lightning-hetero "
                f"worker --join {reachable(self.address)}`."
            )
        return check_hello(message, self.identity, "the coordinator", ("joiner",))

    def _tell_run(self, connection: Connection, hello: m.Hello) -> None:
        """Answer a worker's question for the present run; it may be a member of this run."""
        rules = answering_session("joiner")
        rules.received(hello)
        self._say_welcome(connection, rules, "", is_spare=False)

    def _let_in(self, guest: Guest, hello: m.Hello) -> None:
        """Add a worker to the waiting ones, and welcome it.

        Raises:
            JoinError: If its name is taken, or too many workers wait.
        """
        rules = answering_session("joiner")
        rules.received(hello)
        with self._changed:
            self._forget_gone()
            self._check_room(guest)
            # Reserve its name before the worker can act on its Welcome.
            waiting, key = self._place_of(guest)
            waiting[key] = guest
            note = "the run takes it in at once"
            if not guest.session:
                self.say(self._line(guest))
                note = self._note(guest.name)
            try:
                self._say_welcome(guest.connection, rules, note, bool(self._members))
            except BaseException:
                del waiting[key]
                raise
            self._changed.notify_all()

    def _say_welcome(
        self, connection: Connection, rules: Session, note: str, is_spare: bool
    ) -> None:
        welcome = m.Welcome(
            m.PROTOCOL_VERSION,
            self.identity.equipment,
            time.time(),
            note=note,
            is_spare=is_spare,
            run=self._run,
        )
        rules.sent(welcome)
        send_buffers(connection, encode_frame(Frame(welcome)), _WORD_SECONDS)

    def _place_of(self, guest: Guest) -> tuple[dict[str, Guest], str]:
        """Where a guest waits, and under which key."""
        if guest.session:
            return self._seconds, guest.session
        return self._guests, guest.name

    def _check_room(self, guest: Guest) -> None:
        if self._reception.over.is_set():
            raise JoinError("The run has ended; the next run takes workers again.")
        waiting, key = self._place_of(guest)
        if (other := waiting.get(key)) is not None:
            raise JoinError(
                f"A worker named {guest.name} has joined already, from {other.host}; start each "
                "worker with a `--name` of its own."
            )
        if len(waiting) >= _MOST_GUESTS:
            raise JoinError(
                f"{_MOST_GUESTS} workers wait here already, and this is the limit; start fewer."
            )

    def _refuse(self, connection: Connection, who: str, reason: str) -> None:
        with contextlib.suppress(OSError, ChannelError):
            send_buffers(connection, encode_frame(Frame(m.Failure(reason))), _WORD_SECONDS)
        sentence = f"The {who} was refused: {reason}"
        with self._changed:
            is_new = sentence not in self._refused
            if is_new:
                self._refused.append(sentence)
        if is_new:  # it dials again and again
            self.say(sentence)

    def _forget_gone(self) -> None:
        """Forget workers that have left; the caller holds the lock."""
        for guest in [*self._guests.values(), *self._seconds.values()]:
            if guest.has_left:
                waiting, key = self._place_of(guest)
                del waiting[key]
                guest.connection.close()
                self.say(f"{guest} has left before the run took it")

    def _missing(self) -> str:
        with self._changed:
            self._forget_gone()
            return self._missing_now()

    def _missing_now(self) -> str:
        """The missing workers in words, if the named ones are here; empty if all are here. The
        caller holds the lock.
        """
        if self.named:
            return _listed([name for name in self.named if name not in self._guests])
        count = self.least - len(self._guests)
        if count <= 0:
            return ""
        return "one more worker" if count == 1 else f"{count} more workers"

    def _note(self, name: str) -> str:
        """The note for a waiting worker."""
        if name in self._members:
            return "the run has a worker of this name, so it waits until that worker is lost"
        if self._members:
            return f"the run has begun with {_listed(self._members)}, so it waits as a spare"
        missing = self._missing_now()
        return f"it waits for {missing}" if missing else "the run begins"

    def _line(self, guest: Guest) -> str:
        """The line of the log about a new worker."""
        if guest.name in self._members:
            return f"{guest} has joined, and takes the place of the lost worker of its name"
        if self._members:
            return (
                f"{guest} has joined; the run goes on with {_listed(self._members)}, and "
                "the new worker waits as a spare"
            )
        missing = self._missing_now()
        count = len(self._guests)
        here = f"{count} worker{'s are' if count > 1 else ' is'} here"
        return f"{guest} has joined: {here}; missing: {missing or 'none'}"

    def _too_few(self, missing: str, seconds: float, faults: Sequence[str]) -> str:
        with self._changed:
            here, refused = list(self._guests), list(self._refused)
        came = f"{_listed(here)} joined" if here else "no worker joined"
        # A launcher has started the workers of its faults, so do not ask for a start by hand.
        command = f"lightning-hetero worker --join {reachable(self.address)}"
        start = f"Start `{command}` on each machine, with the same token file; or take"
        remedy = "Take" if faults else start
        words = [
            f"The run waited {seconds:g} s at {self.address} for workers: {came}. Missing: "
            f"{missing}.",
            *refused,
            *faults,
            f"{remedy} fewer workers with `least`, or wait longer with `wait_seconds`. If a "
            "coordinator was killed at another address, its workers wait for it, for its run's "
            "`linger_seconds`.",
        ]
        return " ".join(words)


def _guest_of(connection: Connection, plain: SocketConnection, hello: m.Hello, host: str) -> Guest:
    where, name = Address.parse(hello.address), checked_name(hello.name)
    return Guest(name, where, hello.equipment, host, connection, plain, hello.session)


def _in_order(name: str) -> list[tuple[int, str]]:
    """A key to sort names as people count: ``gpu2`` before ``gpu10``."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _listed(names: Sequence[str]) -> str:
    """Names as words of a list: ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
