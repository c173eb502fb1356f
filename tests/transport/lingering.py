"""Two channels whose connection breaks at chosen bytes and comes back, within this process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

from lightning_hetero.errors import WorkerUnreachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.channel import Channel
from lightning_hetero.transport.connection import Connection
from lightning_hetero.transport.line import Lingering

from .pairs import (
    PATIENCE_SECONDS,
    QUICK,
    CutConnection,
    End,
    MemoryConnection,
    linked_sessions,
    memory_pair,
)

PATIENT = replace(QUICK, silence_seconds=PATIENCE_SECONDS)
"""For connections that break, and are never silent."""


class Weather:
    """Makes connections that break after a random number of bytes; the last ones do not.

    Args:
        seed: Of all that is random.
        num_cuts: How many connections break.
        most_bytes: The most that one carries before it breaks.
    """

    def __init__(self, seed: int, num_cuts: int, most_bytes: int = 3000) -> None:
        self._random = random.Random(seed)
        self._num_cuts = num_cuts
        self._most_bytes = most_bytes
        self.num_connections = 0
        self.too_many = 0

    def pair(self) -> tuple[MemoryConnection, MemoryConnection]:
        """Two ends that are connected."""
        self.num_connections += 1
        most_at_once = self._random.choice([7, 100, 2**20])
        one, other = (self._end(most_at_once) for _ in range(2))
        one.other, other.other = other, one
        self._num_cuts -= 1
        return one, other

    def check(self) -> None:
        """Refuse an attempt now and then, while connections break."""
        if self._num_cuts > 0 and self._random.random() < 0.3:
            raise WorkerUnreachable("The network is away.")

    def _end(self, most_at_once: int) -> MemoryConnection:
        breaks = self._num_cuts > 0
        num_bytes = self._random.randint(1, self._most_bytes) if breaks else None
        return CutConnection(most_at_once, num_bytes, self._random.random() < 0.5)


class Switch:
    """Makes connections that break when somebody says so."""

    def __init__(self) -> None:
        self.is_on = True
        self.refusal: Exception = WorkerUnreachable("The network is away.")
        # What the dialling end says of what it has received, beyond the truth.
        self.too_many = 0
        self._present: MemoryConnection | None = None

    def pair(self) -> tuple[MemoryConnection, MemoryConnection]:
        """Two ends that are connected."""
        self._present, other = memory_pair()
        return self._present, other

    def check(self) -> None:
        """Refuse an attempt while the switch is off."""
        if not self.is_on:
            raise self.refusal

    def cut(self) -> None:
        """Break the present connection."""
        assert self._present is not None
        self._present.shut_down()

    def swallow(self) -> None:
        """Let nothing more arrive over the present connection, without a word."""
        assert self._present is not None
        self._present.send = lambda buffers: sum(map(len, buffers))  # type: ignore[method-assign]

    def turn_off(self) -> None:
        """Break the present connection, and let no attempt succeed."""
        self.is_on = False
        self.cut()


@contextmanager
def lingering_pair(
    network: Weather | Switch, seconds: float = PATIENCE_SECONDS
) -> Iterator[tuple[End, End]]:
    """An upstream end, which dials again, and a downstream end."""

    def dial_again(attempt: int, received: int) -> tuple[Connection, int]:
        network.check()
        mine, theirs = network.pair()
        told: list[int] = []
        answerer.line.resume(theirs, attempt, received + network.too_many, told.append)
        try:
            network.check()
        except WorkerUnreachable:
            mine.shut_down()
            raise
        return mine, told[0]

    first, second = network.pair()
    up, down = linked_sessions()
    answering = Lingering(seconds)
    dialling = replace(answering, redial=dial_again)
    dialler = Channel(first, up, "downstream", PATIENT, lingering=dialling)
    answerer = Channel(second, down, "upstream", PATIENT, lingering=answering)
    ends = End(dialler, SimpleQueue()), End(answerer, SimpleQueue())
    for end in ends:
        end.channel.start(end.inbox)
    try:
        yield ends
    finally:
        for end in ends:
            end.channel.close(m.Goodbye())
