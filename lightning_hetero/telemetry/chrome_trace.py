"""Recorded steps as a Chrome trace, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from ..pipeline.placement import COORDINATOR_STAGE
from ..protocol.fields import ACTIONS, Span
from .ranges import stages_as_text
from .step import Prediction, ProcessSpans, RecordedStep, name_of

FORMAT = "lightning-hetero timeline 2"
PREDICTED = 1000
"""Add this to the number of a process to get the process id that shows its predicted actions."""

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
        "processes": [_process(process) for process in steps[-1][0].processes],
        "steps": [writer.summary(*each) for each in steps],
    }
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": other}


class _Writer:
    """Turns steps into events whose times are microseconds since a given moment."""

    def __init__(self, zero_seconds: float) -> None:
        self._zero = zero_seconds
        self._flows = count(1)

    def events(self, step: RecordedStep) -> Iterator[Event]:
        for process in step.processes:
            for span in process.spans:
                yield self._slice(step, process, span)
        for process in step.processes:
            for span in process.spans:
                yield from self._flow(step, process, span)

    def predicted(self, step: RecordedStep, prediction: Prediction) -> Iterator[Event]:
        start = step.first_action_seconds
        for process in prediction.processes:
            for span in process.spans:
                yield {
                    "ph": "X",
                    "cat": "predicted",
                    "name": name_of(span),
                    "pid": PREDICTED + process.number,
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
            "processes": [_shares(process) for process in step.processes],
        }
        if prediction is not None:
            found["predicted"] = {
                "source": prediction.source,
                "seconds": prediction.seconds,
                "bubble_share": prediction.bubble,
            }
        return found

    def _slice(self, step: RecordedStep, process: ProcessSpans, span: Span) -> Event:
        category, track, name = _shown(process, span)
        args: dict[str, Any] = {"step": step.step}
        if category == "action":
            args |= {"kind": span.kind, "stage": span.stage}
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
            "pid": process.number,
            "tid": track + (span.peer or 0) if category == "send" else track,
            "ts": self._micro(span.start_seconds),
            "dur": 1e6 * (span.end_seconds - span.start_seconds),
            "args": args,
        }

    def _flow(self, step: RecordedStep, process: ProcessSpans, span: Span) -> Iterator[Event]:
        """An arrow from a sent tensor to the action that used it."""
        action = _receiving_action(step, span)
        if action is None or span.peer is None:
            return
        shared = {"cat": "flow", "name": span.message, "id": next(self._flows)}
        start = {"pid": process.number, "tid": _SENDS + span.peer}
        yield {"ph": "s", **shared, **start, "ts": self._micro(span.start_seconds)}
        end = {"pid": span.peer, "tid": _COMPUTES, "ts": self._micro(action.start_seconds)}
        yield {"ph": "f", "bp": "e", **shared, **end}

    def _micro(self, seconds: float) -> float:
        return 1e6 * (seconds - self._zero)


def _shown(process: ProcessSpans, span: Span) -> tuple[str, int, str]:
    """Category, track and name."""
    if span.kind in ACTIONS:
        return "action", _COMPUTES, name_of(span)
    number = "" if span.microbatch is None else f" {span.microbatch}"
    if span.kind == "send":
        return "send", _SENDS, f"{span.message}{number}"
    if span.kind == "wait":
        return "wait", _HANDLES, f"waits for {_awaited(process, span)}"
    return "transfer", _HANDLES, f"{span.kind}s {span.message}{number}"


def _awaited(process: ProcessSpans, wait: Span) -> str:
    """The name of the first action after the wait."""
    after = (name_of(s) for s in process.actions if s.start_seconds >= wait.end_seconds)
    return next(after, "the next step")


def _receiving_action(step: RecordedStep, sent: Span) -> Span | None:
    """The action that used a sent tensor, in the process that it was sent to."""
    if sent.kind != "send" or sent.message not in ("Activation", "Gradient"):
        return None
    # The coordinator forwards it: an arrow leaves with the coordinator's own message.
    if sent.peer == 0 and sent.stage != COORDINATOR_STAGE:
        return None
    forward = "loss" if sent.stage == COORDINATOR_STAGE else "forward"
    kind = forward if sent.message == "Activation" else "backward"
    wanted = kind, sent.stage, sent.microbatch, sent.visit
    actions = (a for each in step.processes if each.number == sent.peer for a in each.actions)
    for action in actions:
        found = action.kind, action.stage, action.microbatch, action.visit
        if found == wanted and action.start_seconds >= sent.start_seconds:
            return action
    return None


def _names(steps: Sequence[StepAndPrediction]) -> Iterator[Event]:
    """Names of the processes and of their tracks, as of each process's last recorded step."""
    processes = {each.number: each for step, _ in steps for each in step.processes}
    is_predicted = any(prediction is not None for _, prediction in steps)
    for process in processes.values():
        shown = [(process.number, f"{process.name} ({stages_as_text(process.ranges)})")]
        if is_predicted:
            shown.append((PREDICTED + process.number, f"predicted: {process.name}"))
        for pid, name in shown:
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        peers = (other for other in processes.values() if other.number != process.number)
        sends = {_SENDS + peer.number: f"sends to {peer.name}" for peer in peers}
        for tid, name in {**_TRACKS, **sends}.items():
            args, pid = {"name": name}, process.number
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": args}


def _process(process: ProcessSpans) -> dict[str, Any]:
    return {
        "process": process.number,
        "name": process.name,
        "ranges": [{"stage": each.stage, "layers": [*each.layers]} for each in process.ranges],
        "clock_offset_seconds": process.clock.knots[-1].offset_seconds,
        "clock_error_seconds": process.clock.error_seconds,
    }


def _shares(process: ProcessSpans) -> dict[str, Any]:
    return {
        "process": process.number,
        "busy_us": 1e6 * process.computing_seconds,
        "waiting_us": 1e6 * process.seconds("wait"),
        "transferring_us": 1e6 * process.seconds("take", "pack"),
        "sent_bytes": sum(span.num_bytes for span in process.spans if span.kind == "send"),
    }
