"""The simulator's prediction of a recorded step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import PlanError
from ..plan import Plan
from ..planner.candidates import Costs
from ..planner.feasibility import candidate_of
from ..planner.profile import Profile
from ..planner.search import speeds_of
from ..planner.simulation import (
    LOSS,
    Hop,
    Pipeline,
    Simulation,
    Speed,
    StageTimes,
    least_bottleneck,
    predict,
)
from ..planner.simulation import Span as Played
from ..protocol.fields import SpanKind
from .step import RecordedStep, StageSpans

Source = Literal["profile", "this step's own times"]


@dataclass(frozen=True)
class PredictedSpan:
    """A predicted action. Seconds count from the start of the first action."""

    stage: int
    kind: SpanKind
    name: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Prediction:
    """A step as the simulator predicts it.

    Args:
        source: The times that the simulator used: the profile that was measured before the run,
            or, without a profile, the mean times of the recorded step itself. Means do not show
            why the times of one step differ.
        seconds: The duration of the step.
        bubble: The idle share of all stages' time.
        spans: All actions, including the optimizer's steps.
    """

    source: Source
    seconds: float
    bubble: float
    spans: Sequence[PredictedSpan]


def prediction_of(step: RecordedStep, plan: Plan, profile: Profile | None) -> Prediction | None:
    """The prediction of a step.

    It is None for steps that the simulator does not know: a micro-batch passes through the stages
    several times, or the batch is cut at the boundary only.
    """
    if profile is not None:
        try:
            candidate = candidate_of(plan, profile)
        except PlanError:
            pass
        else:
            return _prediction("profile", candidate.pipeline, candidate.simulation)
    pipeline = pipeline_of(step, plan)
    if pipeline is None:
        return None
    return _prediction("this step's own times", pipeline, predict(pipeline))


def bound_seconds(plan: Plan, profile: Profile) -> float:
    """The duration of the step if the speeds of all measured devices added up."""
    costs = Costs(profile, {})
    speeds = speeds_of(costs, profile.workers, plan.micro_batches)
    endless = [Speed(speed.layer_seconds, speed.fixed_seconds) for speed in speeds]
    return plan.micro_batches * least_bottleneck(endless, len(profile.model.layers))


def pipeline_of(step: RecordedStep, plan: Plan) -> Pipeline | None:
    """The pipeline whose times are the mean times of the step; None if it cannot be simulated."""
    first = step.stages[0]
    count = _count(first, "forward")
    is_plain = all(not span.visit for stage in step.stages for span in stage.actions)
    if len(step.stages) < 2 or not is_plain or not 0 < count == _count(first, "loss"):
        return None
    last = len(step.stages) - 1
    return Pipeline(
        [_times(stage) for stage in step.stages],
        _mean(first, "loss"),
        [_hop(stage, 0 if stage.stage == last else stage.stage + 1) for stage in step.stages],
        [_hop(stage, (stage.stage or last + 1) - 1) for stage in step.stages],
        count,
        min(plan.max_in_flight, count),
        plan.starts_on_worker,
    )


def _times(stage: StageSpans) -> StageTimes:
    return StageTimes(_mean(stage, "forward"), _mean(stage, "backward"), stage.seconds("optimizer"))


def _mean(stage: StageSpans, kind: SpanKind) -> float:
    found = [s.end_seconds - s.start_seconds for s in stage.spans if s.kind == kind]
    return statistics.fmean(found) if found else 0.0


def _count(stage: StageSpans, kind: SpanKind) -> int:
    return sum(span.kind == kind for span in stage.spans)


def _hop(stage: StageSpans, peer: int) -> Hop:
    sends = [
        span.end_seconds - span.start_seconds
        for span in stage.spans
        if span.kind == "send" and span.peer == peer and span.message != "Arguments"
    ]
    return Hop(f"{stage.stage} to {peer}", statistics.fmean(sends) if sends else 0.0)


def _prediction(source: Source, pipeline: Pipeline, played: Simulation) -> Prediction:
    spans = [_span(span) for span in played.spans]
    end = max((span.end_seconds for span in spans), default=0.0)
    spans += [
        PredictedSpan(index, "optimizer", "optimizer", end, end + times.optimizer_seconds)
        for index, times in enumerate(pipeline.stages)
        if times.optimizer_seconds > 0
    ]
    return Prediction(source, played.step_seconds, played.bubble, spans)


def _span(played: Played) -> PredictedSpan:
    action = played.action
    kind: SpanKind = "backward" if action.kind == "B" else "forward"
    if action.stage_index == 0 and action.key.visit == LOSS:
        kind = "loss"
    letter = {"backward": "B", "forward": "F", "loss": "L"}[kind]
    name = f"{action.stage_index}{letter}{action.key.microbatch}"
    return PredictedSpan(action.stage_index, kind, name, played.start_seconds, played.end_seconds)
