"""Round trips over a link: probes to measure its speed, and questions for the peer's clock."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from ..protocol import messages as m
from ..protocol.fields import ClockSample

# From small sizes, which only measure the latency, to large sizes, which only measure the
# bandwidth.
PROBE_BYTES = (2**10, 2**16, 2**20, 2**22, 2**24, 2**26)
_REPEATS = 5
_MOST_CLOCK_SAMPLES = 512

# Sends the first number of bytes and waits for the second number of bytes back.
Exchange = Callable[[int, int], None]


def measure_link(
    exchange: Exchange, patience_seconds: float, clock: Callable[[], float] = time.perf_counter
) -> m.LinkMeasured:
    """Measure round trips with bytes on the way there, then with bytes on the way back."""
    exchange(PROBE_BYTES[0], 0)  # warms up both ends
    half_seconds = patience_seconds / 2
    there = list(_samples(lambda num_bytes: exchange(num_bytes, 0), half_seconds, clock))
    back = list(_samples(lambda num_bytes: exchange(0, num_bytes), half_seconds, clock))
    return m.LinkMeasured(there, back)


def _samples(
    send: Callable[[int], None], patience_seconds: float, clock: Callable[[], float]
) -> Iterator[m.Sample]:
    """Probe with each size several times while there is time, with the smallest in any case."""
    begin, last_seconds = clock(), 0.0
    for index, num_bytes in enumerate(PROBE_BYTES):
        # The time of a probe grows at most as fast as its size.
        growth = num_bytes / PROBE_BYTES[max(index - 1, 0)]
        if index > 1 and clock() - begin + last_seconds * growth > patience_seconds:
            return
        for repeat in range(_REPEATS):
            if repeat and clock() - begin > patience_seconds:
                break
            start = clock()
            send(num_bytes)
            last_seconds = clock() - start
            yield m.Sample(num_bytes, last_seconds)


def payload(num_bytes: int) -> tuple[torch.Tensor, ...]:
    """The tensors of a frame with so many bytes; empty for 0 bytes."""
    return (torch.zeros(num_bytes, dtype=torch.uint8),) if num_bytes else ()


class PeerClock:
    """Compares a peer's clock with ours, both `time.perf_counter`.

    The peer's channel answers at once, even while the peer computes.

    Args:
        send: Sends a message to the peer.
    """

    def __init__(self, send: Callable[[m.Message], None]) -> None:
        self._send = send
        self._asked = (0, 0.0)
        self._num_left = 0
        self._samples: deque[ClockSample] = deque(maxlen=_MOST_CLOCK_SAMPLES)
        self._answered = threading.Condition()

    def compare(self, times: int) -> None:
        """Ask so many times, one question after the other; does not wait for the answers."""
        self._num_left = times
        self._ask()

    def samples(self, patience_seconds: float) -> list[ClockSample]:
        """The latest answers; waits for the first one, but not longer than ``patience_seconds``."""
        with self._answered:
            self._answered.wait_for(lambda: self._samples, patience_seconds)
            return list(self._samples)

    def take(self, message: m.Message) -> None:
        """Answer a question, or note an answer; called by the channel's reading thread."""
        if isinstance(message, m.AskClock):
            self._send(m.ClockTold(message.number, time.perf_counter()))
        elif isinstance(message, m.ClockTold):
            self._on_told(message)

    def _ask(self) -> None:
        self._num_left -= 1
        number = self._asked[0] + 1
        self._asked = number, time.perf_counter()
        self._send(m.AskClock(number))

    def _on_told(self, message: m.ClockTold) -> None:
        now = time.perf_counter()
        number, asked = self._asked
        if message.number != number:
            return  # the answer to an earlier comparison
        with self._answered:
            self._samples.append(ClockSample(asked, message.moment_seconds, now))
            self._answered.notify_all()
        if self._num_left > 0:
            self._ask()
