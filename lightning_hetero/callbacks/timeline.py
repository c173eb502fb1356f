"""PipelineTimeline: the times of every process's work, as a Chrome trace and as a picture.

`trace_of` makes the trace of recorded steps. Perfetto and chrome://tracing open it.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import msgspec
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from .._lightning import MisconfigurationException, pl
from ..coordinator.lost_workers import Loss
from ..coordinator.telemetry import Telemetry
from ..pipeline.placement import COORDINATOR_STAGE
from ..protocol.fields import ACTIONS, Span
from ..report.run_record import PredictedStep, Recorded, RecordedProcess, TimelineStep
from ..report.timeline import chart_of
from ..telemetry.layer_ranges import stages_as_text
from ..telemetry.recorded_step import (
    Absence,
    Prediction,
    ProcessSpans,
    RecordedStep,
    align,
    name_of,
    prediction_of,
    recorded_step,
)
from .monitor import deployment_of, process_names, profile_of, run_folder, warn_of_no_stages

logger = logging.getLogger(__name__)

TRACE_NAME, CHART_NAME = "timeline.json", "timeline.svg"

_WHO = "timeline"

FORMAT = "lightning-hetero timeline 2"
PREDICTED = 1000
"""Add this to the number of a process to get the process id that shows its predicted actions."""

# The receivers of a worker's messages have the tracks from the last number on.
_COMPUTES, _HANDLES, _SENDS = 1, 2, 3
_LOST = 0
_TRACKS = {_COMPUTES: "computes", _HANDLES: "waits, takes, packs"}

Event = dict[str, Any]
StepAndPrediction = tuple[RecordedStep, Prediction | None]


class PipelineTimeline(pl.Callback):
    """Records when every process computed, waited, packed and sent in some training steps.

    ``timeline.json`` is a trace for https://ui.perfetto.dev. It shows all processes on the
    coordinator's clock, and beside each step its prediction by the simulator, if the devices were
    measured before the run. Actions have the number of their stage in their name: ``2F0`` is the
    forward of stage 2 on micro-batch 0. ``timeline.svg`` shows the last recorded step. Both files
    are beside the run's logs and are written after each recorded step. Other steps are not slowed
    down. Workers without layers are left out.

    Args:
        steps: The numbers of the optimizer steps to record; the first step is 0. The first steps
            are slower than later ones, since they allocate memory and fill caches.
        every_n_steps: Also record every step with a multiple of this number, except step 0.
        max_steps: The number of recorded steps in the file; the latest ones are kept.
        dirpath: The folder for the files; by default the folder of the Trainer's logs.

    Raises:
        MisconfigurationException: If a number is out of range.
    """

    def __init__(
        self,
        steps: Sequence[int] = (5,),
        every_n_steps: int | None = None,
        max_steps: int = 10,
        dirpath: str | Path | None = None,
    ) -> None:
        if any(step < 0 for step in steps):
            raise MisconfigurationException(
                f"The steps to record are {list(steps)}; give numbers from 0 on."
            )
        for name, value in (("every_n_steps", every_n_steps), ("max_steps", max_steps)):
            if value is not None and value < 1:
                raise MisconfigurationException(f"{name} is {value}; it must be 1 or more.")
        self._steps = frozenset(steps)
        self._every_n_steps = every_n_steps
        self._dirpath = None if dirpath is None else Path(dirpath)
        self._recorded: deque[StepAndPrediction] = deque(maxlen=max_steps)
        # The step under record, and when it began.
        self._open: tuple[int, float] | None = None
        self._num_batches = 0

    @property
    def recorded(self) -> list[RecordedStep]:
        """The recorded steps of this run."""
        return [step for step, _ in self._recorded]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget the previous run."""
        self._recorded.clear()
        self._open = None
        warn_of_no_stages(trainer, self)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_args: Any, **_kwargs: Any) -> None:
        """Begin to record if this step is one of the chosen ones."""
        self._num_batches += 1
        deployment, step = deployment_of(trainer), trainer.global_step
        if deployment is None or self._open is not None or not self._wants(step):
            return
        telemetry = Telemetry.of(deployment.coordinator)
        telemetry.start_recording(_WHO, keeps_spans=True)
        telemetry.compare_clocks()
        self._open, self._num_batches = (step, telemetry.recorder.now()), 1

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_args: Any, **_kwargs: Any) -> None:
        """Gather the spans of all processes after the optimizer step, and write the files."""
        deployment = deployment_of(trainer)
        if self._open is None or deployment is None or trainer.global_step == self._open[0]:
            return
        opened, self._open = self._open, None
        telemetry, names = Telemetry.of(deployment.coordinator), process_names(deployment)
        telemetry.compare_clocks()
        records = telemetry.records(telemetry.ask_records(with_spans=True))
        clocks = {number: align(found) for number, found in telemetry.clock_samples().items()}
        spans = {number: record.spans for number, record in records.items()}
        dropped = sum(record.num_dropped for record in records.values())
        recorded = recorded_step(
            *opened, deployment.plan, names, spans, clocks, dropped, self._num_batches
        )
        losses = deployment.coordinator.replacements.losses or ()
        recorded = recorded.with_absences(map(_absence, losses))
        telemetry.stop_recording(_WHO)
        prediction = prediction_of(recorded, deployment.plan, profile_of(trainer))
        self._recorded.append((recorded, prediction))
        self._write(run_folder(trainer, self._dirpath))

    def _wants(self, step: int) -> bool:
        every = self._every_n_steps
        return step in self._steps or (every is not None and step > 0 and step % every == 0)

    @rank_zero_only
    def _write(self, folder: Path) -> None:
        """Write the files; a full disk or a lost folder must not end a run."""
        trace = json.dumps(trace_of(list(self._recorded)), allow_nan=False)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / TRACE_NAME).write_text(trace, encoding="utf-8")
            (folder / CHART_NAME).write_text(chart_of(*self._recorded[-1]), encoding="utf-8")
        except OSError as error:
            logger.warning("The timeline of this run is not written: %s", error)


def _absence(loss: Loss) -> Absence:
    end = math.inf if loss.end_seconds is None else loss.end_seconds
    restored = end if loss.restored_seconds is None else loss.restored_seconds
    return Absence(
        loss.worker.number, loss.began_seconds, restored, end, loss.reason, loss.repeated
    )


def trace_of(steps: Sequence[StepAndPrediction]) -> dict[str, Any]:
    """The trace as a JSON object. Times are microseconds since the first step started."""
    writer = _Writer(steps[0][0].start_seconds)
    events = [*_names(steps)]
    for step, prediction in steps:
        events += writer.events(step)
        if prediction is not None:
            events += writer.predicted(step, prediction)
    summary = Recorded(
        [writer.summary(*each) for each in steps],
        [_process(process) for process in steps[-1][0].processes],
    )
    other = {"format": FORMAT, **msgspec.to_builtins(summary)}
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": other}


class _Writer:
    """Turns steps into events with times in microseconds since a given moment."""

    def __init__(self, zero_seconds: float) -> None:
        self._zero = zero_seconds
        self._flows = count(1)

    def events(self, step: RecordedStep) -> Iterator[Event]:
        spans = [(process, span) for process in step.processes for span in process.spans]
        yield from (self._slice(step, *each) for each in spans)
        for each in spans:
            yield from self._flow(step, *each)
        for absence in step.absences:
            yield from self._absence(step, absence)

    def predicted(self, step: RecordedStep, prediction: Prediction) -> Iterator[Event]:
        start = step.first_action_seconds
        for process in prediction.processes:
            for span in process.spans:
                track = PREDICTED + process.number, _COMPUTES
                times = start + span.start_seconds, start + span.end_seconds
                args = {"step": step.step, "kind": span.kind}
                yield self._bar("predicted", name_of(span), track, times, args)

    def summary(self, step: RecordedStep, prediction: Prediction | None) -> TimelineStep:
        start, end = self._micro(step.start_seconds), self._micro(step.end_seconds)
        known = None
        if prediction is not None:
            known = PredictedStep(prediction.seconds, prediction.bubble)
        return TimelineStep(step.step, start, end, step.bubble, known, step.num_dropped)

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
        track += (span.peer or 0) if category == "send" else 0
        times = span.start_seconds, span.end_seconds
        return self._bar(category, name, (process.number, track), times, args)

    def _absence(self, step: RecordedStep, away: Absence) -> Iterator[Event]:
        """Until another process had the layers, and while it repeated the lost worker's work."""
        moments = away.start_seconds, away.restored_seconds, away.end_seconds
        args = {"step": step.step, "why": away.reason}
        names = "lost", f"repeats {away.repeated}"
        for name, times in zip(names, pairwise(moments), strict=True):
            yield self._bar("recovery", name, (away.number, _LOST), times, args)

    def _flow(self, step: RecordedStep, process: ProcessSpans, span: Span) -> Iterator[Event]:
        """An arrow from a sent tensor to the action that used it."""
        action = _receiving_action(step, process, span)
        if action is None or span.peer is None:
            return
        shared = {"cat": "flow", "name": span.message, "id": next(self._flows)}
        start = {"pid": process.number, "tid": _SENDS + span.peer}
        yield {"ph": "s", **shared, **start, "ts": self._micro(span.start_seconds)}
        # Inside the action, so the arrow does not go back if two clocks differ by their error.
        arrival = min(max(action.start_seconds, span.start_seconds), action.end_seconds)
        end = {"pid": span.peer, "tid": _COMPUTES, "ts": self._micro(arrival)}
        yield {"ph": "f", "bp": "e", **shared, **end}

    def _bar(
        self,
        category: str,
        name: str,
        track: tuple[int, int],
        times: tuple[float, float],
        args: dict[str, Any],
    ) -> Event:
        """A bar of a process's track, from a start to an end in seconds."""
        (process, thread), (start, end) = track, times
        place = {"pid": process, "tid": thread}
        when = {"ts": self._micro(start), "dur": 1e6 * (end - start)}
        return {"ph": "X", "cat": category, "name": name, **place, **when, "args": args}

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


def _receiving_action(step: RecordedStep, sender: ProcessSpans, sent: Span) -> Span | None:
    """The first use of a sent tensor: an action in the receiving process."""
    if sent.kind != "send" or sent.message not in ("Activation", "Gradient"):
        return None
    # The coordinator forwards it: an arrow leaves with the coordinator's own message.
    if sent.peer == 0 and sent.stage != COORDINATOR_STAGE:
        return None
    forward = "loss" if sent.stage == COORDINATOR_STAGE else "forward"
    kind = forward if sent.message == "Activation" else "backward"
    wanted = kind, sent.stage, sent.microbatch, sent.visit
    for receiver in (each for each in step.processes if each.number == sent.peer):
        # By this much a tensor may seem to have been used before it was sent.
        error_seconds = sender.clock.error_seconds + receiver.clock.error_seconds
        for action in receiver.actions:
            found = action.kind, action.stage, action.microbatch, action.visit
            if found == wanted and action.start_seconds + error_seconds >= sent.start_seconds:
                return action
    return None


def _names(steps: Sequence[StepAndPrediction]) -> Iterator[Event]:
    """Names of the processes and of their tracks, as of each process's last recorded step."""
    processes = {each.number: each for step, _ in steps for each in step.processes}
    is_predicted = any(prediction is not None for _, prediction in steps)
    lost = {away.number for step, _ in steps for away in step.absences}
    for process in processes.values():
        shown = [(process.number, f"{process.name} ({stages_as_text(process.ranges)})")]
        if is_predicted:
            shown.append((PREDICTED + process.number, f"predicted: {process.name}"))
        for pid, name in shown:
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        peers = (other for other in processes.values() if other.number != process.number)
        sends = {_SENDS + peer.number: f"sends to {peer.name}" for peer in peers}
        recovery = {_LOST: "recovery"} if process.number in lost else {}
        for tid, name in {**recovery, **_TRACKS, **sends}.items():
            args, pid = {"name": name}, process.number
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": args}


def _process(process: ProcessSpans) -> RecordedProcess:
    clock, ranges = process.clock, tuple(process.ranges)
    offset_seconds = clock.knots[-1].offset_seconds
    return RecordedProcess(
        process.name, ranges, process.number, offset_seconds, clock.error_seconds
    )
