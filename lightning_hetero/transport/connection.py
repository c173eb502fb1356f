"""Connections: they carry bytes in both directions between two processes."""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil  # type: ignore[import-untyped]

from ..errors import ChannelError
from .peer_process import cpu_seconds_of, fair_share, find_peer_process

logger = logging.getLogger(__name__)

# A process, or a machine, has used up its files or its memory.
_NO_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NO_FILES_SECONDS = 1.0
# Linux allows 1024 buffers in one call; a frame of more goes in several.
_MOST_BUFFERS = 512
_SOCKET_BUFFER_BYTES = 4 * 2**20
_WASTE_BYTES = 2**16
# On a slow link packets arrive one by one, and each would wake the reading thread, which takes the
# interpreter from the computing one. So the reading thread sleeps until this much has arrived,
# unless less than a packet is still to come. Waiting for more bytes does not save more.
_MOST_AWAITED_BYTES = 2**15
_LEAST_AWAITED_BYTES = 1400
# A frame comes in three parts, and small ones follow each other closely: one call reads them all.
_READ_AHEAD_BYTES = 2**15
# Linux calls a socket writable when a third of its buffer is free, and this is less. macOS has a
# mark for it; `prepare_socket` sets the mark.
MOST_BYTES_AT_ONCE = 2**15
_SHARE_OF_WORK = 0.2
# Where Linux's `struct tcp_info` has the milliseconds since the last acknowledgement came.
_LAST_ACK = struct.Struct("=56xI")


@dataclass
class Traffic:
    """The bytes of a connection. One thread counts each direction; any thread may read."""

    sent_bytes: int = 0
    received_bytes: int = 0

    def add(self, other: Traffic) -> None:
        """Add the bytes of another connection."""
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes


class Connection(Protocol):
    """The calls of a channel to its connection. One thread may send while another receives."""

    @property
    def traffic(self) -> Traffic:
        """The bytes sent and received over the connection."""

    def set_timeout(self, seconds: float) -> None:
        """Let every later call raise TimeoutError after waiting so long."""

    def receive_into(self, buffer: memoryview, sure_bytes: int = 1) -> int:
        """Read arrived bytes, as many as fit; 0 after the peer's last byte.

        Args:
            sure_bytes: The number of bytes certain to come. The call may wait for them.
        """

    @property
    def has_ahead(self) -> bool:
        """Whether bytes have been read for later calls of `receive_into`; these do not wait."""

    def send(self, buffers: Sequence[memoryview]) -> int:
        """Send some bytes of the buffers; return the number of bytes to skip in the next call.

        The result may be 0 although bytes left: offer the same bytes again.
        """

    def has_room(self) -> bool:
        """Whether `MOST_BYTES_AT_ONCE` can be sent without waiting; the sending thread asks."""

    def seconds_since_answer(self) -> float | None:
        """The age of the last acknowledgement by the peer's machine, if the system reports it.

        The machine acknowledges bytes even while the peer's process is frozen.
        """

    def peer_cpu_seconds(self) -> float | None:
        """The CPU time of the peer's process, if it runs on this machine and is visible."""

    def finish_sending(self) -> None:
        """End one direction: the peer reads the sent bytes, and then an end."""

    def shut_down(self) -> None:
        """End both directions. This wakes the waiting threads."""

    def close(self) -> None:
        """Release the connection. From now on, threads must not use it."""


class SocketConnection:
    """A plain socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._awaited_bytes = 1
        self._scratch = memoryview(bytearray(_READ_AHEAD_BYTES))
        # Bytes read before a caller has asked for them.
        self._ahead = self._scratch[:0]
        self._has_looked = False
        self._peer: psutil.Process | None = None
        self.traffic = Traffic()

    @property
    def socket(self) -> socket.socket:
        """The socket, for its options."""
        return self._socket

    def set_timeout(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def receive_into(self, buffer: memoryview, sure_bytes: int = 1) -> int:
        if len(buffer) >= _READ_AHEAD_BYTES and not self._ahead:
            return self._receive(buffer, sure_bytes)
        if not self._ahead:
            self._ahead = self._scratch[: self._receive(self._scratch, sure_bytes)]
        part = self._ahead[: len(buffer)]
        buffer[: len(part)] = part
        self._ahead = self._ahead[len(part) :]
        return len(part)

    @property
    def has_ahead(self) -> bool:
        return bool(self._ahead)

    def _receive(self, buffer: memoryview, sure_bytes: int) -> int:
        self._await(awaited_bytes(sure_bytes))
        try:
            num_bytes = self._socket.recv_into(buffer)
        except TimeoutError:
            # On a slow link fewer bytes may have arrived; the peer is not silent then.
            if self._awaited_bytes == 1 or not self._has_anything():
                raise
            num_bytes = self._socket.recv_into(buffer)
        self.traffic.received_bytes += num_bytes
        return num_bytes

    def send(self, buffers: Sequence[memoryview]) -> int:
        num_bytes = self._socket.sendmsg(buffers[:_MOST_BUFFERS])
        self.traffic.sent_bytes += num_bytes
        return num_bytes

    def has_room(self) -> bool:
        return self._is_ready(select.POLLOUT)

    def seconds_since_answer(self) -> float | None:
        if not sys.platform.startswith("linux"):
            return None
        try:
            told = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.size)
        except OSError:
            return None
        (milliseconds,) = _LAST_ACK.unpack(told)
        return float(milliseconds) / 1000

    def peer_cpu_seconds(self) -> float | None:
        if not self._has_looked:
            self._has_looked, self._peer = True, find_peer_process(self._socket)
        return None if self._peer is None else cpu_seconds_of(self._peer.pid)

    def finish_sending(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _await(self, num_bytes: int) -> None:
        """Sleep in later calls until so many bytes have arrived, or until the peer's last byte."""
        if sys.platform.startswith("linux") and num_bytes != self._awaited_bytes:
            self._awaited_bytes = num_bytes
            # Without this option the thread only wakes more often.
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def _has_anything(self) -> bool:
        self._await(1)
        return self._is_ready(select.POLLIN)

    def _is_ready(self, event: int) -> bool:
        events = select.poll()
        events.register(self._socket, event)
        return bool(events.poll(0))

    def close_after_last_word(self, patience_seconds: float) -> None:
        """Close, but let the peer read the last message first.

        Closing a socket with unread bytes sends a reset. The reset may overtake the last message.
        """
        end = time.monotonic() + patience_seconds
        waste = memoryview(bytearray(_WASTE_BYTES))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while (left_seconds := end - time.monotonic()) > 0:
                self._socket.settimeout(left_seconds)
                if self._socket.recv_into(waste) == 0:
                    break
        self._socket.close()


def awaited_bytes(sure_bytes: int) -> int:
    """How many of the certain bytes to wait for."""
    return min(sure_bytes, _MOST_AWAITED_BYTES) if sure_bytes >= _LEAST_AWAITED_BYTES else 1


def keep_alive(connected: socket.socket) -> None:
    """Let the system notice the loss of a silent peer's machine within half a minute.

    The packets also keep a way through a router with NAT open.
    """
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Some systems lack some of these options. macOS calls the first option TCP_KEEPALIVE.
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
    for name, value in ((idle, 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def accept(listener: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
    """Accept a connection. It keeps waiting while this process has used up its files.

    Returns:
        The connection, and the peer's host and port.

    Raises:
        BlockingIOError: If the queue of connections is empty, or this process has used up its
            files.
        OSError: If the listener is at fault.
    """
    try:
        connected, peer = listener.accept()
    except OSError as error:
        if error.errno not in _NO_FILES:
            raise
        logger.warning("a connection waits, since this process cannot open it: %s", error)
        time.sleep(_NO_FILES_SECONDS)  # the connection would wake the caller again at once
        raise BlockingIOError(error.errno, str(error)) from error
    return connected, peer[:2]


def prepare_socket(connected: socket.socket) -> None:
    """Let small messages leave at once, and give large ones room in the buffers."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connected.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
    with contextlib.suppress(OSError):  # Linux does not let it be changed
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDLOWAT, MOST_BYTES_AT_ONCE)


class PeerWork:
    """Whether the peer's process computes. It may do this in silence for a long time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._cpu_seconds = connection.peer_cpu_seconds()
        self._looked_at = time.monotonic()

    @property
    def is_visible(self) -> bool:
        """Whether the process runs on this machine and is visible."""
        return self._cpu_seconds is not None

    def has_advanced(self) -> bool:
        """Whether the process has computed since the last question.

        Threads use a little CPU time (1 to 5 % of a core) even while they wait for the interpreter.
        So a process counts as frozen below a fifth of its share of this machine.
        """
        before, self._cpu_seconds = self._cpu_seconds, self._connection.peer_cpu_seconds()
        since, self._looked_at = self._looked_at, time.monotonic()
        if before is None or self._cpu_seconds is None:
            return False
        least_seconds = _SHARE_OF_WORK * fair_share() * (self._looked_at - since)
        return self._cpu_seconds - before > least_seconds


def send_buffers(
    connection: Connection,
    buffers: list[memoryview],
    patience_seconds: float,
    waits_for_work: bool = False,
) -> None:
    """Send buffers one after the other from their own memory; the list is empty afterwards.

    Args:
        connection: The connection.
        buffers: The bytes to send.
        patience_seconds: The longest pause of a peer in reading.
        waits_for_work: Whether to leave out the time when the peer's process computes.

    Raises:
        ChannelError: If the peer does not read for ``patience_seconds``.
    """
    last_progress = time.monotonic()
    work: PeerWork | None = None
    while buffers:
        try:
            num_bytes = connection.send(buffers)
            last_progress = time.monotonic()
        except TimeoutError:
            if waits_for_work:
                work = work or PeerWork(connection)
            if work is not None and work.has_advanced():
                last_progress = time.monotonic()
            elif time.monotonic() - last_progress > patience_seconds:
                raise ChannelError(f"The peer read nothing for {patience_seconds} s.") from None
            continue
        while buffers and num_bytes >= len(buffers[0]):
            num_bytes -= len(buffers.pop(0))
        if num_bytes:
            buffers[0] = buffers[0][num_bytes:]
