"""Two clocks become one: the midpoint of the ping with the least round trip, from time to time.

A peer that is asked at ``asked`` and heard at ``heard`` has told its time somewhere between; that
it was the midpoint is wrong by half the round trip at most. Clocks drift against each other, by
some milliseconds a minute, so each stretch of time has its own best ping, and between two of them
the offset goes straight.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import ChannelError
from ..transport.clocks import ClockSample

WINDOW_SECONDS = 1.0
"""Pings of so short a time are of one offset: clocks of bad machines drift by 0.1 ms in it."""


@dataclass(frozen=True)
class Knot:
    """What one ping says: at this moment of the peer's clock, how much it is ahead of ours."""

    moment_seconds: float
    offset_seconds: float
    error_seconds: float

    @classmethod
    def of(cls, sample: ClockSample) -> Knot:
        """The midpoint, and how wrong it can be."""
        middle = (sample.asked_seconds + sample.heard_seconds) / 2
        error = (sample.heard_seconds - sample.asked_seconds) / 2
        return cls(sample.told_seconds, sample.told_seconds - middle, error)


@dataclass(frozen=True)
class ClockMap:
    """Turns a peer's moments into ours."""

    knots: Sequence[Knot]

    def ours(self, moment_seconds: float) -> float:
        """The same moment on our clock."""
        return moment_seconds - self.offset_at(moment_seconds)

    def offset_at(self, moment_seconds: float) -> float:
        """How much the peer's clock is ahead of ours when it shows this."""
        behind = bisect(self.knots, moment_seconds, key=lambda knot: knot.moment_seconds)
        if behind == 0 or behind == len(self.knots):
            return self.knots[max(0, behind - 1)].offset_seconds
        start, end = self.knots[behind - 1], self.knots[behind]
        share = (moment_seconds - start.moment_seconds) / (
            end.moment_seconds - start.moment_seconds
        )
        return start.offset_seconds + share * (end.offset_seconds - start.offset_seconds)

    @property
    def error_seconds(self) -> float:
        """How wrong the worst of its pings can be."""
        return max(knot.error_seconds for knot in self.knots)


SAME_CLOCK = ClockMap([Knot(0.0, 0.0, 0.0)])


def align(samples: Iterable[ClockSample], window_seconds: float = WINDOW_SECONDS) -> ClockMap:
    """The map that pings give.

    Raises:
        ChannelError: If there are none.
    """
    groups: list[list[Knot]] = []
    for knot in sorted(map(Knot.of, samples), key=lambda knot: knot.moment_seconds):
        if not groups or knot.moment_seconds - groups[-1][0].moment_seconds > window_seconds:
            groups.append([])
        groups[-1].append(knot)
    if not groups:
        raise ChannelError(
            "A worker has not told what its clock shows, so its times cannot be put beside those "
            "of others; is its connection alive?"
        )
    return ClockMap([min(group, key=lambda knot: knot.error_seconds) for group in groups])
