"""The record of a run: the files in its folder, and the findings from them by rules."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec.structs import replace

from ..errors import PictureError, PlanError
from ..events import (
    RECORD_NAME,
    Deployed,
    Event,
    Failed,
    Lost,
    Recovered,
    Restored,
    RunBegan,
    RunEnded,
    read_events,
)
from ..plan import Plan
from ..protocol.fields import Equipment
from ..telemetry.layer_ranges import Range, ranges_of
from ..units import in_duration, in_micro_batches, in_percent
from .charts import Curve, typical
from .diagram import picture_for
from .topology import topology_of_run

PICTURE_NAME = "architecture"
"""The file name of a run's picture, without its suffix."""
PLAN_NAME = "plan.yaml"
"""The file name of a run's plan."""
TOPOLOGY = f"{PICTURE_NAME}.svg"
METRICS = "metrics.csv"
TIMELINE = "timeline.json"
TIMELINE_PICTURE = "timeline.svg"
FACTS = "run.json"
HYPERPARAMETERS = "hparams.yaml"
FILES = (METRICS, TOPOLOGY, TIMELINE, TIMELINE_PICTURE, PLAN_NAME, FACTS, RECORD_NAME)

Found = TypeVar("Found")

_STAGE_METRIC = re.compile("stage/([0-9]+)/[^/]*")


class PredictedStep(msgspec.Struct, frozen=True):
    """The prediction of a recorded step."""

    seconds: float
    bubble_share: float


class TimelineStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step in the timeline.

    Args:
        step: The number of optimizer steps before it.
        start_us: When it started, in microseconds since the first recorded step started.
        end_us: When it ended.
        bubble_share: The idle share of all processes' time.
        predicted: Its prediction, if there is one.
        num_dropped: How many spans the recorders dropped because their memory was full.
    """

    step: int
    start_us: float
    end_us: float
    bubble_share: float
    predicted: PredictedStep | None = None
    num_dropped: int = 0

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return (self.end_us - self.start_us) / 1e6


class RecordedProcess(msgspec.Struct, frozen=True):
    """A process in the timeline, as of its last step.

    Args:
        name: The name in the plan.
        ranges: Its layers.
        process: The number of the process.
        clock_offset_seconds: How far its clock was ahead of the coordinator's at the last ping.
        clock_error_seconds: The largest possible error of its times.
    """

    name: str
    ranges: tuple[Range, ...]
    process: int = 0
    clock_offset_seconds: float = 0.0
    clock_error_seconds: float = 0.0


class Recorded(msgspec.Struct, frozen=True):
    """The summary in a timeline, without its spans."""

    steps: list[TimelineStep] = []
    processes: list[RecordedProcess] = []


class Process(msgspec.Struct, frozen=True):
    """Where a process of the run was.

    Args:
        name: The name in the plan.
        host: The name of its machine.
        device: The name of its device.
        versions: Its libraries.
    """

    name: str
    host: str = ""
    device: str = ""
    versions: dict[str, str] = {}


class LostWorker(msgspec.Struct, frozen=True):
    """A worker lost during the run, and how long another process took to take its place.

    Args:
        name: The name in the plan.
        step: The step in which it was lost, as the log counts steps.
        reason: The cause of the loss.
        serving_seconds: From the loss until another process served, if one did.
        restoring_seconds: From there until the process had the layers and their latest snapshot.
        repeating_seconds: From there until it had caught up.
        repeated: Its repeated work, in words.
        place: The name of the worker, and its address if it differs from the name.
        served_by: The name and address of the process in its place, if any; else empty.
    """

    name: str
    step: int
    reason: str = ""
    serving_seconds: float | None = None
    restoring_seconds: float | None = None
    repeating_seconds: float | None = None
    repeated: str = ""
    place: str = ""
    served_by: str = ""

    @property
    def seconds(self) -> float | None:
        """From the loss until the process had caught up, if it did."""
        parts = self.serving_seconds, self.restoring_seconds, self.repeating_seconds
        found = [part for part in parts if part is not None]
        return sum(found) if len(found) == len(parts) else None


class RunFacts(msgspec.Struct, frozen=True):
    """The strategy's notes about a run beside the logs.

    Args:
        model: The name of the model.
        started_at: When training began, in ISO format with the time zone.
        processes: The coordinator and the workers; in the place of a lost one, its successor.
        ended_at: When the run ended; empty while it is under way, and after a kill.
        error: The text of the error at the run's end; empty without an error.
        losses: The workers lost during the run, in their order.
    """

    model: str
    started_at: str
    processes: list[Process] = []
    ended_at: str = ""
    error: str = ""
    losses: list[LostWorker] = []


def facts_of(events: Iterable[Event]) -> RunFacts:
    """The facts from the events of a run up to the present one."""
    facts = RunFacts("", "")
    # For each lost worker, the place of its latest loss, and a moment of it.
    latest: dict[str, int] = {}
    moments: dict[str, float] = {}
    for event in events:
        if isinstance(event, RunBegan):
            processes = [_process(*each) for each in event.equipment.items()]
            facts = RunFacts(event.model, event.began_at, processes)
        elif isinstance(event, Lost):
            latest[event.name], moments[event.name] = len(facts.losses), event.moment_seconds
            lost = LostWorker(event.name, event.step, event.reason, place=event.place)
            facts = replace(facts, losses=[*facts.losses, lost])
        elif isinstance(event, Restored):
            present = _process(event.name, event.equipment)
            facts = replace(
                _with_loss(
                    facts,
                    latest[event.name],
                    serving_seconds=event.served_seconds - moments[event.name],
                    restoring_seconds=event.moment_seconds - event.served_seconds,
                    repeated=event.repeated,
                    served_by=event.served_by,
                ),
                processes=[present if p.name == event.name else p for p in facts.processes],
            )
            moments[event.name] = event.moment_seconds
        elif isinstance(event, Recovered):
            seconds = event.moment_seconds - moments[event.name]
            facts = _with_loss(facts, latest[event.name], repeating_seconds=seconds)
        elif isinstance(event, Failed):
            facts = replace(facts, error=facts.error or event.error)
        elif isinstance(event, RunEnded):
            facts = replace(facts, ended_at=event.ended_at)
    return facts


def _process(name: str, equipment: Equipment) -> Process:
    return Process(name, equipment.host, equipment.device_name, equipment.versions)


def _with_loss(facts: RunFacts, place: int, **known: Any) -> RunFacts:
    losses = [*facts.losses]
    losses[place] = replace(losses[place], **known)
    return replace(facts, losses=losses)


class _Timeline(msgspec.Struct, frozen=True):
    # The decoder skips all other keys, so also the spans.
    other: Recorded = msgspec.field(name="otherData", default_factory=Recorded)


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's folder.

    Args:
        name: The name of the folder.
        metrics: Each column of the metrics as a curve.
        plan: The last deployed plan.
        topology: The markup of the topology's picture.
        timeline: The markup of the timeline's picture.
        recorded: The steps and processes in the timeline.
        problems: A sentence for each unreadable file.
        facts: When, where and with which libraries the run ran, if the folder has these notes.
        hyperparameters: The values saved by Lightning, by their names, as text.
        written_at: When the latest of the files was written, in seconds since 1970.
    """

    name: str
    metrics: dict[str, Curve] = field(default_factory=dict)
    plan: Plan | None = None
    topology: str | None = None
    timeline: str | None = None
    recorded: Recorded = field(default_factory=Recorded)
    problems: list[str] = field(default_factory=list)
    facts: RunFacts | None = None
    hyperparameters: dict[str, str] = field(default_factory=dict)
    written_at: float = 0.0

    @property
    def title(self) -> str:
        """The model and the folder."""
        return f"{self.facts.model} · {self.name}" if self.facts is not None else self.name

    @property
    def processes(self) -> list[Process]:
        """Where the processes ran; empty if the run does not have facts."""
        return [] if self.facts is None else self.facts.processes

    @property
    def has_moved_since(self) -> bool:
        """Whether layers have moved since the timeline's last step."""
        if self.plan is None:
            return False
        then = {each.name: each.ranges for each in self.recorded.processes}
        return bool(then) and then != self.ranges

    @property
    def ranges(self) -> dict[str, tuple[Range, ...]]:
        """The layers of each process of the last plan, by its name; empty without a plan."""
        return {} if self.plan is None else ranges_of(self.plan)

    @property
    def process_numbers(self) -> list[int]:
        """The numbers of the processes with metrics."""
        matches = (_STAGE_METRIC.fullmatch(name) for name in self.metrics)
        return sorted({int(match[1]) for match in matches if match})

    def process_metric(self, number: int, name: str) -> Curve:
        """A metric of a process; empty if the run does not have it."""
        return self.metrics.get(f"stage/{number}/{name}", ())

    def last(self, name: str) -> float | None:
        """The last finite value of a metric, if it has one."""
        finite = [value for _, value in self.metrics.get(name, ()) if math.isfinite(value)]
        return finite[-1] if finite else None

    def typical(self, name: str) -> float | None:
        """The median of a metric over the last half of the run, if it has values."""
        return typical(self.metrics.get(name, ()))

    def typical_of_processes(self, name: str) -> dict[int, float]:
        """The median of a metric over the last half of the run, for each process with this metric
        and with layers under the last plan.
        """
        having = [n for n in self.process_numbers if self.plan is None or not self.is_idle(n)]
        found = {n: typical(self.process_metric(n, name)) for n in having}
        return {number: value for number, value in found.items() if value is not None}

    def is_idle(self, number: int) -> bool:
        """Whether a worker is without layers under the last plan."""
        return number > 0 and not self.ranges.get(self.name_of(number))

    def is_spare(self, number: int) -> bool:
        """Whether other processes run all micro-batches of all the process's stages."""
        held = self.ranges.get(self.name_of(number), ())
        return number > 0 and bool(held) and all(each.is_spare for each in held)

    def is_replica(self, number: int) -> bool:
        """Whether another process holds a stage of the process too."""
        held = self.ranges.get(self.name_of(number), ())
        return any(each.share is not None for each in held)

    def name_of(self, number: int) -> str:
        """The name of a process; ``worker 2`` if the run's facts and its plan do not name it.

        A worker keeps its number when layers move. So the facts come first: their names are from
        the beginning of the run.
        """
        names = [each.name for each in self.processes] or list(self.ranges)
        return names[number] if number < len(names) else f"worker {number}"


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder, as far as its files can be read.

    Raises:
        PictureError: If the folder does not have files of a run.
    """
    if not folder.is_dir():
        raise PictureError(f"There is no folder {str(folder)!r}; name a folder with a run's logs.")
    if not any((folder / name).is_file() for name in FILES):
        raise PictureError(f"The folder {str(folder)!r} has no file of a run. {_remedy(folder)}")
    problems: list[str] = []

    def read(name: str, reader: Callable[[Path], Found]) -> Found | None:
        path = folder / name
        try:
            return reader(path) if path.is_file() else None
        except (OSError, ValueError, csv.Error, PlanError) as error:
            problems.append(f"{name} cannot be read: {error}")
            return None

    place = folder.resolve()
    # Make missing files again from the record.
    events = read(RECORD_NAME, read_events) or []
    deployed = [event for event in events if isinstance(event, Deployed)][-1:]
    pictures = (picture_for(TOPOLOGY, topology_of_run(event)).decode() for event in deployed)
    plans = (event.plan for event in deployed)
    there = [path for path in (folder / name for name in FILES) if path.is_file()]
    return RunRecord(
        name=f"{place.parent.name}/{place.name}",
        metrics=read(METRICS, _metrics) or {},
        plan=read(PLAN_NAME, Plan.from_yaml) or next(plans, None),
        topology=read(TOPOLOGY, _text) or next(pictures, None),
        timeline=read(TIMELINE_PICTURE, _text),
        recorded=read(TIMELINE, _recorded) or Recorded(),
        problems=problems,
        facts=read(FACTS, _facts) or (facts_of(events) if events else None),
        hyperparameters=read(HYPERPARAMETERS, _hyperparameters) or {},
        written_at=max((path.stat().st_mtime for path in there), default=0.0),
    )


def _remedy(folder: Path) -> str:
    # Two levels reach lightning_logs/version_0 without a search of the whole disk.
    below = [
        path.parent
        for name in FILES
        if name != PLAN_NAME  # a plan lies in folders of projects too
        for above in ("*", "*/*")
        for path in folder.glob(f"{above}/{name}")
    ]
    if below:
        latest = max(below, key=lambda path: path.stat().st_mtime)
        return f"The latest run below it is in {str(latest)!r}; name that folder."
    return (
        f"Name the folder with {METRICS}, such as lightning_logs/version_0: a fit with a logger "
        f"writes {TOPOLOGY} and {PLAN_NAME} there, and CSVLogger writes the metrics."
    )


def _text(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError("It is empty.")
    return text


def _recorded(path: Path) -> Recorded:
    return msgspec.json.decode(path.read_bytes(), type=_Timeline).other


def _facts(path: Path) -> RunFacts:
    return msgspec.json.decode(path.read_bytes(), type=RunFacts)


def _hyperparameters(path: Path) -> dict[str, str]:
    try:
        # This loader reads all values, of Python's own classes too, as text, and makes no objects.
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return dict(_flat(found)) if isinstance(found, dict) else {}


def _flat(values: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            shown = f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
            yield f"{prefix}{key}", shown


def _metrics(path: Path) -> dict[str, Curve]:
    found: dict[str, list[tuple[float, float]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file)):
            step = _number(row.get("step")) if row.get("step") else float(number)
            if step is None or not math.isfinite(step):
                continue
            for name, cell in row.items():
                value = _number(cell)
                if value is not None and name not in (None, "step", "epoch"):
                    found.setdefault(name, []).append((step, value))
    return {name: sorted(curve, key=lambda point: point[0]) for name, curve in found.items()}


def _number(cell: Any) -> float | None:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


UNEVEN = 0.15
"""A finding names the busiest process if it exceeds the others by this share of the step."""

LARGE_BUBBLE = 0.25
MUCH_TRANSFER = 0.15
MUCH_SENDING = 0.6
OFF = 0.15
"""A finding names a step that differs from its prediction by this share."""

_FASTER_LINKS = (
    "A faster link, or activation_dtype and gradient_dtype in the plan (bfloat16 halves the "
    "sent bytes, int8 quarters them) would help."
)


_MOST_OF_ERROR = 2000
_MOST_NAMES = 4


def findings(record: RunRecord) -> list[str]:
    """Sentences on the notable facts of a run, the error at its end first."""
    found = [
        *_of_end(record),
        *_of_losses(record),
        *_of_loss(record),
        *_of_bound(record),
        *_of_balance(record),
        *_of_bubble(record),
        *_of_links(record),
        *_of_prediction(record),
    ]
    if found or not record.process_numbers:
        return found
    return ["Nothing stands out: the processes are evenly busy, and no link holds them up."]


def _of_end(record: RunRecord) -> Iterator[str]:
    facts = record.facts
    if facts is None:
        return
    if facts.error:
        yield f"The run ended by an error. {facts.error[:_MOST_OF_ERROR]}"
    elif not facts.ended_at:
        yield "The end of the run is not recorded: it is still under way, or it was killed."


def _of_losses(record: RunRecord) -> Iterator[str]:
    losses = [] if record.facts is None else record.facts.losses
    seconds = [each.seconds for each in losses if each.seconds is not None]
    if not losses:
        return
    names = list(dict.fromkeys(each.name for each in losses))
    shown = ", ".join(names[:_MOST_NAMES]) + (" and others" if len(names) > _MOST_NAMES else "")
    times = "Once a worker was" if len(losses) == 1 else f"{len(losses)} times a worker was"
    yield (
        f"{times} lost and replaced ({shown}); all steps were kept. Until the process in its "
        f"place had caught up, it took {in_duration(sum(seconds))} in all."
        if len(seconds) == len(losses)
        else f"{times} lost ({shown}), and {len(losses) - len(seconds)} of these times no process "
        "had taken its place to the end."
    )


def _of_bound(record: RunRecord) -> Iterator[str]:
    share = record.typical("pipeline/bound_share")
    if share is not None and share > 1:
        yield (
            "The measurement before the run is wrong: by it the devices need at least "
            f"{share:.3g} times as long for a step as the step took. A device was busy while it "
            "was measured, most likely. Measure again with PipelineProfiler(force=True); the plan "
            "may then be another one."
        )


def _of_loss(record: RunRecord) -> Iterator[str]:
    for name, curve in record.metrics.items():
        if "loss" in name and "/" not in name and curve and not math.isfinite(curve[-1][1]):
            yield (
                f"{name} is not a finite number at step {curve[-1][0]:.0f}; lower the learning "
                "rate, clip gradients, or compute in float32."
            )


def _of_balance(record: RunRecord) -> Iterator[str]:
    found = record.typical_of_processes("busy_share")
    shares = {number: share for number, share in found.items() if not record.is_spare(number)}
    if len(shares) < 2:
        return
    busiest = max(shares, key=lambda number: shares[number])
    others = statistics.mean(share for number, share in shares.items() if number != busiest)
    is_replica = record.is_replica(busiest)
    less = "a smaller share of the micro-batches" if is_replica else "fewer layers"
    if shares[busiest] - others > UNEVEN:
        yield (
            f"{_said(record, busiest)} is the bottleneck: it computes "
            f"{in_percent(shares[busiest])} of the step, the others {in_percent(others)}. Give it "
            f"{less}, or let plan='auto' measure again; replan=True moves layers during a run."
        )


def _of_bubble(record: RunRecord) -> Iterator[str]:
    bubble = record.typical("pipeline/bubble_share")
    if bubble is None or bubble <= LARGE_BUBBLE or record.plan is None:
        return
    pieces, processes = record.plan.micro_batches, len(record.plan.workers) + 1
    if pieces < 4 * processes:
        yield (
            f"The devices idle {in_percent(bubble)} of the time. A batch is cut into "
            f"{in_micro_batches(pieces)} for {processes} processes; more micro-batches fill the "
            "pipeline better, if the batch allows it."
        )


def _of_links(record: RunRecord) -> Iterator[str]:
    packing = record.typical_of_processes("transferring_share")
    sending = record.typical_of_processes("sending_share")
    for number in sorted(packing.keys() | sending.keys()):
        share, sent = packing.get(number, 0.0), sending.get(number, 0.0)
        who = _said(record, number)
        if share > MUCH_TRANSFER:
            yield f"{who} spends {in_percent(share)} of the step on transfers. {_FASTER_LINKS}"
        elif sent > MUCH_SENDING:
            yield f"{who} sends during {in_percent(sent)} of the time. {_FASTER_LINKS}"


def _of_prediction(record: RunRecord) -> Iterator[str]:
    step = record.recorded.steps[-1] if record.recorded.steps else None
    if step is None or step.predicted is None or not step.predicted.seconds > 0:
        return
    ratio = step.seconds / step.predicted.seconds
    if abs(ratio - 1) > OFF:
        word = "slower" if ratio > 1 else "faster"
        yield (
            f"Step {step.step} took {in_duration(step.seconds)}, {ratio:.2g} times the predicted "
            f"{in_duration(step.predicted.seconds)}. If the devices have become {word} "
            "permanently, measure them again with PipelineProfiler(force=True)."
        )


def _said(record: RunRecord, number: int) -> str:
    return "The coordinator" if number == 0 else f"Worker {number} ({record.name_of(number)})"
