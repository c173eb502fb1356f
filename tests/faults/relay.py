"""A relay in front of a worker, which may fall silent or reset all its connections."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lightning_hetero.transport.address import Address
from lightning_hetero.transport.handshake import address_of

_LOOK_AROUND_SECONDS = 0.05
_PIECE_BYTES = 2**20
# Closing such a socket is a reset.
_NO_LINGER = struct.pack("ii", 1, 0)


class Relay:
    """Forwards bytes both ways until it is told not to, as `ssh -L` does.

    Args:
        target: Where to.
        there: The block in which a connection is made on the target's machine.
        delay_seconds: How long the next piece takes; both directions of all connections ask.
    """

    def __init__(
        self,
        target: Address,
        there: Callable[[], AbstractContextManager[None]] = nullcontext,
        delay_seconds: Callable[[], float] | None = None,
    ) -> None:
        self._target = target
        self._there = there
        self._delay_seconds = delay_seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._flows = threading.Event()
        self._flows.set()
        self.address = str(address_of(self._listener))
        # What cuts each connection.
        self._cuts: list[threading.Event] = []
        self._is_first_again = False
        self._is_plugged = True
        threading.Thread(target=self._serve, daemon=True).start()

    def stall(self) -> None:
        """Forward nothing more, an end included."""
        self._flows.clear()

    def heal(self) -> None:
        """Forward again."""
        self._flows.set()

    def reset(self) -> None:
        """Reset the connections that there are."""
        while self._cuts:
            self.reset_latest()

    def reset_latest(self) -> None:
        """Reset the connection that was made last: a worker's neighbor comes to it as the last."""
        self._cuts.pop().set()

    def reset_first(self) -> None:
        """Reset the connection that was made first: the coordinator comes to a worker as the first.

        The one that takes its place counts as the first again.
        """
        self._is_first_again = True
        self._cuts[0].set()

    def pull(self) -> None:
        """Reset the connections that there are, and end each new one at once."""
        self._is_plugged = False
        self.reset()

    def plug(self) -> None:
        """Take new connections again."""
        self._is_plugged = True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.heal()
        self.reset()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self._is_plugged:
                    near.close()
                    continue
                try:
                    with self._there():
                        far = socket.create_connection((self._target.host, self._target.port))
                except OSError:
                    near.close()  # nobody listens there at present
                    continue
                cut = threading.Event()
                if self._is_first_again:
                    self._cuts[0], self._is_first_again = cut, False
                else:
                    self._cuts.append(cut)
                for source, sink in ((near, far), (far, near)):
                    pump = threading.Thread(target=self._pump, args=(source, sink, cut))
                    pump.daemon = True
                    pump.start()

    def _pump(self, source: socket.socket, sink: socket.socket, cut: threading.Event) -> None:
        # The other direction may have been cut, and both sockets closed, before this thread runs.
        with contextlib.suppress(OSError):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            source.settimeout(_LOOK_AROUND_SECONDS)
        while not cut.is_set():
            if not self._flows.wait(_LOOK_AROUND_SECONDS):
                continue
            try:
                piece = source.recv(_PIECE_BYTES)
                if self._delay_seconds is not None:
                    time.sleep(self._delay_seconds())
                _send_all(sink, piece, cut)
            except TimeoutError:
                continue
            except OSError:
                break
            if not piece:
                with contextlib.suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)
                return
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            end.close()


def _send_all(sink: socket.socket, piece: bytes, cut: threading.Event) -> None:
    rest = memoryview(piece)
    while rest and not cut.is_set():
        with contextlib.suppress(TimeoutError):
            rest = rest[sink.send(rest) :]


@contextmanager
def relay_to(
    address: str,
    there: Callable[[], AbstractContextManager[None]] = nullcontext,
    delay_seconds: Callable[[], float] | None = None,
) -> Iterator[Relay]:
    relay = Relay(Address.parse(address), there, delay_seconds)
    try:
        yield relay
    finally:
        relay.close()
