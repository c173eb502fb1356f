"""In-memory twins: an offer and a coordinator's end that talk without sockets."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_hetero.errors import RemoteProtocolError
from lightning_hetero.pairing.exchange import CoordinatorExchange, Receipt, Refusal
from lightning_hetero.pairing.offer import Offer
from lightning_hetero.transport.token import Token

CODE = "otter-candle-river"
WRONG_CODE = "otter-candle-rodeo"


@dataclass
class Keeper:
    """A worker's machine, with the token that it has; ``kept`` are those that were brought."""

    token: Token | None = None
    kept: list[Token] = field(default_factory=list)

    def keep(self, token: Token) -> Receipt:
        self.kept.append(token)
        if self.token is None:
            self.token = token
            return Receipt.KEPT
        return Receipt.SAME if self.token == token else Receipt.OTHER_TOKEN


@dataclass
class Giver:
    """A coordinator's machine; it counts how often its token was asked for."""

    token: Token = field(default_factory=Token.new)
    num_given: int = 0

    def give(self) -> Token:
        self.num_given += 1
        return self.token


def new_offer(keeper: Keeper | None = None, code: str = CODE) -> Offer[str]:
    """An offer that begins at the moment 0."""
    return Offer(code, (keeper or Keeper()).keep, 0.0)


@dataclass
class Talk:
    """What two ends have said.

    Args:
        from_coordinator: The messages of the coordinator's end.
        from_worker: The messages of the worker's end.
        last: The worker's last word, or the fault that the coordinator's end has found.
        end: Why the offer has ended the connection; empty if it has not.
    """

    from_coordinator: list[bytes] = field(default_factory=list)
    from_worker: list[bytes] = field(default_factory=list)
    last: Refusal | Receipt | RemoteProtocolError | None = None
    end: str = ""


def talk(offer: Offer[str], exchange: CoordinatorExchange, peer: str = "peer") -> Talk:
    """Let a coordinator's end talk with an offer until one of them ends the connection."""
    found = Talk()
    assert offer.enter(peer, 0.0) is None
    reply: bytes | Refusal | Receipt = exchange.hello
    while isinstance(reply, bytes) and not found.end:
        found.from_coordinator.append(reply)
        said = offer.hear(peer, reply)
        found.end = said.end
        if not said.data:
            break
        found.from_worker.append(said.data)
        try:
            reply = exchange.receive(said.data)
        except RemoteProtocolError as error:
            found.last = error
            break
    if not isinstance(reply, bytes):
        found.last = reply
    offer.leave(peer)
    return found


def paired(keeper: Keeper, giver: Giver, code: str = CODE) -> Talk:
    """Two ends that pair, the coordinator's with this code."""
    return talk(new_offer(keeper), CoordinatorExchange(code, giver.give))
