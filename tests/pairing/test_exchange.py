"""The exchange in memory: with the code it pairs, and without it nobody gets or brings a token."""

from __future__ import annotations

import pytest

from lightning_hetero.errors import RemoteProtocolError
from lightning_hetero.pairing.exchange import (
    MOST_BYTES,
    VERSION,
    CoordinatorExchange,
    Kind,
    MessageReader,
    OtherVersion,
    Reason,
    Receipt,
    Refusal,
    WorkerExchange,
    WrongCode,
    message,
)

from ..fuzz.pairing import fuzz_pairing, quick_group
from .talks import CODE, WRONG_CODE, Giver, Keeper, new_offer, paired, talk

# Encodings of the neutral element, and of points of a small order, on the curve of SPAKE2.
SMALL = [bytes(32), b"\x01" + bytes(31), b"\xec" + b"\xff" * 30 + b"\x7f"]


def test_with_the_code_the_token_arrives_and_is_not_on_the_wire() -> None:
    keeper, giver = Keeper(), Giver()
    found = paired(keeper, giver)
    assert found.last == Receipt.KEPT
    assert keeper.token == giver.token
    wire = b"".join(found.from_coordinator + found.from_worker)
    assert giver.token.secret[:8] not in wire
    assert CODE.encode() not in wire
    assert all(len(each) < MOST_BYTES for each in found.from_coordinator + found.from_worker)


def test_no_two_exchanges_have_a_message_in_common() -> None:
    one, other = paired(Keeper(), Giver()), paired(Keeper(), Giver())
    assert not {*one.from_coordinator, *one.from_worker} & {
        *other.from_coordinator,
        *other.from_worker,
    }


def test_a_wrong_code_gets_no_token_and_no_proof() -> None:
    keeper, giver = Keeper(), Giver()
    found = paired(keeper, giver, WRONG_CODE)
    assert found.last == Refusal(Reason.WRONG_CODE, 2)
    assert (giver.num_given, keeper.kept) == (0, [])


def test_a_recorded_conversation_says_nothing_to_the_same_code() -> None:
    recorded = paired(Keeper(), Giver())
    keeper, giver = Keeper(), Giver()
    offer = new_offer(keeper)
    offer.enter("replay", 0.0)
    assert not offer.hear("replay", recorded.from_coordinator[0]).end
    assert "another code" in offer.hear("replay", recorded.from_coordinator[1]).end
    exchange = CoordinatorExchange(CODE, giver.give)
    exchange.receive(recorded.from_worker[0])
    with pytest.raises(WrongCode):
        exchange.receive(recorded.from_worker[1])
    assert (giver.num_given, keeper.kept) == (0, [])


def test_a_recorded_token_cannot_be_opened_later_with_the_code() -> None:
    """A listener that passes all on has seen all of it, and has learnt the code afterwards."""
    found = paired(Keeper(), Giver())
    hello, _, sealed = found.from_coordinator
    later = WorkerExchange(CODE)
    later.answer(hello[5:])
    with pytest.raises(RemoteProtocolError, match="changed on its way"):
        later.token(sealed[5:])


def test_a_stranger_between_both_ends_has_one_guess_at_each() -> None:
    """It is a worker to the coordinator, and a coordinator to the worker."""
    keeper, giver = Keeper(), Giver()
    to_coordinator = talk(new_offer(code=WRONG_CODE), CoordinatorExchange(CODE, giver.give))
    offer = new_offer(keeper)
    to_worker = talk(offer, CoordinatorExchange(WRONG_CODE, Giver().give))
    assert to_coordinator.last == to_worker.last == Refusal(Reason.WRONG_CODE, 2)
    assert (giver.num_given, keeper.kept, offer.tries_left) == (0, [], 2)


def test_own_messages_that_come_back_are_refused() -> None:
    giver = Giver()
    exchange = CoordinatorExchange(CODE, giver.give)
    own = exchange.hello[5:]
    with pytest.raises(RemoteProtocolError, match="SPAKE2"):
        exchange.receive(message(Kind.ANSWER, own))
    exchange, worker = CoordinatorExchange(CODE, giver.give), WorkerExchange(CODE)
    proof = exchange.receive(worker.answer(exchange.hello[5:]))
    assert isinstance(proof, bytes)
    with pytest.raises(WrongCode):
        exchange.receive(proof)


@pytest.mark.parametrize("point", SMALL, ids=["zero", "neutral", "order two"])
@pytest.mark.parametrize("side", [b"A", b"B", b"S", b"\0"])
def test_what_is_no_message_of_spake2_is_refused(point: bytes, side: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="SPAKE2"):
        WorkerExchange(CODE).answer(side + point)
    with pytest.raises(RemoteProtocolError, match="SPAKE2"):
        CoordinatorExchange(CODE, Giver().give).receive(message(Kind.ANSWER, side + point))


def test_a_message_may_come_in_pieces_and_nothing_may_come_with_it() -> None:
    reader, proof = MessageReader(), message(Kind.PROOF, bytes(32))
    for place in range(len(proof) - 1):
        assert reader.feed(proof[place : place + 1], Kind.PROOF) is None
    assert reader.feed(proof[-1:], Kind.PROOF) == (Kind.PROOF, bytes(32))
    with pytest.raises(RemoteProtocolError, match="1 bytes more"):
        MessageReader().feed(proof + b"x", Kind.PROOF)


@pytest.mark.parametrize(
    "said", [b"\x16\x03\x01", b"GET / HTTP/1.1\r\n", b"l", b"lhp" + bytes([VERSION, 99]), b""]
)
def test_rubbish_is_refused_as_soon_as_it_shows(said: bytes) -> None:
    reader = MessageReader()
    if b"lhp".startswith(said):
        assert reader.feed(said, Kind.HELLO) is None
        said = b"x"
    with pytest.raises(RemoteProtocolError):
        reader.feed(said, Kind.HELLO)


def test_another_version_is_named() -> None:
    with pytest.raises(OtherVersion, match=f"by version 9, and this end by {VERSION}"):
        MessageReader().feed(b"lhp\x09\x01", Kind.HELLO)


def test_strangers_get_no_byte_of_a_token() -> None:
    """A small part of what `make fuzz` tries."""
    with quick_group():
        found, token_bytes = fuzz_pairing(1500, seed=1)
    assert token_bytes == 0
    assert len(found) == 5, found
