"""Clocks: the best ping decides, and a drift is followed.

Recorded steps: on one clock, without spans outside the step, with their bubble.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from msgspec.structs import replace

from lightning_hetero.errors import ChannelError
from lightning_hetero.plan import Plan
from lightning_hetero.protocol.fields import ClockSample, Span
from lightning_hetero.telemetry.recorded_step import (
    RecordedStep,
    align,
    name_of,
    pipeline_of,
    prediction_of,
)

from .made_up import (
    COORDINATOR,
    PLAN,
    REPLICAS,
    TURNS,
    WORKER,
    made_up,
    made_up_step,
    turn_by_turn,
    with_replicas,
)


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


def test_each_stage_has_its_own_actions_and_messages() -> None:
    stages = turn_by_turn().stages
    assert [(stage.stage, stage.worker) for stage in stages] == [
        *((0, "coordinator"), (1, "b"), (2, "a"), (3, "b"))
    ]
    for stage in stages[1:]:
        assert [span.kind for span in stage.actions] == ["forward", "backward"]
    # The stage that takes a message, and the process that it is sent to: this may be the
    # coordinator, which forwards it.
    sent = [
        [(s.message, s.stage, s.peer) for s in stage.spans if s.kind == "send"] for stage in stages
    ]
    assert sent[1:] == [
        [("Activation", 2, 1), ("Gradient", 0, 0)],
        [("Activation", 3, 0), ("Gradient", 1, 2)],
        [("Activation", 0, 0), ("Gradient", 2, 1)],
    ]
    assert sent[0] == [("Activation", 1, 2), ("Activation", 3, 2), ("Gradient", 3, 2)]


def test_the_times_of_each_hop_are_those_of_its_stages() -> None:
    pipeline = pipeline_of(turn_by_turn(), TURNS)
    assert pipeline is not None
    assert [hop.busy_seconds for hop in pipeline.forward_hops] == [1.0, 1.0, 2.0, 1.0]
    assert [hop.busy_seconds for hop in pipeline.backward_hops] == [1.0, 1.0, 1.0, 1.0]
    assert [stage.forward_seconds for stage in pipeline.stages] == [1.0] * 4
    # Numbered by the plan, in which `b` comes first.
    assert list(pipeline.processes) == [0, 1, 2, 1]


def test_replicas_are_predicted_with_their_own_times() -> None:
    """A micro-batch of `a` takes 1 + 2 s, one of `b` 3 + 4 s; everything else takes a second."""
    step = with_replicas()
    assert [(each.stage, each.worker) for each in step.stages] == [
        *((0, "coordinator"), (1, "a"), (1, "b"))
    ]
    pipeline = pipeline_of(step, REPLICAS)
    assert pipeline is not None
    assert pipeline.replicas is not None
    assert pipeline.replicas.shares == [1, 2, 1]
    assert [each.forward_seconds for each in pipeline.stages] == [1.0, 1.0, 3.0]
    there, back = pipeline.hops
    assert {ends: hop.busy_seconds for ends, hop in there.items()} == {
        **{(0, 1): 1.0, (0, 2): 1.0, (1, 0): 1.0, (2, 0): 1.0}
    }
    assert {*back} == {(1, 0), (2, 0), (0, 1), (0, 2)}
    found = prediction_of(step, REPLICAS, None)
    assert found is not None
    names = [sorted(name_of(span) for span in each.actions) for each in found.processes]
    assert names[1:] == [["1B0", "1B2", "1F0", "1F2"], ["1B1", "1F1"]]
    assert len(names[0]) == 9
    seconds = [each.computing_seconds for each in found.processes]
    assert seconds == pytest.approx([9.0, 6.0, 7.0])


def test_a_step_without_the_record_of_a_process_is_not_predicted() -> None:
    """The process was lost, or the plan is of another step."""
    step = turn_by_turn()
    without = dataclasses.replace(step, processes=step.processes[:-1])
    assert pipeline_of(without, TURNS) is None
    assert prediction_of(without, TURNS, None) is None


def window(waits: bool) -> RecordedStep:
    """Two batches of one micro-batch; the first loss goes backward in the second batch."""
    here = [Span("forward", 0, 2, 0), Span("loss", 6, 7 if waits else 9, 0)]
    here += [Span("forward", 9, 11, 1), *([Span("backward", 11, 13, 0, visit=1)] * waits)]
    here += [Span("loss", 15, 18, 1), Span("backward", 20, 24, 0), Span("backward", 24, 28, 1)]
    away = [
        Span(kind, 3 + n, 4 + n, n, stage=1) for n in (0, 1) for kind in ("forward", "backward")
    ]
    return dataclasses.replace(made_up({0: here, 1: away}), num_batches=2)


@pytest.mark.parametrize("waits", [False, True])
def test_a_window_is_predicted_as_one_pipeline_of_its_batches(waits: bool) -> None:
    step = window(waits)
    pipeline = pipeline_of(step, PLAN)
    assert pipeline is not None
    assert (pipeline.num_microbatches, pipeline.num_batches) == (2, 2)
    assert (pipeline.loss_seconds, pipeline.loss_waits) == (3.0, waits)
    assert pipeline.loss_backward_seconds == 2.0 * waits
    assert pipeline.stages[0].backward_seconds == 4.0
    found = prediction_of(step, PLAN, None)
    assert found is not None
    recorded, predicted = (
        sorted(map(name_of, each.processes[0].actions)) for each in (step, found)
    )
    assert predicted == recorded
    assert pipeline_of(dataclasses.replace(step, num_batches=3), PLAN) is None


def test_without_a_profile_a_coordinator_that_is_a_replica_is_not_predicted() -> None:
    hosted = dataclasses.replace(REPLICAS.stages[1], workers=["a", "coordinator"])
    assert pipeline_of(with_replicas(), Plan([REPLICAS.stages[0], hosted], 3)) is None


def test_a_worker_with_several_stages_is_predicted_as_one_process() -> None:
    found = prediction_of(turn_by_turn(), TURNS, None)
    assert found is not None
    assert found.seconds == pytest.approx(18.0)
    assert [each.name for each in found.processes] == ["coordinator", "a", "b"]
    names = [[name_of(span) for span in each.actions] for each in found.processes]
    assert names == [["0F0", "0L0", "0B0"], ["2F0", "2B0"], ["1F0", "3F0", "3B0", "1B0"]]
