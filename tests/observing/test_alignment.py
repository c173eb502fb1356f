"""Clocks: the best ping decides, and what drifts is followed."""

from __future__ import annotations

import random

import pytest

from lightning_hetero.errors import ChannelError
from lightning_hetero.observing.alignment import align
from lightning_hetero.transport.clocks import ClockSample


def ping(asked: float, there: float, back: float, offset: float) -> ClockSample:
    """A ping that takes so long each way, to a peer whose clock is ahead by so much."""
    return ClockSample(asked, asked + there + offset, asked + there + back)


def test_as_long_there_as_back_the_offset_is_exact() -> None:
    clock = align([ping(10.0, 0.002, 0.002, 3600.0)])
    assert clock.ours(3611.0) == pytest.approx(11.0, abs=1e-9)
    assert clock.error_seconds == pytest.approx(0.002)


def test_the_ping_with_the_least_round_trip_decides() -> None:
    slow = [ping(10.0 + n / 100, 0.5, 0.001, -5.0) for n in range(10)]
    clock = align([*slow, ping(10.5, 0.0003, 0.0001, -5.0)])
    assert clock.offset_at(5.5) == pytest.approx(-5.0, abs=0.0002)


def test_an_offset_is_never_wrong_by_more_than_it_says() -> None:
    chance = random.Random(0)
    for _ in range(200):
        ways = [(chance.expovariate(1e3), chance.expovariate(1e3)) for _ in range(16)]
        clock = align(ping(n / 100, *way, 77.0) for n, way in enumerate(ways))
        assert abs(clock.offset_at(77.0) - 77.0) <= clock.error_seconds


def test_between_two_times_a_drift_is_followed() -> None:
    pings = [ping(0.0, 1e-4, 1e-4, 50.0), ping(100.0, 1e-4, 1e-4, 50.01)]
    clock = align(pings)
    assert clock.offset_at(100.0) == pytest.approx(50.005, abs=1e-4)
    assert clock.offset_at(0.0) == pytest.approx(50.0)
    assert clock.offset_at(500.0) == pytest.approx(50.01)


def test_without_a_ping_nothing_can_be_said() -> None:
    with pytest.raises(ChannelError, match="has not told what its clock shows"):
        align([])
