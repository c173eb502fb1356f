"""Clocks: the best ping decides, and a drift is followed.

Recorded steps: on one clock, without spans outside the step, with their bubble.
"""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from lightning_hetero.errors import ChannelError
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.protocol.fields import ClockSample, Span
from lightning_hetero.telemetry.step import (
    SAME_CLOCK,
    RecordedStep,
    align,
    pipeline_of,
    prediction_of,
    recorded_step,
)

from .made_up import COORDINATOR, PLAN, WORKER, made_up_step


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
    with pytest.raises(ChannelError, match="has answered no ping"):
        align([])


def test_a_step_ends_with_the_last_action_of_any_stage() -> None:
    step = made_up_step()
    assert (step.end_seconds, step.seconds) == (21.0, 21.0)
    first, second = step.stages[1].spans[0], step.stages[1].spans[-1]
    assert (first.kind, first.start_seconds) == ("wait", 0.0)
    assert second.kind == "optimizer"


def test_the_bubble_is_the_idle_share() -> None:
    step = made_up_step()
    assert step.stages[0].computing_seconds == 9.0
    assert step.stages[1].computing_seconds == 6.0
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
    step = recorded_step(4, 0.0, PLAN, {0: COORDINATOR, 1: ahead}, {1: clock})
    assert step.stages[1].spans == made_up_step().stages[1].spans


def test_waiting_inside_an_action_is_not_computing() -> None:
    spans = [Span("forward", 0, 10), Span("wait", 2, 6), Span("pack", 6, 7)]
    step = recorded_step(0, 0.0, PLAN, {0: spans, 1: WORKER}, {1: align([ClockSample(0, 0, 0)])})
    assert step.stages[0].computing_seconds == 5.0


def sent(message: str, microbatch: int, takes: int, peer: int, start: float) -> Span:
    """A message that stage ``takes`` of process ``peer`` gets; it travels for half a second."""
    return Span("send", start, start + 0.5, microbatch, message=message, peer=peer, stage=takes)


def turns() -> RecordedStep:
    """Worker a has stages 1, 3 and 4, and b has stage 2; one micro-batch, actions of a second."""
    names = ["a:1", "b:1", "a:1", "a:1"]
    plan = Plan([StagePlan([name], (n, n + 1)) for n, name in enumerate(names)], 1)
    moments = {1: (1, 12), 3: (5, 10), 4: (6, 9)}
    a = [
        Span(kind, start, start + 1.0, 0, stage=stage)
        for stage, starts in moments.items()
        for kind, start in zip(("forward", "backward"), starts, strict=True)
    ]
    a += [Span("wait", 2.5, 5.0), Span("optimizer", 14.0, 14.5)]
    a += [sent("Activation", 0, 2, 2, 2.0), sent("Gradient", 0, 2, 2, 11.0)]
    a += [sent("Activation", 0, 0, 0, 7.0), sent("Gradient", 0, 0, 0, 13.0)]
    b = [Span("forward", 3.0, 4.0, 0, stage=2), Span("backward", 11.5, 12.0, 0, stage=2)]
    b += [sent("Activation", 0, 3, 1, 4.0), sent("Gradient", 0, 1, 1, 12.0)]
    own = [Span("forward", 0.0, 1.0, 0), Span("loss", 8.0, 9.0, 0), Span("backward", 14.0, 15.0, 0)]
    return recorded_step(0, 0.0, plan, {0: own, 1: a, 2: b}, {1: SAME_CLOCK, 2: SAME_CLOCK})


def test_the_spans_of_a_worker_with_several_stages_are_those_of_each_stage() -> None:
    step = turns()
    assert [stage.worker for stage in step.stages] == ["coordinator", "a:1", "b:1", "a:1", "a:1"]
    starts = [[span.start_seconds for span in stage.actions] for stage in step.stages]
    assert starts == [[0, 8, 14], [1, 12, 14], [3, 11.5], [5, 10], [6, 9]]
    sends = [[s.message for s in stage.spans if s.kind == "send"] for stage in step.stages]
    assert sends == [
        [],
        ["Activation", "Gradient"],
        ["Activation", "Gradient"],
        ["Gradient"],
        ["Activation"],
    ]
    # What is of no stage is with the worker's first one.
    assert {s.kind for s in step.stages[1].spans} >= {"wait", "optimizer"}
    busy = sum(stage.computing_seconds for stage in step.stages)
    assert step.bubble == pytest.approx(1 - busy / (3 * step.seconds))


def test_a_step_of_several_stages_on_a_worker_is_simulated_as_one_process() -> None:
    step = turns()
    plan = Plan([StagePlan([s.worker], s.layers) for s in step.stages[1:]], 1)
    pipeline = pipeline_of(step, plan)
    assert pipeline is not None
    assert list(pipeline.processes) == [0, 1, 2, 1, 1]
    assert [hop.busy_seconds for hop in pipeline.forward_hops] == [0, 0.5, 0.5, 0, 0.5]
    assert [hop.busy_seconds for hop in pipeline.backward_hops] == [0, 0.5, 0.5, 0.5, 0]
    found = prediction_of(step, plan, None)
    assert found is not None
    assert [len(stage.actions) for stage in found.stages] == [3, 3, 2, 2, 2]
