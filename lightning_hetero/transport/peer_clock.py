"""Questions for the peer's clock over a channel."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from ..protocol import messages as m
from ..protocol.fields import ClockSample

_MOST_CLOCK_SAMPLES = 512


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
