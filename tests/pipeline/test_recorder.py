"""The recorder's sums and spans, on a clock that the tests move."""

from __future__ import annotations

import pytest
import torch

from lightning_hetero.pipeline.recorder import APPLY, MOST_SPANS, ActionKind, Recorder
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.protocol.fields import Span, SpanKind


class Stage:
    """A recorded stage whose time passes when it is told so."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.recorder = Recorder(torch.device("cpu"), clock=lambda: self.seconds)

    def spend(self, kind: SpanKind, seconds: float, message: str = "") -> None:
        with self.recorder.span(kind, Key(0), message):
            self.seconds += seconds

    def act(self, kind: ActionKind, seconds: float, num_ready: int = 0) -> None:
        with self.recorder.action(kind, Key(0), num_ready):
            self.seconds += seconds

    def begin(self, is_training: bool = True) -> None:
        self.recorder.begin_step()
        if is_training:
            self.recorder.note_training(7)


@pytest.fixture
def stage() -> Stage:
    found = Stage()
    found.recorder.switch(is_on=True, keeps_spans=True)
    return found


def test_a_step_is_the_sum_of_what_was_done_in_it(stage: Stage) -> None:
    stage.begin()
    stage.spend("wait", 1.0)
    stage.spend("forward", 2.0)
    stage.spend("optimizer", 0.5, APPLY)
    totals, spans, dropped = stage.recorder.record(with_spans=True)
    assert totals.seconds == {"wait": 1.0, "forward": 2.0, "optimizer": 0.5}
    assert totals.step_seconds == 3.5
    assert (totals.num_steps, totals.num_microbatches, totals.num_tokens) == (1, 1, 7)
    assert [span.kind for span in spans] == ["wait", "forward", "optimizer"]
    assert (spans[1].start_seconds, spans[1].end_seconds) == (101.0, 103.0)
    assert dropped == 0
    assert stage.recorder.record(with_spans=True)[1] == []


def test_what_is_inside_is_counted_once(stage: Stage) -> None:
    stage.begin()
    with stage.recorder.span("forward", Key(0)):
        stage.seconds += 1.0
        stage.spend("pack", 0.25)
    totals, _, _ = stage.recorder.record(with_spans=False)
    assert totals.seconds == {"forward": 1.0, "pack": 0.25}
    assert totals.step_seconds == 1.25


def test_waiting_for_the_next_step_does_not_belong_to_this_one(stage: Stage) -> None:
    for _ in range(2):
        stage.begin()
        stage.spend("forward", 1.0)
        stage.spend("optimizer", 1.0, APPLY)
        stage.spend("wait", 50.0)
    totals, _, _ = stage.recorder.record(with_spans=False)
    assert totals.step_seconds == 4.0
    assert "wait" not in totals.seconds


def test_waiting_between_two_optimizers_belongs_to_the_step(stage: Stage) -> None:
    stage.begin()
    stage.spend("optimizer", 1.0, APPLY)
    stage.spend("wait", 5.0)
    stage.spend("optimizer", 1.0, APPLY)
    totals, _, _ = stage.recorder.record(with_spans=False)
    assert (totals.step_seconds, totals.num_steps) == (7.0, 2)
    assert totals.seconds == {"optimizer": 2.0, "wait": 5.0}


def test_steps_that_train_nothing_do_not_count(stage: Stage) -> None:
    stage.begin(is_training=False)
    stage.spend("forward", 1.0)
    stage.begin()
    stage.spend("forward", 2.0)
    stage.begin(is_training=False)
    totals, _, _ = stage.recorder.record(with_spans=False)
    assert (totals.step_seconds, totals.seconds) == (2.0, {"forward": 2.0})


def test_what_raises_is_not_recorded_and_harms_nothing(stage: Stage) -> None:
    def fail() -> None:
        with stage.recorder.span("forward", Key(0)):
            stage.spend("pack", 1.0)
            raise ValueError("wrong")

    stage.begin()
    with pytest.raises(ValueError, match="wrong"):
        fail()
    stage.begin()
    stage.spend("forward", 2.0)
    totals, _, _ = stage.recorder.record(with_spans=False)
    assert totals.seconds["forward"] == 2.0


def test_what_is_sent_counts_apart(stage: Stage) -> None:
    stage.begin()
    stage.seconds += 2.0
    stage.recorder.note_sent(1, Key(3), "Activation", 640, start_seconds=101.0, stage=2)
    stage.spend("forward", 1.0)
    totals, spans, _ = stage.recorder.record(with_spans=True)
    assert (totals.sent_bytes, totals.sending_seconds) == (640, 1.0)
    assert "send" not in totals.seconds
    assert Span("send", 101.0, 102.0, 3, 0, "Activation", 640, 1, stage=2) in spans


def test_what_replicas_exchange_is_sent_in_a_step_and_counted_where_it_is_taken(
    stage: Stage,
) -> None:
    stage.begin()
    stage.spend("forward", 1.0)
    with stage.recorder.span("optimizer", message="ReplicaTensors", num_bytes=300, peer=2):
        stage.seconds += 1.0
    stage.recorder.note_sent(2, None, "ReplicaTensors", 500, start_seconds=101.0, stage=0)
    totals, spans, _ = stage.recorder.record(with_spans=True)
    assert (totals.from_replicas_bytes, totals.sent_bytes) == (300, 500)
    assert (totals.received_bytes, totals.seconds["optimizer"]) == (0, 1.0)
    assert [span.microbatch for span in spans if span.kind == "send"] == [None]


def test_switched_off_it_costs_nothing_and_keeps_its_sums(stage: Stage) -> None:
    stage.begin()
    stage.spend("forward", 1.0)
    stage.recorder.switch(is_on=False, keeps_spans=False)
    stage.begin()
    assert stage.recorder.span("forward") is Recorder.nothing
    totals, spans, _ = stage.recorder.record(with_spans=True)
    assert (totals.step_seconds, spans) == (1.0, [])


@pytest.mark.parametrize("is_on", [False, True])
def test_actions_are_summed_up_by_kind_whether_spans_are_recorded_or_not(is_on: bool) -> None:
    stage = Stage()
    stage.recorder.switch(is_on, keeps_spans=False)
    stage.begin()
    for _ in range(3):
        stage.act("forward", 2.0)
    stage.spend("forward", 50.0)  # of an evaluation: no action of the stage's own
    with pytest.raises(ValueError, match="wrong"), stage.recorder.action("backward", Key(0)):
        raise ValueError("wrong")
    laps = stage.recorder.take_laps()
    assert (laps.counts["forward"], laps.counts["backward"]) == (3, 0)
    assert laps.seconds == {"forward": 6.0}
    assert stage.recorder.take_laps().counts["forward"] == 0


def test_training_time_runs_from_the_first_action(stage: Stage) -> None:
    stage.seconds += 100.0
    stage.recorder.take_laps()
    assert stage.recorder.training_seconds == 0
    stage.act("forward", 2.0)
    stage.seconds += 1.0
    stage.act("backward", 3.0)
    stage.recorder.take_laps()
    assert (stage.recorder.training_seconds, stage.recorder.busy_seconds) == (6.0, 5.0)


def test_an_action_is_a_span_too_and_a_choice(stage: Stage) -> None:
    stage.begin()
    stage.act("loss", 2.0, num_ready=3)
    totals, [span], _ = stage.recorder.record(with_spans=True)
    assert (span.kind, span.microbatch, totals.seconds) == ("loss", 0, {"loss": 2.0})
    assert (totals.num_ready, totals.num_choices) == (3, 1)


def test_many_actions_are_summed_up_before_they_are_asked_for() -> None:
    stage = Stage()
    for _ in range(5000):
        stage.act("forward", 1.0)
    assert stage.recorder.take_laps().counts["forward"] == 5000


def test_no_more_spans_are_kept_than_fit_into_a_message(stage: Stage) -> None:
    stage.begin()
    for _ in range(MOST_SPANS + 5):
        stage.spend("wait", 0.0)
    _, spans, dropped = stage.recorder.record(with_spans=True)
    assert (len(spans), dropped) == (MOST_SPANS, 5)
