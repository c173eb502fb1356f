"""The worker: listens, greets all connections, and serves one coordinator at a time.

If a connection breaks a rule, the worker reports the rule to it and ends it; the worker lives on.

A `Worker` in a process of its own serves a single session (`serve_session`), and the process ends
with it: see `supervisor.py`. A `Worker` in a thread serves one session after the other
(`serve_forever`).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from ..devices.description import equipment_here
from ..devices.device import check_has_backend, device_for
from ..errors import ChannelError, HeteroError, ProtocolError, TrustError, WorkerError
from ..model.allowed_imports import Allowed
from ..protocol import messages as m
from ..protocol.frames import Frame, encode_frame
from ..protocol.session import Session, answering_session, are_of_one_run
from ..transport.address import Address
from ..transport.channel import Channel
from ..transport.compatibility import Identity
from ..transport.connection import (
    Connection,
    SocketConnection,
    prepare_socket,
    send_buffers,
)
from ..transport.deadlines import Deadlines
from ..transport.handshake import address_of, check_hello, receive_hello
from ..transport.line import Lingering
from ..transport.reception import Reception
from ..transport.tls import Credentials, secured
from ..transport.wings import linger_seconds
from .owner import Host, Owner
from .session import StageSession
from .wings import other_processes

logger = logging.getLogger(__name__)

# Time for a refused peer to read the reason.
_LAST_WORD_SECONDS = 1.0
# Time for running handshakes when the only session ends.
_FAREWELL_SECONDS = 3.0
# For so long after the latest look of a run, a worker is its spare; the run looks every five
# seconds.
_SPARE_SECONDS = 15.0


class _ProcessReplaced(WorkerError):
    """This process does not take sessions any more; the next process does."""


class _Waiting(WorkerError):
    """The worker waits for a coordinator after its connection broke.

    Args:
        process: The name of the coordinator's process.
    """

    def __init__(self, reason: str, process: str) -> None:
        super().__init__(reason)
        self.process = process


class _ServedElsewhere(_ProcessReplaced):
    """Another process of this worker serves the session."""


def _unknown_session() -> WorkerError:
    return WorkerError(
        "this worker does not serve the session asked for; the session's process has ended "
        "meanwhile, or the address leads to another worker."
    )


class Worker:
    """A process to serve stages.

    Args:
        listener: A listening socket; the worker closes it.
        device: Where stages compute.
        allowed: The allowed classes of layers, besides torch's and transformers' classes.
        credentials: If given, the worker serves only peers with the same token.
        owner: The owner's wishes.
        equipment: A former process's description of the device; by default this process looks.

    Attributes:
        host: The worker as its sessions see it.

    Raises:
        ModelError: If the kind of device lacks a backend.
    """

    def __init__(
        self,
        listener: socket.socket,
        device: torch.device,
        deadlines: Deadlines | None = None,
        allowed: Allowed | None = None,
        credentials: Credentials | None = None,
        owner: Owner | None = None,
        equipment: m.Equipment | None = None,
    ) -> None:
        check_has_backend(device)
        owner = owner or Owner()
        owner.limit(device)
        self.host = Host(
            device,
            deadlines or Deadlines(),
            allowed or Allowed(),
            Identity(owner.equipment(equipment or equipment_here(device)), credentials),
            owner,
            other_processes(),
        )
        self._is_paused = False
        self._is_draining = False
        # Whether the only session of this process is over.
        self._is_replaced = False
        self._serves_one = False
        self._address = address_of(listener)
        self._reception = Reception(listener, self._greet)
        self._session: StageSession | None = None
        # The name of its coordinator's process.
        self._process = ""
        # The run of a waiting free worker, and until when.
        self._spare: tuple[m.SpareStatus, float] | None = None
        self._began_seconds = time.monotonic()
        self._session_changed = threading.Condition()

    def serve_forever(self) -> None:
        """Take connections until `stop` is called."""
        beside = self.host.beside
        self._reception.take_connections(lambda: 0.0 if beside is None else beside.leaving_seconds)

    def serve_session(self, began_seconds: float, on_over: Callable[[], None]) -> None:
        """Take connections until the first session is over.

        Args:
            began_seconds: When the first process of the worker began, by the monotonic clock.
            on_over: Called as soon as another process may take connections in place of this one.
        """
        self._began_seconds, self._serves_one = began_seconds, True
        self.serve_forever()
        on_over()
        gc.collect()  # the session's own objects would keep the tensors alive
        device_for(self.host.device).free_cache()
        # Peers in the handshake are asked to dial again.
        self._reception.lobby.wait_until_empty(_FAREWELL_SECONDS)

    def stop(self) -> None:
        """Stop taking connections."""
        self._reception.end()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` has been called."""
        return self._reception.over.is_set()

    def wait_until_stopped(self, seconds: float) -> None:
        """Wait for `stop`, but not for longer."""
        self._reception.over.wait(seconds)

    @property
    def listener(self) -> Address:
        """Where the worker listens."""
        return self._address

    def pause(self) -> None:
        """Finish the present micro-batch, then pause until `resume`."""
        self._wish(m.Paused())

    def resume(self) -> None:
        """Go on after `pause`."""
        self._wish(m.Resumed())

    def note_spare(self, run: str, coordinator: str, seconds: float = math.inf) -> None:
        """Report the free worker to watchers as a spare of a run, for so long.

        Args:
            run: The name of the run; empty if it is not known.
            coordinator: The address of the run's coordinator.
            seconds: How long the report holds.
        """
        self._spare = m.SpareStatus(run, coordinator), time.monotonic() + seconds

    def note_no_spare(self) -> None:
        """Stop reporting the worker as a spare."""
        self._spare = None

    @property
    def has_run(self) -> bool:
        """Whether a run is under way."""
        # A peer may have its Welcome a moment before the session is there.
        with self._session_changed:
            return self._session is not None

    @property
    def waits_for_coordinator(self) -> bool:
        """Whether the session waits for the coordinator after a break of their connection."""
        session = self._session
        return session is not None and session.waits_seconds > 0

    @property
    def has_lost_coordinator(self) -> bool:
        """Whether the conversation with the coordinator is over, and the session has not ended."""
        session = self._session
        return session is not None and session.has_lost_coordinator

    def give_up_coordinator(self, reason: str) -> None:
        """End the session if it waits for a coordinator; the reason tells why the coordinator has
        ended.
        """
        session = self._session
        if session is not None:
            session.give_up_coordinator(reason)

    def drain(self) -> None:
        """Finish the present run, refuse further runs, and `stop`.

        The coordinator gets a report, and may let the worker go before the run ends.
        """
        with self._session_changed:
            self.retire()
            if self._session is not None:
                self._session.wish(m.Leaving())

    def retire(self) -> None:
        """Refuse further sessions; `stop` at once if the worker is free."""
        with self._session_changed:
            self._is_draining = True
            if self._session is None:
                self.stop()

    def _wish(self, message: m.Paused | m.Resumed) -> None:
        with self._session_changed:
            self._is_paused = isinstance(message, m.Paused)
            if self._session is not None:
                self._session.wish(message)

    def _greet(self, plain: SocketConnection, host: str, port: int) -> None:
        """Lead a connection through its handshake, and serve its session."""
        session: StageSession | None = None
        try:
            prepare_socket(plain.socket)
            patience_seconds = self.host.deadlines.connect_seconds
            connection = secured(plain, self.host.identity.credentials, True, patience_seconds)
            session = self._talk(plain, connection, f"{host}:{port}")
        except _ServedElsewhere:
            plain.close_after_last_word(_LAST_WORD_SECONDS)
        except (OSError, HeteroError) as error:
            self._reception.refusals.note(host, port, str(error))
            plain.close_after_last_word(_LAST_WORD_SECONDS)
        except Exception:
            # If the connection stayed open, its peer would wait for an answer, and blame others.
            logger.exception("connection from %s:%d failed", host, port)
            plain.close()
        finally:
            self._reception.lobby.leave(plain)
        if session is not None:
            self._serve(session)

    def _talk(
        self, plain: SocketConnection, connection: Connection, peer: str
    ) -> StageSession | None:
        """Read the peer's Hello and answer; a refused peer gets the reason."""
        try:
            hello = receive_hello(connection, self.host.deadlines, self.host.identity)
            beside = self.host.beside
            if beside is not None and beside.is_elsewhere(hello.session):
                beside.leave_next()
                raise _ServedElsewhere(
                    "another process of this worker serves this session; dial again."
                )
            if hello.role == "watcher":
                if hello.session:
                    self.note_spare(hello.session, peer, _SPARE_SECONDS)
                self._tell(connection, hello)
                plain.close_after_last_word(_LAST_WORD_SECONDS)
                return None
            self._reception.lobby.introduce(plain)
            if hello.secret:
                self._resume(connection, hello)
                return None
            return self._welcome(connection, hello, peer)
        except (ProtocolError, TrustError, WorkerError) as error:
            _tell_reason(connection, error)
            raise

    def serve_joined(self, connection: Connection, message: m.Message, peer: str) -> None:
        """Serve the coordinator over a connection dialled by this worker.

        Args:
            connection: Connected and, with a token, under TLS.
            message: The coordinator's Hello.
            peer: The coordinator's name for people.

        Raises:
            HeteroError: If the message is not a Hello, or this end cannot work with the
                coordinator. The coordinator gets the reason.
        """
        try:
            hello = check_hello(message, self.host.identity, "the worker", ("coordinator",))
            session = self._welcome(connection, hello, peer)
        except (ProtocolError, WorkerError) as error:
            _tell_reason(connection, error)
            raise
        if session is not None:
            self._serve(session)

    def _welcome(self, connection: Connection, hello: m.Hello, peer: str) -> StageSession | None:
        """Answer a Hello; returns its new session, if it opens one."""
        is_coordinator = hello.role == "coordinator"
        rules = answering_session(hello.role)
        rules.received(hello)
        deadlines = self.host.deadlines
        patience_seconds = deadlines.frozen_seconds if is_coordinator else None
        seconds = linger_seconds(min(hello.linger_seconds, self.host.owner.linger_seconds))
        lingering = Lingering(seconds) if seconds > 0 else None
        channel = Channel(connection, rules, peer, deadlines, patience_seconds, lingering)
        with self._session_changed:
            if not is_coordinator:
                session = self._session_named(hello.session)
                # The peer may send as soon as it has its Welcome, and the coordinator may name the
                # peer to the session. So the session has to know the channel before.
                attach = partial(session.attach_upstream, channel, hello.member)
                self._say_welcome(connection, rules, lingering, before_sending=attach)
                session.start_upstream(channel)
                return None
            self._check_free(hello)
            self._say_welcome(connection, rules, lingering)
            self._process = hello.process
            self._session = StageSession(hello.session, channel, self.host)
            if self._is_paused:
                self._session.wish(m.Paused())
            return self._session

    def _resume(self, connection: Connection, hello: m.Hello) -> None:
        """Let a conversation go on after its connection has broken.

        Raises:
            WorkerError: If the conversation does not exist, or the peer does not know its secret.
            ChannelError: If the peer has to dial again.
            RemoteProtocolError: If the numbers of frames are wrong.
        """
        rules = answering_session(hello.role)
        rules.received(hello)
        with self._session_changed:
            session = self._session_named(hello.session)
            line = session.line_with(hello.secret)
        if line is None:
            raise _unknown_session()
        line.resume(
            connection,
            hello.attempt,
            hello.received,
            lambda count: self._say_welcome(connection, rules, received=count),
        )

    def _tell(self, connection: Connection, hello: m.Hello) -> None:
        """Answer a watcher; the running session does not notice."""
        rules = answering_session("watcher")
        rules.received(hello)
        self._say_welcome(connection, rules)
        status = self._status
        rules.sent(status)
        send_buffers(connection, encode_frame(Frame(status)), self.host.deadlines.connect_seconds)

    @property
    def _status(self) -> m.Status:
        """The status of this process, with the stages and the memory of the processes beside it."""
        beside, own = self.host.beside, self.own_status
        return own if beside is None else beside.added_to(own)

    @property
    def own_status(self) -> m.Status:
        """The status of this process."""
        now, session, spare = time.monotonic(), self._session, self._spare
        stage = None if session is None else session.status()
        waits_for = None
        if stage is None and spare is not None and now < spare[1]:
            waits_for = spare[0]
        used_bytes = device_for(self.host.device).used_bytes()
        return m.Status(now - self._began_seconds, used_bytes, stage, waits_for)

    def _check_free(self, hello: m.Hello) -> None:
        """Wait for the end of an ending run; refuse a coordinator if the run goes on.

        Args:
            hello: Names the wanted session of the coordinator.

        Raises:
            WorkerError: With the reason.
        """
        if self._is_draining:
            raise WorkerError(
                "this worker ends with its present run, as its owner wants; use another worker."
            )
        busy_seconds = self.host.deadlines.busy_seconds
        if hello.ended and hello.ended == self._process:
            self.give_up_coordinator("Its process has ended.")
        elif self.waits_for_coordinator:
            busy_seconds = 0.0  # the session will not end so soon
        if not self._session_changed.wait_for(lambda: self._session is None, busy_seconds):
            raise self._busy(hello.session)
        if self._is_replaced:
            raise _ProcessReplaced("the answering process ends with its session.")

    def _busy(self, wanted: str) -> WorkerError:
        seconds = 0.0 if self._session is None else self._session.waits_seconds
        if seconds > 0:
            return _Waiting(
                "this worker is busy: the connection to its coordinator broke, and it waits up "
                f"to {seconds:g} s for it to come back; try again later, use another worker, or "
                "restart this worker if the other run is over.",
                self._process,
            )
        if self._session is not None and are_of_one_run(wanted, self._session.name):
            return WorkerError(
                "this worker serves this run already; if two of the run's addresses lead to it, "
                "name one of them only."
            )
        whose = "" if self._session is None else f" ({self._session.record.whose})"
        return WorkerError(
            f"this worker is busy with another coordinator{whose}; wait for its run to end, or "
            "use another worker. `lightning-hetero top` shows its work."
        )

    def _session_named(self, name: str) -> StageSession:
        if self._session is None or self._session.name != name:
            raise _unknown_session()
        return self._session

    def _say_welcome(
        self,
        connection: Connection,
        rules: Session,
        lingering: Lingering | None = None,
        received: int = 0,
        before_sending: Callable[[], None] = lambda: None,
    ) -> None:
        welcome = m.Welcome(
            m.PROTOCOL_VERSION,
            self.host.identity.equipment,
            time.time(),
            0.0 if lingering is None else lingering.seconds,
            "" if lingering is None else lingering.secret,
            received,
        )
        rules.sent(welcome)
        before_sending()
        send_buffers(connection, encode_frame(Frame(welcome)), self.host.deadlines.connect_seconds)

    def _serve(self, session: StageSession) -> None:
        logger.info("session %s begins in process %d", session.name, os.getpid())
        try:
            session.run()
        except BaseException:  # the coordinator has the report, and the thread ends here
            logger.exception("session %s failed", session.name)
        finally:
            self.host.owner.on_run_end(session.record)
            with self._session_changed:
                self._session = None
                self._is_replaced = self._serves_one
                self._session_changed.notify_all()
                if self._is_draining or self._is_replaced:
                    self.stop()


def _tell_reason(connection: Connection, error: Exception) -> None:
    """Report the reason to a refused peer."""
    with contextlib.suppress(OSError, ChannelError):
        away = error.process if isinstance(error, _Waiting) else ""
        failure = m.Failure(str(error), is_replaced=isinstance(error, _ProcessReplaced), away=away)
        send_buffers(connection, encode_frame(Frame(failure)), _LAST_WORD_SECONDS)
