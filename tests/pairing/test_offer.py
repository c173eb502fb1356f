"""An offer: three tries, one exchange at a time, five minutes, and no end by silent peers."""

from __future__ import annotations

import pytest

from lightning_hetero.errors import PairingError, TokenError
from lightning_hetero.pairing.exchange import CoordinatorExchange, Kind, Reason, Receipt, Refusal
from lightning_hetero.pairing.offer import EXCHANGE_SECONDS, MOST_TRIES, OFFER_SECONDS, Offer
from lightning_hetero.transport.token import Token

from .talks import CODE, WRONG_CODE, Giver, Keeper, new_offer, paired, talk


def hello(code: str = CODE) -> bytes:
    return CoordinatorExchange(code, Giver().give).hello


@pytest.mark.follows("start `lightning-hetero worker --pair` again for a new code.")
def test_three_wrong_codes_end_the_offer() -> None:
    keeper = Keeper()
    offer = new_offer(keeper)
    for left in (2, 1, 0):
        assert not offer.is_over(0.0)
        found = talk(offer, CoordinatorExchange(WRONG_CODE, Giver().give))
        assert found.last == Refusal(Reason.WRONG_CODE, left)
    assert offer.is_over(0.0)
    with pytest.raises(PairingError, match=f"got {MOST_TRIES} wrong codes, so its code is void"):
        offer.conclude(0.0)
    assert paired(keeper, Giver()).last == Receipt.KEPT  # with a new offer


def test_the_right_code_pairs_after_two_wrong_ones() -> None:
    keeper, giver = Keeper(), Giver()
    offer = new_offer(keeper)
    for _ in range(2):
        talk(offer, CoordinatorExchange(WRONG_CODE, Giver().give))
    assert talk(offer, CoordinatorExchange(CODE, giver.give)).last == Receipt.KEPT
    assert offer.conclude(0.0)
    assert keeper.token == giver.token


def test_connections_without_a_proof_cost_no_try() -> None:
    offer = new_offer()
    for said in (b"", b"GET /", hello()[:9], hello(), hello() + b"x", hello()[:5] + bytes(33)):
        offer.enter("stranger", 0.0)
        offer.hear("stranger", said)
        offer.leave("stranger")
    assert offer.tries_left == MOST_TRIES
    assert not offer.is_over(0.0)
    assert talk(offer, CoordinatorExchange(CODE, Giver().give)).last == Receipt.KEPT


def test_one_exchange_runs_at_a_time() -> None:
    offer = new_offer()
    offer.enter("first", 0.0)
    assert offer.hear("first", hello()).data
    found = talk(offer, CoordinatorExchange(CODE, Giver().give), "second")
    assert found.last == Refusal(Reason.BUSY)
    assert "pairing at the moment" in found.end
    offer.leave("first")
    assert talk(offer, CoordinatorExchange(CODE, Giver().give), "second").last == Receipt.KEPT


def test_silent_peers_make_room_and_the_one_with_an_exchange_stays() -> None:
    offer = new_offer()
    offer.enter("pairing", 0.0)
    offer.hear("pairing", hello())
    assert [offer.enter(f"silent {number}", 1.0) for number in range(15)] == [None] * 15
    assert offer.enter("newcomer", 1.0) == "silent 0"


def test_a_slow_peer_is_late_and_the_offer_goes_on() -> None:
    offer = new_offer()
    offer.enter("slow", 1.0)
    offer.hear("slow", hello())
    assert offer.late(EXCHANGE_SECONDS) == []
    assert offer.wait_seconds(EXCHANGE_SECONDS) == 1.0
    assert offer.late(1.0 + EXCHANGE_SECONDS) == ["slow"]
    offer.leave("slow")
    assert not offer.is_over(1.0 + EXCHANGE_SECONDS)


def test_an_offer_ends_at_its_time() -> None:
    offer = new_offer()
    assert offer.wait_seconds(OFFER_SECONDS - 2.0) == 2.0
    assert not offer.is_over(OFFER_SECONDS - 0.1)
    assert offer.is_over(OFFER_SECONDS)
    with pytest.raises(PairingError, match=r"found nobody in 5 minutes, so its code is void"):
        offer.conclude(OFFER_SECONDS)


def test_exchanges_cannot_be_begun_without_end() -> None:
    offer = new_offer()
    for _ in range(50):
        assert not offer.is_over(0.0)
        offer.enter("stranger", 0.0)
        offer.hear("stranger", hello())
        offer.leave("stranger")
    assert offer.is_over(0.0)
    with pytest.raises(PairingError, match="50 exchanges that did not end"):
        offer.conclude(0.0)


@pytest.mark.follows(
    "start `lightning-hetero worker --pair` again, and name a file that is not there yet with "
    "`--token-file`."
)
def test_another_token_is_not_overwritten_and_the_same_one_is_fine() -> None:
    token, giver = Token.new(), Giver()
    keeper = Keeper(token)
    offer = new_offer(keeper)
    assert talk(offer, CoordinatorExchange(CODE, giver.give)).last == Receipt.OTHER_TOKEN
    with pytest.raises(PairingError, match="has another token than the machine that has paired"):
        offer.conclude(0.0)
    assert keeper.token == token
    other_file = Keeper()
    offer = new_offer(other_file)
    assert talk(offer, CoordinatorExchange(CODE, giver.give)).last == Receipt.KEPT
    assert offer.conclude(0.0)
    offer = new_offer(Keeper(giver.token))
    assert talk(offer, CoordinatorExchange(CODE, giver.give)).last == Receipt.SAME
    assert not offer.conclude(0.0)


def test_a_file_that_cannot_be_written_is_named_to_both() -> None:
    def refuse(_token: Token) -> Receipt:
        raise TokenError("The token file 'x' cannot be written: Read-only file system.")

    offer: Offer[str] = Offer(CODE, refuse, 0.0)
    assert talk(offer, CoordinatorExchange(CODE, Giver().give)).last == Receipt.NOT_WRITTEN
    with pytest.raises(TokenError, match="Read-only"):
        offer.conclude(0.0)


def test_a_peer_with_another_version_reads_the_version_of_this_end() -> None:
    offer = new_offer()
    offer.enter("newer", 0.0)
    reply = offer.hear("newer", b"lhp\x63" + hello()[4:])
    assert "by version 99" in reply.end
    assert reply.data[:5] == b"lhp\x01" + bytes([Kind.REFUSAL])
