"""TLS over another connection, for a thread that sends and one that receives.

    send ──▶ encrypt ─▶ outgoing ──▶ the connection below ──▶ incoming ─▶ decrypt ──▶ receive
             └──────── lock ──────┘                          └──────── lock ───────┘

OpenSSL lets one thread at a time use its object, and `ssl.SSLSocket` sees to that in the latest
Pythons only. So the object works on memory, under a lock that nobody holds while waiting for the
peer. What is produced while receiving, such as the answer to a new key, leaves with the next thing
that is sent: only one thread at a time sends, so records go out in their order.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Sequence

from .connection import Connection, Traffic
from .tls_faults import trust_error

# As much as is encrypted, or taken from below, at once: little enough for a core's cache, and
# enough that the calls around it do not count where OpenSSL is fast (a quarter cost a tenth).
CHUNK_BYTES = 2**20

# The longest record of TLS 1.3, its header included.
_RECORD_BYTES = 5 + 2**14 + 256


class TlsConnection:
    """Speaks TLS with a peer over a connection that is closed with this one.

    Args:
        below: What carries the records.
        tls: After its handshake.
        incoming: Where ``tls`` takes records from.
        outgoing: Where ``tls`` leaves records.
    """

    def __init__(
        self,
        below: Connection,
        tls: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
    ) -> None:
        self._below = below
        self._tls = tls
        # Its type does not know that reading into a buffer returns a number.
        self._read: Callable[[int, memoryview], int] = tls.read  # type: ignore[assignment]
        self._incoming = incoming
        self._outgoing = outgoing
        self._lock = threading.Lock()
        self._arrived = memoryview(bytearray(CHUNK_BYTES))
        # Records that the connection below has not taken yet, and how many bytes of ours they hold.
        self._unsent = memoryview(b"")
        self._owed_bytes = 0

    @property
    def traffic(self) -> Traffic:
        return self._below.traffic

    def set_timeout(self, seconds: float) -> None:
        self._below.set_timeout(seconds)

    def receive_into(self, buffer: memoryview, sure_bytes: int = 1) -> int:
        while True:
            with self._lock:
                num_bytes = self._decrypt_into(buffer)
                # What is taken from below and not given on is part of one record at most, and
                # records are longer than what they hold.
                sure_below = sure_bytes - self._incoming.pending - _RECORD_BYTES
            if num_bytes is not None:
                return num_bytes
            num_arrived = self._below.receive_into(self._arrived, max(1, sure_below))
            if num_arrived == 0:
                return 0
            with self._lock:
                self._incoming.write(self._arrived[:num_arrived])

    def send(self, buffers: Sequence[memoryview]) -> int:
        if not self._unsent:
            with self._lock:
                self._owed_bytes = self._encrypt(buffers)
                self._unsent = memoryview(self._outgoing.read())
        self._unsent = self._unsent[self._below.send([self._unsent]) :]
        if self._unsent:
            return 0
        sent_bytes, self._owed_bytes = self._owed_bytes, 0
        return sent_bytes

    def seconds_since_answer(self) -> float | None:
        return self._below.seconds_since_answer()

    def shut_down(self) -> None:
        self._below.shut_down()

    def close(self) -> None:
        # Without TLS's own goodbye: conversations end with messages that say so, and an end without
        # one is an error above.
        self._below.close()

    def _decrypt_into(self, buffer: memoryview) -> int | None:
        """Bytes that are there, as many as fit; 0 at the end, None if there are none yet."""
        num_bytes = 0
        try:
            while num_bytes < len(buffer):
                num_bytes += self._read(len(buffer) - num_bytes, buffer[num_bytes:])
        except ssl.SSLWantReadError:
            return num_bytes or None
        except ssl.SSLZeroReturnError:
            return num_bytes
        except ssl.SSLError as error:
            raise trust_error(error) from error
        return num_bytes

    def _encrypt(self, buffers: Sequence[memoryview]) -> int:
        """Turn the first bytes of the buffers into records; how many bytes that were."""
        num_bytes = 0
        for buffer in buffers:
            part = buffer[: CHUNK_BYTES - num_bytes]
            num_bytes += len(part)
            while part:
                part = part[self._tls.write(part) :]
            if num_bytes == CHUNK_BYTES:
                break
        return num_bytes
