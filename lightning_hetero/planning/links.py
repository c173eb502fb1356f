"""Latency and bandwidth of a link from the round trips that were measured on it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from .profile import Link

# Bytes, and seconds until they were there and a short answer was back.
RoundTrip = tuple[int, float]

_FASTEST_BYTES_PER_SECOND = 1e12


def fit_link(source: str, target: str, round_trips: Sequence[RoundTrip]) -> Link:
    """The link that explains the medians of the smallest and of the largest transfers.

    A round trip takes two latencies, one there and one back, and the time of its bytes.
    """
    seconds_of: defaultdict[int, list[float]] = defaultdict(list)
    for num_bytes, seconds in round_trips:
        seconds_of[num_bytes].append(seconds)
    least, most = min(seconds_of), max(seconds_of)
    least_seconds, most_seconds = (statistics.median(seconds_of[size]) for size in (least, most))
    bytes_per_second = _FASTEST_BYTES_PER_SECOND
    if most_seconds > least_seconds:
        bytes_per_second = min(bytes_per_second, (most - least) / (most_seconds - least_seconds))
    return Link(source, target, least_seconds / 2, bytes_per_second)
