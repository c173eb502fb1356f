"""A step of two stages on one clock, made up."""

from __future__ import annotations

from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.protocol.fields import Span, SpanKind
from lightning_hetero.telemetry.step import SAME_CLOCK, RecordedStep, StageSpans, recorded_step

PLAN = Plan([StagePlan(["coordinator"], (0, 1)), StagePlan(["a"], (1, 3))], micro_batches=1)

# In milliseconds: kind, start, end, micro-batch.
COORDINATOR = [
    Span("forward", 1, 3, 0),
    Span("send", 3, 4, 0, 0, "Activation", 100, 1),
    Span("wait", 3, 8),
    Span("loss", 8, 12, 0),
    Span("send", 12, 13, 0, 0, "Gradient", 100, 1),
    Span("wait", 12, 17),
    Span("backward", 17, 19, 0),
    Span("optimizer", 19, 20, message="ApplyOptimizer"),
]
WORKER = [
    Span("wait", -5, 4),
    Span("take", 4, 5, 0, 0, "Activation", 100, 0, 4),
    Span("forward", 5, 7, 0),
    Span("send", 7, 8, 0, 0, "Activation", 100, 0),
    Span("wait", 7, 13),
    Span("backward", 13, 16, 0),
    Span("send", 16, 17, 0, 0, "Gradient", 100, 0),
    Span("wait", 16, 20),
    Span("optimizer", 20, 21, message="ApplyOptimizer"),
    Span("wait", 21, 40),
]


def made_up_step() -> RecordedStep:
    return recorded_step(4, 0.0, PLAN, {0: COORDINATOR, 1: WORKER}, {1: SAME_CLOCK})


def staggered_step(num_stages: int, num_microbatches: int, seconds: float) -> RecordedStep:
    """A step of many stages with long names, in which everything takes ever longer."""
    count = num_microbatches + num_stages
    ends = [seconds * (n / count) ** 2 for n in range(count + 1)]
    stages = []
    for stage in range(num_stages):
        worker = f"WWW{stage}.laboratory.example.org:9999" if stage else "coordinator"
        spans = []
        for number in range(num_microbatches):
            start, end = ends[stage + number : stage + number + 2]
            middle = (start + end) / 2
            kind: SpanKind = "backward" if stage else "loss"
            spans += [Span("forward", start, middle, number), Span(kind, middle, end, number)]
        stages.append(StageSpans(stage, worker, (stage, stage + 1), spans))
    return RecordedStep(1234567, 0.0, stages)
