"""The worker: listens, greets whatever connects, and serves one coordinator at a time.

A connection that breaks a rule is told which rule and is ended; the worker lives on.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

import torch

from ..devices.description import equipment_here
from ..devices.device import check_has_backend, device_for
from ..errors import ChannelError, HeteroError, ProtocolError, TrustError, WorkerError
from ..model.allowed_imports import Allowed
from ..pipeline.stage_layers import KEPT_SECONDS, KeptTensors
from ..protocol import messages as m
from ..protocol.frames import Frame, encode_frame
from ..protocol.session import Session, answering_session
from ..transport.channel import Channel, send_buffers
from ..transport.connection import Connection, SocketConnection, prepare_socket
from ..transport.deadlines import Deadlines
from ..transport.handshake import Identity, receive_hello
from ..transport.tls import Credentials, secured
from .owner import Host, Owner
from .session import StageSession

logger = logging.getLogger(__name__)

# Python handles a signal between two calls of its main thread. A signal that comes just before a
# blocking call is handled after it, so no call may block for longer.
_HEARING_SECONDS = 0.5

# Connections that may be in their handshake at the same time.
_MOST_GREETINGS = 16
# Time for a refused peer to read the reason.
_LAST_WORD_SECONDS = 1.0


class Lobby:
    """Holds connections whose handshake is not over, at most so many of them.

    When the lobby is full, a newcomer displaces the stranger that has waited longest. An honest
    handshake takes milliseconds, so that stranger is most likely one that only takes room.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        # In the order of their arrival; a stranger has not said who it is.
        self._is_stranger: dict[Connection, bool] = {}

    def enter(self, connection: Connection) -> None:
        """Take a connection in; when the lobby is full, wait until another one has left."""
        with self._changed:
            while len(self._is_stranger) >= self._most:
                self._send_one_away()
                self._changed.wait()
            self._is_stranger[connection] = True

    def introduce(self, connection: Connection) -> None:
        """Note that a connection has said who it is; it is not displaced any more."""
        with self._changed:
            self._is_stranger[connection] = False

    def leave(self, connection: Connection) -> None:
        """Note that a connection's handshake has ended, with or without success."""
        with self._changed:
            del self._is_stranger[connection]
            self._changed.notify_all()

    def _send_one_away(self) -> None:
        oldest = next((c for c, is_stranger in self._is_stranger.items() if is_stranger), None)
        if oldest is not None:
            # This wakes its thread, which then leaves.
            oldest.shut_down()


class Worker:
    """A process that can serve a stage.

    Args:
        listener: A listening socket; the worker closes it.
        device: Where stages compute.
        allowed: The classes of layers that are allowed besides those of torch and transformers.
        credentials: If given, only peers that have the same are served.
        owner: The owner's wishes.

    Raises:
        ModelError: If the kind of device has no backend.
    """

    def __init__(
        self,
        listener: socket.socket,
        device: torch.device,
        deadlines: Deadlines | None = None,
        allowed: Allowed | None = None,
        credentials: Credentials | None = None,
        owner: Owner | None = None,
    ) -> None:
        check_has_backend(device)
        owner = owner or Owner()
        owner.limit(device)
        self._host = Host(
            device,
            deadlines or Deadlines(),
            allowed or Allowed(),
            Identity(owner.equipment(equipment_here(device)), credentials),
            owner,
            KeptTensors(),
        )
        self._is_paused = False
        self._is_draining = False
        # Here and not in `serve_forever`: `drain` may have closed it by then.
        listener.settimeout(_HEARING_SECONDS)
        self._listener = listener
        self._lobby = Lobby(_MOST_GREETINGS)
        self._session: StageSession | None = None
        self._began_seconds = time.monotonic()
        self._session_changed = threading.Condition()
        self._forgetting = threading.Timer(KEPT_SECONDS, self._host.kept.forget)

    def serve_forever(self) -> None:
        """Take connections until `stop` is called."""
        while True:
            try:
                connected, peer = self._listener.accept()
            except TimeoutError:
                continue
            except ConnectionError:
                continue  # the peer has gone before it was accepted
            except OSError:
                break
            connection = SocketConnection(connected)
            self._lobby.enter(connection)
            name = f"{peer[0]}:{peer[1]}"
            thread = threading.Thread(target=self._greet, args=(connection, name), daemon=True)
            thread.start()

    def stop(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._session_changed:
            self._forgetting.cancel()

    @property
    def is_draining(self) -> bool:
        """Whether the worker ends with the present run."""
        return self._is_draining

    def pause(self) -> None:
        """Finish the present micro-batch, then compute nothing until `resume`."""
        self._wish(m.Paused())

    def resume(self) -> None:
        """Go on after `pause`."""
        self._wish(m.Resumed())

    def drain(self) -> None:
        """Finish the present run, take no other one, and `stop`."""
        with self._session_changed:
            self._is_draining = True
            if self._session is None:
                self.stop()

    def _wish(self, message: m.Paused | m.Resumed) -> None:
        with self._session_changed:
            self._is_paused = isinstance(message, m.Paused)
            if self._session is not None:
                self._session.wish(message)

    def _greet(self, plain: SocketConnection, peer: str) -> None:
        """Lead a connection through its handshake, and serve the session that it opens."""
        session: StageSession | None = None
        try:
            prepare_socket(plain.socket)
            patience_seconds = self._host.deadlines.connect_seconds
            connection = secured(plain, self._host.identity.credentials, True, patience_seconds)
            session = self._talk(plain, connection, peer)
        except (OSError, HeteroError) as error:
            logger.warning("connection from %s refused: %s", peer, error)
            plain.close_after_last_word(_LAST_WORD_SECONDS)
        finally:
            self._lobby.leave(plain)
        if session is not None:
            self._serve(session)

    def _talk(
        self, plain: SocketConnection, connection: Connection, peer: str
    ) -> StageSession | None:
        """Read who the peer is and answer; a refused peer is told the reason."""
        try:
            hello = receive_hello(connection, self._host.deadlines, self._host.identity)
            if hello.role == "watcher":
                self._tell(connection, hello)
                plain.close_after_last_word(_LAST_WORD_SECONDS)
                return None
            self._lobby.introduce(plain)
            return self._welcome(connection, hello, peer)
        except (ProtocolError, TrustError, WorkerError) as error:
            with contextlib.suppress(OSError, ChannelError):
                refusal = encode_frame(Frame(m.Failure(str(error))))
                send_buffers(connection, refusal, _LAST_WORD_SECONDS)
            raise

    def _welcome(self, connection: Connection, hello: m.Hello, peer: str) -> StageSession | None:
        """Answer a Hello; returns the session that it opens, if it opens one."""
        is_coordinator = hello.role == "coordinator"
        rules = answering_session(hello.role)
        rules.received(hello)
        patience_seconds = self._host.deadlines.frozen_seconds if is_coordinator else None
        channel = Channel(connection, rules, peer, self._host.deadlines, patience_seconds)
        with self._session_changed:
            if not is_coordinator:
                session = self._session_named(hello.session)
                self._say_welcome(connection, rules)
                session.attach_upstream(channel)
                return None
            self._check_free()
            self._say_welcome(connection, rules)
            self._session = StageSession(hello.session, channel, self._host)
            self._forgetting.cancel()
            if self._is_paused:
                self._session.wish(m.Paused())
            return self._session

    def _tell(self, connection: Connection, hello: m.Hello) -> None:
        """Answer a watcher; the session that runs does not notice."""
        rules, session = answering_session("watcher"), self._session
        rules.received(hello)
        self._say_welcome(connection, rules)
        status = m.Status(
            time.monotonic() - self._began_seconds,
            device_for(self._host.device).used_bytes(),
            None if session is None else session.status(),
        )
        rules.sent(status)
        send_buffers(connection, encode_frame(Frame(status)), self._host.deadlines.connect_seconds)

    def _check_free(self) -> None:
        """Wait for the end of a run that is about to end; refuse a coordinator if none ends.

        Raises:
            WorkerError: With the reason.
        """
        if self._is_draining:
            raise WorkerError(
                "this worker ends with its present run, as its owner wants; use another worker."
            )
        busy_seconds = self._host.deadlines.busy_seconds
        if not self._session_changed.wait_for(lambda: self._session is None, busy_seconds):
            raise WorkerError(
                "this worker is busy with another coordinator; wait for its run to end, or use "
                "another worker."
            )

    def _session_named(self, name: str) -> StageSession:
        if self._session is None or self._session.name != name:
            raise WorkerError(
                "this worker does not serve the session that was asked for; the address leads to "
                "another worker than the one that was meant."
            )
        return self._session

    def _say_welcome(self, connection: Connection, rules: Session) -> None:
        welcome = m.Welcome(m.PROTOCOL_VERSION, self._host.identity.equipment, time.time())
        rules.sent(welcome)
        send_buffers(connection, encode_frame(Frame(welcome)), self._host.deadlines.connect_seconds)

    def _serve(self, session: StageSession) -> None:
        logger.info("session %s begins", session.name)
        try:
            session.run()
        except Exception:
            logger.exception("session %s failed", session.name)
        finally:
            self._host.owner.on_run_end(session.record)
            with self._session_changed:
                self._session = None
                self._forget_later()
                self._session_changed.notify_all()
                if self._is_draining:
                    self.stop()

    def _forget_later(self) -> None:
        """Free the last session's tensors after a while, unless another session begins."""
        if self._listener.fileno() < 0:
            self._host.kept.forget()  # no session can begin any more
            return
        self._forgetting = threading.Timer(KEPT_SECONDS, self._host.kept.forget)
        self._forgetting.daemon = True
        self._forgetting.start()
