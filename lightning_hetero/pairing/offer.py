"""A worker's offer to pair: its code, tries and exchanges, without sockets and clocks.

The offer is for one peer. It ends with a token, after so many wrong codes, or at its time. A peer
costs a try when it sends a wrong proof: before its proof, it cannot have tested a code. One
exchange runs at a time. Silent peers, and peers with other messages, are few at once and soon late;
the offer goes on. A stranger could still begin exchanges again and again, so their number is
bounded too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import PairingError, RemoteProtocolError, TokenError
from ..transport.token import Token
from .exchange import (
    Kind,
    OtherVersion,
    Reason,
    Receipt,
    Refusal,
    WorkerExchange,
    WrongCode,
    message,
)

Peer = TypeVar("Peer", bound=Hashable)

OFFER_SECONDS = 300.0
# For all of an exchange: a few round trips, and a tenth of a second to compute.
EXCHANGE_SECONDS = 10.0
MOST_TRIES = 3
_MOST_PEERS = 16
_MOST_BEGUN = 50


@dataclass(frozen=True)
class Reply:
    """Bytes for a peer; with an ``end``, the reason to end its connection then."""

    data: bytes = b""
    end: str = ""


@dataclass(frozen=True)
class _Caller:
    exchange: WorkerExchange
    late_at: float


class Offer(Generic[Peer]):
    """An offer to pair. Its caller carries bytes between it and its peers.

    Args:
        code: The code for the other machine.
        keep: Takes the token; it raises a `TokenError` if this machine cannot keep it.
        now: The present time in seconds, by any clock.

    Attributes:
        ends_at: When the code is no longer good.
        tries_left: The number of wrong codes until the offer ends.
    """

    def __init__(self, code: str, keep: Callable[[Token], Receipt], now: float) -> None:
        self._code = code
        self._keep = keep
        self._peers: dict[Peer, _Caller] = {}
        self._current: Peer | None = None
        self._num_begun = 0
        self._receipt: Receipt | None = None
        self._fault: TokenError | None = None
        self.ends_at = now + OFFER_SECONDS
        self.tries_left = MOST_TRIES

    def enter(self, peer: Peer, now: float) -> Peer | None:
        """Take a new peer in.

        Returns:
            The peer to disconnect for it, or None. It is the oldest one without an exchange.
        """
        self._peers[peer] = _Caller(WorkerExchange(self._code), now + EXCHANGE_SECONDS)
        if len(self._peers) <= _MOST_PEERS:
            return None
        return next(each for each in self._peers if each != self._current)

    def leave(self, peer: Peer) -> None:
        """Forget a peer: its connection has ended."""
        del self._peers[peer]
        if peer == self._current:
            self._current = None

    def late(self, now: float) -> list[Peer]:
        """The peers to disconnect, since their time is over."""
        return [peer for peer, its in self._peers.items() if its.late_at <= now]

    def wait_seconds(self, now: float) -> float:
        """The time until the next peer is late, or until the end of the offer."""
        ends = [self.ends_at, *(its.late_at for its in self._peers.values())]
        return max(0.0, min(ends) - now)

    @property
    def has_token(self) -> bool:
        """Whether a peer has brought a token."""
        return self._receipt is not None

    def is_over(self, now: float) -> bool:
        """Whether the offer has ended."""
        return self.has_token or bool(self._why_over(now))

    def hear(self, peer: Peer, data: bytes) -> Reply:
        """Take some bytes of a peer, and return the reply."""
        exchange = self._peers[peer].exchange
        try:
            heard = exchange.receive(data)
            return Reply() if heard is None else self._reply(peer, exchange, *heard)
        except OtherVersion as error:
            # The peer reads the version of this end, and no more.
            return Reply(message(Kind.REFUSAL, bytes(2)), str(error))
        except WrongCode as error:
            self.tries_left -= 1
            refusal = Refusal(Reason.WRONG_CODE, self.tries_left)
            return Reply(refusal.to_bytes(), f"{error} Tries left: {self.tries_left}.")
        except RemoteProtocolError as error:
            return Reply(end=str(error))

    def _reply(self, peer: Peer, exchange: WorkerExchange, kind: Kind, content: bytes) -> Reply:
        if kind == Kind.HELLO:
            if self._current is not None:
                busy = Refusal(Reason.BUSY).to_bytes()
                return Reply(busy, "Another machine is pairing at the moment.")
            self._current = peer
            self._num_begun += 1
            return Reply(exchange.answer(content))
        if kind == Kind.PROOF:
            return Reply(exchange.prove(content))
        token = exchange.token(content)
        try:
            self._receipt = self._keep(token)
        except TokenError as error:
            self._receipt, self._fault = Receipt.NOT_WRITTEN, error
        return Reply(exchange.judge(self._receipt), "The exchange is complete.")

    def conclude(self, now: float) -> bool:
        """Whether the token is new here, after the end of the offer.

        Raises:
            PairingError: If the offer has ended without a token, or this machine has another one.
            TokenError: If this machine cannot keep the token.
        """
        if self._fault is not None:
            raise self._fault
        if self._receipt == Receipt.OTHER_TOKEN:
            raise PairingError(
                "This machine has another token than the machine that has paired, and other "
                "machines may use it, so it is not overwritten; start `lightning-hetero worker "
                "--pair` again, and name a file that is not there yet with `--token-file`."
            )
        if self._receipt is None:
            raise PairingError(
                f"{self._why_over(now)}, so its code is void; start `lightning-hetero worker "
                "--pair` again for a new code."
            )
        return self._receipt == Receipt.KEPT

    def _why_over(self, now: float) -> str:
        """Why the offer has ended without a token; empty if it has not."""
        if self.tries_left <= 0:
            return f"The offer to pair got {MOST_TRIES} wrong codes"
        if self._num_begun >= _MOST_BEGUN and self._current is None:
            return f"The offer to pair had {_MOST_BEGUN} exchanges that did not end"
        if now >= self.ends_at:
            return f"The offer to pair has found nobody in {OFFER_SECONDS / 60:.0f} minutes"
        return ""
