"""Steps of a line and of turn by turn on one clock, made up."""

from __future__ import annotations

import dataclasses

from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.protocol.fields import Span, SpanKind
from lightning_hetero.telemetry.layer_ranges import Range
from lightning_hetero.telemetry.recorded_step import (
    SAME_CLOCK,
    Absence,
    ClockMap,
    Prediction,
    ProcessSpans,
    RecordedStep,
    recorded_step,
)

PLAN = Plan([StagePlan(["coordinator"], (0, 1)), StagePlan(["a"], (1, 3))], micro_batches=1)

# In milliseconds: kind, start, end, micro-batch.
COORDINATOR = [
    Span("forward", 1, 3, 0),
    Span("send", 3, 4, 0, 0, "Activation", 100, 1, stage=1),
    Span("wait", 3, 8),
    Span("loss", 8, 12, 0),
    Span("send", 12, 13, 0, 0, "Gradient", 100, 1, stage=1),
    Span("wait", 12, 17),
    Span("backward", 17, 19, 0),
    Span("optimizer", 19, 20, message="ApplyOptimizer"),
]
WORKER = [
    Span("wait", -5, 4),
    Span("take", 4, 5, 0, 0, "Activation", 100, 0, 4, stage=1),
    Span("forward", 5, 7, 0, stage=1),
    Span("send", 7, 8, 0, 0, "Activation", 100, 0),
    Span("wait", 7, 13),
    Span("backward", 13, 16, 0, stage=1),
    Span("send", 16, 17, 0, 0, "Gradient", 100, 0),
    Span("wait", 16, 20),
    Span("optimizer", 20, 21, message="ApplyOptimizer"),
    Span("wait", 21, 40),
]


def made_up_step() -> RecordedStep:
    return made_up({0: COORDINATOR, 1: WORKER})


def made_up(spans: dict[int, list[Span]], clock: ClockMap = SAME_CLOCK) -> RecordedStep:
    return recorded_step(4, 0.0, PLAN, {0: "coordinator", 1: "a"}, spans, {1: clock})


# Turn by turn, the coordinator at both ends, and `b` has kept its number after a move. The
# activations from `a` to `b` go over the coordinator, because the two cannot reach each other.
TURNS = Plan(
    [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan(["b"], (1, 3)),
        StagePlan(["a"], (3, 4)),
        StagePlan(["b"], (4, 5)),
        StagePlan(["coordinator"], (5, 6)),
    ],
    micro_batches=1,
)
NAMES = {0: "coordinator", 1: "a", 2: "b"}


def turn_by_turn() -> RecordedStep:
    """One micro-batch, in which each forward, backward and message takes a second."""
    way = [0, 2, 1, 2, 0]
    spans: dict[int, list[Span]] = {number: [] for number in NAMES}
    now = 1.0

    def compute(kind: SpanKind, stage: int) -> None:
        nonlocal now
        spans[way[stage]].append(Span(kind, now, now + 1, 0, stage=stage))
        now += 1

    def send(message: str, source: int, target: int, stage: int) -> None:
        nonlocal now
        spans[source].append(Span("send", now, now + 1, 0, 0, message, 100, target, stage=stage))
        now += 1

    for stage in range(4):
        compute("forward", stage)
        target, taken_by = way[stage + 1], (stage + 1) % 4
        if (way[stage], target) == (1, 2):
            send("Activation", 1, 0, taken_by)
            send("Activation", 0, 2, taken_by)
        else:
            send("Activation", way[stage], target, taken_by)
    compute("loss", 0)
    for stage in (3, 2, 1, 0):
        send("Gradient", way[stage + 1], way[stage], stage)
        compute("backward", stage)
    return recorded_step(4, 0.0, TURNS, NAMES, spans, {1: SAME_CLOCK, 2: SAME_CLOCK})


def staggered_step(num_stages: int, num_microbatches: int, seconds: float) -> RecordedStep:
    """A step of many stages with long names, in which everything takes ever longer."""
    count = num_microbatches + num_stages
    ends = [seconds * (n / count) ** 2 for n in range(count + 1)]
    processes = []
    for stage in range(num_stages):
        name = f"WWW{stage}.laboratory.example.org:9999" if stage else "coordinator"
        spans = []
        for number in range(num_microbatches):
            start, end = ends[stage + number : stage + number + 2]
            middle = (start + end) / 2
            kind: SpanKind = "backward" if stage else "loss"
            spans += [Span("forward", start, middle, number, stage=stage)]
            spans += [Span(kind, middle, end, number, stage=stage)]
        ranges = [Range(stage, (stage, stage + 1))]
        processes.append(ProcessSpans(stage, name, ranges, spans))
    return RecordedStep(1234567, 0.0, processes)


def with_loss() -> RecordedStep:
    """The made-up step, in which `a` was lost after its forward and came back before its backward.

    What it repeats hides its forward.
    """
    lost = Absence(1, 7.0, 10.0, 12.5, "It was cut <off>.", "steps 2 to 4")
    before = Absence(1, -9.0, -8.0, -7.0, "It was cut.", "step 1")
    return made_up_step().with_absences([before, lost])


def predicted(step: RecordedStep) -> Prediction:
    """A prediction in which each action takes its recorded time."""
    processes = [dataclasses.replace(each, spans=each.actions) for each in step.processes]
    return Prediction(step.seconds, step.bubble, processes)
