"""Conversations of pairing with strangers: replayed, damaged, guessed, and with a listener between.

A stranger does not have the code. It may not get the token of a coordinator, nor any bytes of it
from the wire, and it may not bring a token of its own to a worker.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import pytest
from spake2 import SPAKE2_A, SPAKE2_B
from spake2.groups import IntegerGroup
from spake2.params import _Params

from lightning_hetero.errors import RemoteProtocolError
from lightning_hetero.pairing import exchange as exchanges
from lightning_hetero.pairing.exchange import (
    MOST_BYTES,
    CoordinatorExchange,
    Kind,
    Reason,
    Receipt,
    Refusal,
    message,
)

from ..pairing.talks import CODE, WRONG_CODE, Giver, Keeper, new_offer, paired, talk

# The bytes of a secret that cannot be on the wire by chance.
_WINDOW_BYTES = 8

# The group of SPAKE2 in the package takes a hundred times as long. This one has messages of the
# same size, and no safety: the fuzzer does not compute logarithms.
_QUICK_GROUP = _Params(
    IntegerGroup(
        p=0x8283313BF77EFC347BEA7C1EBA6B079603BCC42514FEAE97AA545A687B494DF3,
        q=0x8BF7A4BDC458272F498DBFA8AF06BCF7E91457DB,
        g=0x30722D02F7B11621AF0DF5399491E1B5D0786D55336D9A4C039117865D385F8F,
    )
)


@contextlib.contextmanager
def quick_group() -> Iterator[None]:
    """Both ends compute in the quick group."""
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in (("SPAKE2_A", SPAKE2_A), ("SPAKE2_B", SPAKE2_B)):
            patch.setattr(exchanges, name, partial(kind, params=_QUICK_GROUP))
        yield


@dataclass(frozen=True)
class Recording:
    """The messages of both ends of an exchange."""

    from_coordinator: list[bytes]
    from_worker: list[bytes]


def recordings() -> list[Recording]:
    """Exchanges with the code that was good for an earlier offer, and one with a wrong code."""
    talks = [paired(Keeper(), Giver()) for _ in range(3)]
    talks.append(paired(Keeper(), Giver(), WRONG_CODE))
    return [Recording(each.from_coordinator, each.from_worker) for each in talks]


def _damaged(random: Random, said: bytes) -> bytes:
    """A message with something wrong, or as it was."""
    how = random.randrange(8)
    if how == 0:
        return random.randbytes(random.randrange(1, MOST_BYTES))
    if how == 1:
        return said[: random.randrange(len(said))]
    if how == 2:
        return said + random.randbytes(random.randrange(1, 2000))
    if how == 3:
        return said[:3] + bytes([random.randrange(256), random.randrange(9)]) + said[5:]
    if how == 4:
        kind = random.choice([*Kind])
        return message(kind, random.randbytes(random.randrange(80)))
    if how == 5:
        data = bytearray(said)
        for _ in range(random.choice((1, 1, 2, 8))):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        return bytes(data)
    return said


def _script(random: Random, recorded: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Messages of some recordings, some damaged, missing, doubled or out of order."""
    found = [*random.choice(recorded)]
    for _ in range(random.choice((0, 1, 1, 2))):
        where, how = random.randrange(len(found)), random.random()
        if how < 0.6:
            found[where] = _damaged(random, found[where]) or b"\0"
        elif how < 0.7 and len(found) > 1:
            del found[where]
        elif how < 0.85:
            found.insert(where, random.choice(random.choice(recorded)))
        else:
            random.shuffle(found)
    return found


def _pieces(random: Random, said: bytes) -> list[bytes]:
    """A message as it arrives: whole, or in pieces; a socket reads so many bytes at most."""
    size = random.choice((MOST_BYTES, MOST_BYTES, 1, 7))
    return [said[start : start + size] for start in range(0, len(said), size)]


class _Fuzzer:
    """Has one conversation after the other, and counts how they ended."""

    def __init__(self) -> None:
        self.recorded = recordings()
        self.ends: Counter[str] = Counter()
        self.token_bytes = 0

    def stranger_calls(self, random: Random) -> None:
        """A worker hears a stranger."""
        keeper = Keeper()
        offer = new_offer(keeper)
        offer.enter("stranger", 0.0)
        for said in _script(random, [each.from_coordinator for each in self.recorded]):
            for piece in _pieces(random, said):
                if (reply := offer.hear("stranger", piece)).end:
                    break
            if reply.end:
                break
        offer.leave("stranger")
        assert keeper.kept == [], "A stranger has brought a token."
        assert not offer.is_over(0.0), "A stranger has ended the offer with one connection."
        self.ends["a worker went on waiting"] += 1

    def stranger_answers(self, random: Random) -> None:
        """A coordinator hears a stranger."""
        giver = Giver()
        exchange, reply = CoordinatorExchange(CODE, giver.give), b""
        script = _script(random, [each.from_worker for each in self.recorded])
        if random.random() < 0.1:
            script[-1] = Refusal(random.choice([*Reason]), random.randrange(256)).to_bytes()
        heard: bytes | Refusal | Receipt | str = b""
        try:
            for piece in [piece for said in script for piece in _pieces(random, said)]:
                heard = exchange.receive(piece)
                if not isinstance(heard, bytes):
                    break
                reply += heard
        except RemoteProtocolError:
            heard = "refused"
        self._count(giver.token.secret, exchange.hello + reply, giver.num_given)
        assert not isinstance(heard, Receipt), "A stranger has judged a token."
        self.ends["a coordinator kept its token"] += 1

    def guesser_pairs(self, random: Random) -> None:
        """One end has a wrong code."""
        keeper, giver = Keeper(), Giver()
        codes = [CODE, WRONG_CODE]
        random.shuffle(codes)
        found = talk(new_offer(keeper, codes[0]), CoordinatorExchange(codes[1], giver.give))
        assert found.last == Refusal(Reason.WRONG_CODE, 2)
        assert keeper.kept == []
        wire = b"".join(found.from_coordinator + found.from_worker)
        self._count(giver.token.secret, wire, giver.num_given)
        self.ends["a wrong code was refused"] += 1

    def listener_between(self, random: Random) -> None:
        """Both ends have the code, and a stranger passes on what it likes."""
        keeper, giver = Keeper(), Giver()
        offer, exchange = new_offer(keeper), CoordinatorExchange(CODE, giver.give)
        offer.enter("peer", 0.0)
        said, wire, is_over = exchange.hello, exchange.hello, False
        where = random.randrange(7)  # the message that is not passed on as it is
        for number in range(6):
            if number == where:
                said = self._exchanged(random, said, number) or b"\0"
            heard = b""
            for piece in _pieces(random, said):
                if is_over:
                    break
                if number % 2 == 0:
                    reply = offer.hear("peer", piece)
                    heard, is_over = reply.data, bool(reply.end)
                else:
                    try:
                        word = exchange.receive(piece)
                    except RemoteProtocolError:
                        is_over = True
                        break
                    heard, is_over = (word, False) if isinstance(word, bytes) else (b"", True)
            wire += heard
            if is_over and number % 2 == 1 or not heard:
                break
            said, is_over = heard, False
        assert keeper.kept in ([], [giver.token]), "A listener has changed a token."
        self._count(giver.token.secret, wire, 0)
        self.ends["paired all the same" if keeper.kept else "a listener was noticed"] += 1

    def _exchanged(self, random: Random, said: bytes, number: int) -> bytes:
        recorded = random.choice(self.recorded)
        side = recorded.from_worker if number % 2 else recorded.from_coordinator
        return random.choice([_damaged(random, said), random.choice(side)])

    def _count(self, secret: bytes, wire: bytes, num_given: int) -> None:
        windows = range(len(secret) - _WINDOW_BYTES + 1)
        seen = sum(secret[start : start + _WINDOW_BYTES] in wire for start in windows)
        self.token_bytes += len(secret) * num_given + _WINDOW_BYTES * seen


def fuzz_pairing(count: int, seed: int) -> tuple[Counter[str], int]:
    """Have so many conversations; return how they ended, and the bytes of tokens that got out.

    Raises:
        AssertionError: If a stranger has brought a token, or ended an offer alone.
    """
    fuzzer = _Fuzzer()
    kinds: list[Callable[[Random], None]] = [
        *(fuzzer.stranger_calls,) * 4,
        *(fuzzer.stranger_answers,) * 4,
        fuzzer.guesser_pairs,
        fuzzer.listener_between,
    ]
    for number in range(count):
        random = Random(f"{seed} {number}")
        try:
            random.choice(kinds)(random)
        except Exception as error:
            raise AssertionError(f"This was conversation {number} of seed {seed}.") from error
    return fuzzer.ends, fuzzer.token_bytes
