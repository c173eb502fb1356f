"""Recorded steps as a Chrome trace, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from ..protocol.fields import ACTIONS, Span
from .step import Prediction, RecordedStep, StageSpans

FORMAT = "lightning-hetero timeline 1"
PREDICTED = 1000
"""Add this to a stage's number to get the process id that shows its predicted actions."""

_COMPUTES, _HANDLES, _SENDS = 1, 2, 3
_TRACKS = {_COMPUTES: "computes", _HANDLES: "waits, takes, packs"}

Event = dict[str, Any]
StepAndPrediction = tuple[RecordedStep, Prediction | None]


def trace_of(steps: Sequence[StepAndPrediction]) -> dict[str, Any]:
    """The trace as a JSON object. Times are microseconds since the first step started."""
    if not steps:
        return {"displayTimeUnit": "ms", "traceEvents": [], "otherData": {"format": FORMAT}}
    writer = _Writer(steps[0][0].start_seconds)
    events = [*_names(steps)]
    for step, prediction in steps:
        events += writer.events(step)
        if prediction is not None:
            events += writer.predicted(step, prediction)
    other = {
        "format": FORMAT,
        "stages": [_stage(stage) for stage in steps[-1][0].stages],
        "steps": [writer.summary(*each) for each in steps],
    }
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": other}


class _Writer:
    """Turns steps into events whose times are microseconds since a given moment."""

    def __init__(self, zero_seconds: float) -> None:
        self._zero = zero_seconds
        self._flows = count(1)

    def events(self, step: RecordedStep) -> Iterator[Event]:
        for stage in step.stages:
            for span in stage.spans:
                yield self._slice(step, stage, span)
        for stage in step.stages:
            for span in stage.spans:
                yield from self._flow(step, stage, span)

    def predicted(self, step: RecordedStep, prediction: Prediction) -> Iterator[Event]:
        start = step.first_action_seconds
        for stage in prediction.stages:
            for span in stage.spans:
                yield {
                    "ph": "X",
                    "cat": "predicted",
                    "name": stage.name_of(span),
                    "pid": PREDICTED + stage.stage,
                    "tid": _COMPUTES,
                    "ts": self._micro(start + span.start_seconds),
                    "dur": 1e6 * (span.end_seconds - span.start_seconds),
                    "args": {"step": step.step, "kind": span.kind},
                }

    def summary(self, step: RecordedStep, prediction: Prediction | None) -> dict[str, Any]:
        found: dict[str, Any] = {
            "step": step.step,
            "start_us": self._micro(step.start_seconds),
            "end_us": self._micro(step.end_seconds),
            "bubble_share": step.bubble,
            "num_dropped": step.num_dropped,
            "stages": [_shares(stage) for stage in step.stages],
        }
        if prediction is not None:
            found["predicted"] = {
                "source": prediction.source,
                "seconds": prediction.seconds,
                "bubble_share": prediction.bubble,
            }
        return found

    def _slice(self, step: RecordedStep, stage: StageSpans, span: Span) -> Event:
        category, track, name = _shown(stage, span)
        args: dict[str, Any] = {"step": step.step}
        if category == "action":
            args["kind"] = span.kind
        if span.microbatch is not None:
            args |= {"microbatch": span.microbatch, "visit": span.visit}
        if span.num_bytes:
            args["bytes"] = span.num_bytes
        if span.peer is not None:
            args["to" if span.kind == "send" else "from"] = span.peer
        if span.arrived_seconds is not None:
            args["arrived_us"] = self._micro(span.arrived_seconds)
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": stage.stage,
            "tid": track + (span.peer or 0) if category == "send" else track,
            "ts": self._micro(span.start_seconds),
            "dur": 1e6 * (span.end_seconds - span.start_seconds),
            "args": args,
        }

    def _flow(self, step: RecordedStep, stage: StageSpans, span: Span) -> Iterator[Event]:
        """An arrow from a sent tensor to the action that used it."""
        target = _receiving_action(step, stage.stage, span)
        if target is None:
            return
        receiver, action = target
        shared = {"cat": "flow", "name": span.message, "id": next(self._flows)}
        start = {"pid": stage.stage, "tid": _SENDS + (span.peer or 0)}
        yield {"ph": "s", **shared, **start, "ts": self._micro(span.start_seconds)}
        end = {"pid": receiver, "tid": _COMPUTES, "ts": self._micro(action.start_seconds)}
        yield {"ph": "f", "bp": "e", **shared, **end}

    def _micro(self, seconds: float) -> float:
        return 1e6 * (seconds - self._zero)


def _shown(stage: StageSpans, span: Span) -> tuple[str, int, str]:
    """Category, track and name."""
    if span.kind in ACTIONS:
        return "action", _COMPUTES, stage.name_of(span)
    number = "" if span.microbatch is None else f" {span.microbatch}"
    if span.kind == "send":
        return "send", _SENDS, f"{span.message}{number}"
    if span.kind == "wait":
        return "wait", _HANDLES, f"waits for {_awaited(stage, span)}"
    return "transfer", _HANDLES, f"{span.kind}s {span.message}{number}"


def _awaited(stage: StageSpans, wait: Span) -> str:
    """The name of the first action after the wait."""
    after = (stage.name_of(s) for s in stage.actions if s.start_seconds >= wait.end_seconds)
    return next(after, "the next step")


def _receiving_action(step: RecordedStep, sender: int, sent: Span) -> tuple[int, Span] | None:
    if sent.kind != "send" or sent.peer is None or sent.message not in ("Activation", "Gradient"):
        return None
    if sent.peer >= len(step.stages):
        return None
    # What the coordinator forwards is drawn as the coordinator's own message to the next stage.
    ends_at_coordinator = sender == (len(step.stages) - 1 if sent.message == "Activation" else 1)
    if sender and sent.peer == 0 and not ends_at_coordinator:
        return None
    forward = "loss" if sent.peer == 0 else "forward"
    kind = forward if sent.message == "Activation" else "backward"
    wanted = kind, sent.microbatch, sent.visit
    for action in step.stages[sent.peer].actions:
        found = action.kind, action.microbatch, action.visit
        if found == wanted and action.start_seconds >= sent.start_seconds:
            return sent.peer, action
    return None


def _names(steps: Sequence[StepAndPrediction]) -> Iterator[Event]:
    stages = steps[-1][0].stages
    is_predicted = any(prediction is not None for _, prediction in steps)
    for stage in stages:
        shown = [(stage.stage, f"stage {stage.stage}: {stage.worker}")]
        if is_predicted:
            shown.append((PREDICTED + stage.stage, f"predicted stage {stage.stage}"))
        for pid, name in shown:
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        peers = (other.stage for other in stages if other.stage != stage.stage)
        sends = {_SENDS + peer: f"sends to stage {peer}" for peer in peers}
        for tid, name in {**_TRACKS, **sends}.items():
            args = {"name": name}
            yield {"ph": "M", "name": "thread_name", "pid": stage.stage, "tid": tid, "args": args}


def _stage(stage: StageSpans) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "worker": stage.worker,
        "layers": list(stage.layers),
        "clock_offset_seconds": stage.clock.knots[-1].offset_seconds,
        "clock_error_seconds": stage.clock.error_seconds,
    }


def _shares(stage: StageSpans) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "busy_us": 1e6 * stage.computing_seconds,
        "waiting_us": 1e6 * stage.seconds("wait"),
        "transferring_us": 1e6 * stage.seconds("take", "pack"),
        "sent_bytes": sum(span.num_bytes for span in stage.spans if span.kind == "send"),
    }
