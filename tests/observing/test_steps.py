"""A step as stages tell it: on one clock, cut to itself, with its bubble."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lightning_hetero.observing.alignment import align
from lightning_hetero.observing.steps import recorded_step
from lightning_hetero.protocol.messages import Span
from lightning_hetero.transport.clocks import ClockSample

from .made_up import COORDINATOR, PLAN, WORKER, made_up_step


def test_a_step_ends_with_the_last_action_of_any_stage() -> None:
    step = made_up_step()
    assert (step.end_seconds, step.seconds) == (21.0, 21.0)
    first, second = step.stages[1].spans[0], step.stages[1].spans[-1]
    assert (first.kind, first.start_seconds) == ("wait", 0.0)
    assert second.kind == "optimizer"


def test_the_bubble_is_what_nobody_computes_in() -> None:
    step = made_up_step()
    assert step.stages[0].computing_seconds == 9.0
    assert step.stages[1].computing_seconds == 6.0
    assert step.bubble == pytest.approx(1 - 15 / 42)


def test_the_worker_s_moments_come_on_our_clock() -> None:
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


def test_what_an_action_waits_for_is_not_computing() -> None:
    spans = [Span("forward", 0, 10), Span("wait", 2, 6), Span("pack", 6, 7)]
    step = recorded_step(0, 0.0, PLAN, {0: spans, 1: WORKER}, {1: align([ClockSample(0, 0, 0)])})
    assert step.stages[0].computing_seconds == 5.0
