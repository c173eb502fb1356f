"""The sockets below a pairing: a worker waits for a peer, and a coordinator dials a worker."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from ..errors import PairingError, RemoteProtocolError
from ..transport.address import Address
from ..transport.connection import accept
from ..transport.reception import RefusalLog
from ..transport.token import Token
from .exchange import (
    MOST_BYTES,
    CoordinatorExchange,
    OtherVersion,
    Reason,
    Receipt,
    Refusal,
    WrongCode,
)
from .offer import EXCHANGE_SECONDS, Offer


def await_peer(
    listener: socket.socket, offer: Offer[socket.socket], now: Callable[[], float] = time.monotonic
) -> bool:
    """Wait until a peer has brought the token.

    Args:
        listener: A listening socket; it stays open.
        offer: The offer to pair.
        now: The clock of the offer.

    Returns:
        Whether the token is new here.

    Raises:
        PairingError: If the offer ends without a token, or this machine has another one.
        TokenError: If this machine cannot keep the token.
    """
    with _OpenOffer(listener, offer, now) as waiting:
        while not offer.is_over(now()):
            waiting.serve()
    return offer.conclude(now())


class _OpenOffer:
    """The listener and the connections of an offer, all in one thread."""

    def __init__(
        self, listener: socket.socket, offer: Offer[socket.socket], now: Callable[[], float]
    ) -> None:
        self._listener, self._offer, self._now = listener, offer, now
        self._arrivals = selectors.DefaultSelector()
        self._refusals = RefusalLog()
        self._places: dict[socket.socket, tuple[str, int]] = {}

    def __enter__(self) -> _OpenOffer:
        self._listener.setblocking(False)
        self._arrivals.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_error: object) -> None:
        for connected in list(self._places):
            self._close(connected, "")
        self._refusals.tell_left_out(at_once=True)
        self._arrivals.close()
        self._listener.setblocking(True)

    def serve(self) -> None:
        """Wait for the next events, and answer them."""
        for key, _ in self._arrivals.select(self._offer.wait_seconds(self._now())):
            if key.fileobj is self._listener:
                # The peer may have gone.
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    self._take()
            elif key.fileobj in self._places and not self._offer.is_over(self._now()):
                self._hear(key.fileobj)
        for late in self._offer.late(self._now()):
            self._close(late, f"It took over {EXCHANGE_SECONDS:.0f} s.")
        self._refusals.tell_left_out()

    def _take(self) -> None:
        connected, place = accept(self._listener)
        connected.setblocking(False)
        self._places[connected] = place
        self._arrivals.register(connected, selectors.EVENT_READ)
        displaced = self._offer.enter(connected, self._now())
        if displaced is not None:
            self._close(displaced, "Others came, and it was silent.")

    def _hear(self, connected: socket.socket) -> None:
        try:
            data = connected.recv(MOST_BYTES)
            if not data:
                self._close(connected, "It ended the connection.")
                return
            reply = self._offer.hear(connected, data)
            # A reply is small, so it fits into the socket's buffer.
            connected.sendall(reply.data)
        except OSError as error:
            self._close(connected, str(error))
            return
        if reply.end:
            self._close(connected, "" if self._offer.has_token else reply.end)

    def _close(self, connected: socket.socket, why: str) -> None:
        self._arrivals.unregister(connected)
        self._offer.leave(connected)
        connected.close()
        place = self._places.pop(connected)
        if why:
            self._refusals.note(*place, why)


def bring_token(address: Address, code: str, token: Callable[[], Token]) -> bool:
    """Pair with a worker, and give it the token.

    Args:
        address: Where the worker listens.
        code: The code on the worker's terminal.
        token: Called when the worker has proved the code; it returns the token to send.

    Returns:
        Whether the token is new there.

    Raises:
        PairingError: If they did not pair, or the worker has another token.
    """
    exchange = CoordinatorExchange(code, token)
    try:
        with socket.create_connection((address.host, address.port), EXCHANGE_SECONDS) as connected:
            last = _converse(connected, exchange)
    except OtherVersion as error:
        raise PairingError(
            f"The worker at {address} and this machine do not pair alike. {error} Install the same "
            "version of lightning-hetero on both."
        ) from error
    except WrongCode as error:
        raise PairingError(
            f"The process at {address} does not have the code, so it is another process than the "
            "worker that shows it, and it got no token; check the address."
        ) from error
    except (OSError, RemoteProtocolError) as error:
        raise PairingError(
            f"No worker pairs at {address}: {str(error).rstrip('.')}. See that `lightning-hetero "
            "worker --pair` waits there, and that the address and the port are right."
        ) from error
    if isinstance(last, Refusal):
        raise PairingError(_why_refused(address, last))
    return _is_new(address, last)


def _converse(connected: socket.socket, exchange: CoordinatorExchange) -> Refusal | Receipt:
    end = time.monotonic() + EXCHANGE_SECONDS
    reply: bytes | Refusal | Receipt = exchange.hello
    while isinstance(reply, bytes):
        connected.sendall(reply)
        connected.settimeout(max(0.001, end - time.monotonic()))
        data = connected.recv(MOST_BYTES)
        if not data:
            raise RemoteProtocolError("The peer ended the connection.")
        reply = exchange.receive(data)
    return reply


def _why_refused(address: Address, refusal: Refusal) -> str:
    if refusal.reason == Reason.BUSY:
        return (
            f"Another machine is pairing with the worker at {address} at the moment; try again in "
            f"{EXCHANGE_SECONDS:.0f} s."
        )
    if refusal.number:
        return (
            f"The code is wrong. Tries left at {address}: {refusal.number}; copy the code that the "
            "worker shows there."
        )
    return (
        f"The code is wrong, and it was the last try at {address}; start `lightning-hetero worker "
        "--pair` there again for a new code."
    )


def _is_new(address: Address, receipt: Receipt) -> bool:
    if receipt == Receipt.OTHER_TOKEN:
        raise PairingError(
            f"The worker at {address} has another token already, and keeps it; start "
            "`lightning-hetero worker --pair` there again, and name a file that is not there yet "
            "with `--token-file`."
        )
    if receipt == Receipt.NOT_WRITTEN:
        raise PairingError(
            f"The worker at {address} cannot write the token to its file. It says there why."
        )
    return receipt == Receipt.KEPT
