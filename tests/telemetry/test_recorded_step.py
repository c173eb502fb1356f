"""Clocks: the best ping decides, and a drift is followed.

Recorded steps: on one clock, without spans outside the step, with their bubble.
"""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from lightning_hetero.errors import ChannelError
from lightning_hetero.protocol.fields import ClockSample, Span
from lightning_hetero.telemetry.recorded_step import align, name_of, prediction_of

from ..planner.profiles import coordinator, device, ends, profile
from .made_up import COORDINATOR, PLAN, TURNS, WORKER, made_up, made_up_step, turn_by_turn


def ping(asked: float, there: float, back: float, offset: float) -> ClockSample:
    """A ping that takes so long each way, to a peer whose clock is ahead by so much."""
    return ClockSample(asked, asked + there + offset, asked + there + back)


def test_equal_ways_give_the_exact_offset() -> None:
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


def test_without_a_ping_there_is_no_clock_map() -> None:
    with pytest.raises(ChannelError, match="has not answered any ping"):
        align([])


def test_a_step_ends_with_the_last_action_of_any_process() -> None:
    step = made_up_step()
    assert (step.end_seconds, step.seconds) == (21.0, 21.0)
    first, second = step.processes[1].spans[0], step.processes[1].spans[-1]
    assert (first.kind, first.start_seconds) == ("wait", 0.0)
    assert second.kind == "optimizer"


def test_the_bubble_is_the_idle_share() -> None:
    step = made_up_step()
    assert step.processes[0].computing_seconds == 9.0
    assert step.processes[1].computing_seconds == 6.0
    assert step.bubble == pytest.approx(1 - 15 / 42)


def test_the_times_of_a_worker_are_put_on_our_clock() -> None:
    ahead = [
        replace(
            span,
            start_seconds=span.start_seconds + 1000,
            end_seconds=span.end_seconds + 1000,
            arrived_seconds=None if span.arrived_seconds is None else span.arrived_seconds + 1000,
        )
        for span in WORKER
    ]
    clock = align([ClockSample(0.0, 1000.5, 1.0)])
    step = made_up({0: COORDINATOR, 1: ahead}, clock)
    assert step.processes[1].spans == made_up_step().processes[1].spans


def test_waiting_inside_an_action_is_not_computing() -> None:
    spans = [Span("forward", 0, 10), Span("wait", 2, 6), Span("pack", 6, 7)]
    step = made_up({0: spans, 1: WORKER})
    assert step.processes[0].computing_seconds == 5.0


def test_a_process_has_the_spans_of_all_its_stages_once() -> None:
    coordinator, a, b = turn_by_turn().processes
    assert [held.layers for held in coordinator.ranges] == [(0, 1), (5, 6)]
    assert [(held.stage, held.layers) for held in b.ranges] == [(1, (1, 3)), (3, (4, 5))]
    assert (a.name, [held.stage for held in a.ranges]) == ("a", [2])
    assert [each.computing_seconds for each in (coordinator, a, b)] == [3.0, 2.0, 4.0]
    assert turn_by_turn().bubble == pytest.approx(1 - 9 / (3 * 19))


def test_a_step_is_predicted_from_the_profile_of_its_devices() -> None:
    layers = device("coordinator", 1.0, 2.0).timings
    measured = profile(3, [device("a", 0.5, 1.5)], coordinator([*ends(), *layers]), batch_size=1)
    found = prediction_of(made_up_step(), PLAN, measured)
    assert found is not None
    here, there = found.processes
    assert [name_of(span) for span in here.actions] == ["0F0", "0L0", "0B0"]
    assert [name_of(span) for span in there.actions] == ["1F0", "1B0"]
    assert [each.computing_seconds for each in found.processes] == [3.0, 4.0]
    assert found.seconds == 7.0
    assert prediction_of(made_up_step(), PLAN, None) is None
    assert prediction_of(made_up_step(), TURNS, measured) is None
