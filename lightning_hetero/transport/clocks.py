"""What a peer's clock shows: pings that its channel answers at once, also while it computes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..protocol import messages as m

_MOST_KEPT = 512


class ClockSample(NamedTuple):
    """One question: when it went out, what the peer's clock showed, when the answer was here."""

    asked_seconds: float
    told_seconds: float
    heard_seconds: float


class PeerClock:
    """Compares a peer's clock with ours, both `time.perf_counter`.

    Args:
        say: Sends a message to the peer.
    """

    def __init__(self, say: Callable[[m.Message], None]) -> None:
        self._say = say
        self._asked = (0, 0.0)
        self._num_left = 0
        self._samples: deque[ClockSample] = deque(maxlen=_MOST_KEPT)
        self._answered = threading.Condition()

    def compare(self, times: int) -> None:
        """Ask so many times, one after the other; does not wait for it."""
        self._num_left = times
        self._ask()

    def samples(self, patience_seconds: float) -> list[ClockSample]:
        """All answers that are kept; waits for the first one, or for so long."""
        with self._answered:
            self._answered.wait_for(lambda: self._samples, patience_seconds)
            return list(self._samples)

    def take(self, message: m.Message) -> None:
        """Answer a question, or take an answer; for the channel's reading thread."""
        if isinstance(message, m.AskClock):
            self._say(m.ClockTold(message.number, time.perf_counter()))
        elif isinstance(message, m.ClockTold):
            self._on_told(message)

    def _ask(self) -> None:
        self._num_left -= 1
        number = self._asked[0] + 1
        self._asked = number, time.perf_counter()
        self._say(m.AskClock(number))

    def _on_told(self, message: m.ClockTold) -> None:
        now = time.perf_counter()
        number, asked = self._asked
        if message.number != number:
            return  # of a comparison that another has taken the place of
        with self._answered:
            self._samples.append(ClockSample(asked, message.moment_seconds, now))
            self._answered.notify_all()
        if self._num_left > 0:
            self._ask()
