"""Pairing over loopback: those who are silent, who say something else, and who come together."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

from lightning_hetero.errors import PairingError
from lightning_hetero.pairing.exchange import CoordinatorExchange, Kind, message
from lightning_hetero.pairing.offer import OFFER_SECONDS, Offer
from lightning_hetero.pairing.sockets import await_peer, bring_token
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.handshake import address_of, open_port

from ..transport.pairs import PATIENCE_SECONDS, closed_address
from .talks import CODE, WRONG_CODE, Giver, Keeper

LOOPBACK = Address("127.0.0.1", 0)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Waiting:
    """A worker that waits for a peer in a thread."""

    address: Address
    listener: socket.socket
    outcome: Future[bool]

    def bring(self, code: str = CODE, giver: Giver | None = None) -> bool:
        return bring_token(self.address, code, (giver or Giver()).give)

    def connect(self, said: bytes = b"") -> socket.socket:
        place = (self.address.host, self.address.port)
        connected = socket.create_connection(place, PATIENCE_SECONDS)
        connected.sendall(said)
        return connected

    def ends(self) -> bool:
        return self.outcome.result(PATIENCE_SECONDS)


@contextmanager
def waiting_worker(
    keeper: Keeper | None = None, clock: Callable[[], float] = lambda: 0.0
) -> Iterator[Waiting]:
    offer: Offer[socket.socket] = Offer(CODE, (keeper or Keeper()).keep, clock())
    with open_port(LOOPBACK) as listener, ThreadPoolExecutor(1) as thread:
        found = Waiting(
            address_of(listener), listener, thread.submit(await_peer, listener, offer, clock)
        )
        try:
            yield found
        finally:
            while not found.outcome.done():  # a test has failed
                offer.tries_left = 0
                found.connect().close()


@contextmanager
def answering(*words: bytes) -> Iterator[Address]:
    """A process that answers the first message with one word, the next one with the next."""

    def answer() -> None:
        connected, _ = listener.accept()
        with connected:
            for word in words:
                connected.recv(64)
                connected.sendall(word)

    with open_port(LOOPBACK) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield address_of(listener)
        thread.join()


def test_the_token_arrives_and_the_listener_stays_open() -> None:
    keeper, giver = Keeper(), Giver()
    with waiting_worker(keeper) as worker:
        assert worker.bring(giver=giver)
        assert worker.ends()
        assert worker.listener.getblocking()
        with worker.connect(), worker.listener.accept()[0]:
            pass
    assert keeper.token == giver.token


def test_who_is_silent_or_says_rubbish_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    keeper = Keeper()
    with caplog.at_level(logging.WARNING), waiting_worker(keeper) as worker:
        silent = [worker.connect() for _ in range(20)]
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02", bytes(5000), b"lhp\x01"):
            # The worker resets a connection if it has not read all of it.
            with suppress(OSError), worker.connect(said) as stranger:
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
        assert worker.bring()
        assert worker.ends()
        for each in silent:
            each.close()
    assert len(keeper.kept) == 1
    assert 1 <= len([r for r in caplog.records if "refused" in r.getMessage()]) <= 2


@pytest.mark.follows("try again in … s.")
def test_of_two_machines_at_once_the_second_one_waits() -> None:
    with waiting_worker() as worker:
        first = worker.connect(CoordinatorExchange(CODE, Giver().give).hello)
        assert first.recv(64)
        with pytest.raises(PairingError, match=r"Another machine is pairing .* again in 10 s\."):
            worker.bring()
        first.close()
        while not worker.outcome.done():
            try:
                worker.bring()
            except PairingError:  # the worker has not seen the end of the first one yet
                continue
        assert worker.ends()


@pytest.mark.follows("copy the code that the worker shows there.")
def test_a_wrong_code_says_how_many_tries_are_left() -> None:
    with waiting_worker() as worker:
        with pytest.raises(PairingError, match=r"code is wrong\. Tries left at 127.*: 2; copy the"):
            worker.bring(WRONG_CODE)
        assert worker.bring()
        assert worker.ends()


@pytest.mark.follows("start `lightning-hetero worker --pair` there again for a new code.")
def test_the_third_wrong_code_ends_the_offer() -> None:
    with waiting_worker() as worker:
        for _ in range(2):
            with pytest.raises(PairingError, match="Tries left"):
                worker.bring(WRONG_CODE)
        with pytest.raises(PairingError, match=r"it was the last try at .* start `lightning-heter"):
            worker.bring(WRONG_CODE)
        with pytest.raises(PairingError, match="got 3 wrong codes"):
            worker.ends()
    with waiting_worker() as worker:
        assert worker.bring()


def test_an_expired_offer_ends_though_someone_is_silent() -> None:
    clock = Clock()
    with waiting_worker(clock=clock) as worker, worker.connect() as silent:
        with pytest.raises(PairingError, match="Tries left"):
            worker.bring(WRONG_CODE)  # so that the worker has taken the silent peer
        clock.seconds = OFFER_SECONDS
        worker.connect().close()  # so that the worker looks at its clock
        with pytest.raises(PairingError, match="found nobody in 5 minutes"):
            worker.ends()
        assert silent.recv(1) == b""


@pytest.mark.follows(
    "See that `lightning-hetero worker --pair` waits there, and that the address and the port are "
    "right."
)
def test_where_nobody_pairs_is_named() -> None:
    nowhere = closed_address()
    with pytest.raises(PairingError, match=f"No worker pairs at {nowhere}: .*refused"):
        bring_token(nowhere, CODE, Giver().give)
    with pytest.raises(PairingError, match=r"No worker pairs at nowhere\.invalid:9999: "):
        bring_token(Address("nowhere.invalid", 9999), CODE, Giver().give)
    for said in (b"HTTP/1.1 400 Bad Request\r\n", b"\x15\x03\x03\x00\x02\x02\x0a"):
        with answering(said) as address, pytest.raises(PairingError, match="peer does not pair"):
            bring_token(address, CODE, Giver().give)
    with answering(b"") as address, pytest.raises(PairingError, match="ended the connection"):
        bring_token(address, CODE, Giver().give)
    with waiting_worker() as worker:
        assert worker.bring()


@pytest.mark.follows("it got no token; check the address.")
def test_a_process_without_the_code_gets_no_token() -> None:
    giver, recorded = Giver(), CoordinatorExchange("otter-otter-otter", Giver().give)
    answer = message(Kind.ANSWER, b"B" + recorded.hello[6:])
    with (
        answering(answer, message(Kind.PROOF, bytes(32))) as address,
        pytest.raises(PairingError, match="does not have the code"),
    ):
        bring_token(address, CODE, giver.give)
    assert giver.num_given == 0
    with waiting_worker() as worker:
        assert worker.bring(giver=giver)


@pytest.mark.follows("Install the same version of lightning-hetero on both.")
def test_another_version_is_named() -> None:
    with (
        answering(b"lhp\x02\x06\0\0") as address,
        pytest.raises(PairingError, match="by version 2, and this end by 1"),
    ):
        bring_token(address, CODE, Giver().give)
    with waiting_worker() as worker:
        assert worker.bring()


@pytest.mark.follows(
    "start `lightning-hetero worker --pair` there again, and name a file that is not there yet "
    "with `--token-file`."
)
def test_a_worker_with_another_token_keeps_it() -> None:
    giver = Giver()
    with waiting_worker(Keeper(Giver().token)) as worker:
        with pytest.raises(PairingError, match="has another token already, and keeps it"):
            worker.bring(giver=giver)
        with pytest.raises(PairingError, match="has another token than"):
            worker.ends()
    with waiting_worker(Keeper()) as worker:
        assert worker.bring(giver=giver)
    with waiting_worker(Keeper(giver.token)) as worker:
        assert not worker.bring(giver=giver)
        assert not worker.ends()
