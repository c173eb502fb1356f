"""The record of a run: the files in its folder, and the findings that follow from them by rules."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import PictureError, PlanError
from ..plan import Plan
from ..units import in_percent
from .charts import Curve
from .diagram import ERROR_NAME, PICTURE_NAME, PLAN_NAME

TOPOLOGY = f"{PICTURE_NAME}.svg"
METRICS = "metrics.csv"
TIMELINE = "timeline.json"
TIMELINE_PICTURE = "timeline.svg"
FILES = (METRICS, TOPOLOGY, TIMELINE, TIMELINE_PICTURE, PLAN_NAME, ERROR_NAME)

Found = TypeVar("Found")

_STAGE_METRIC = re.compile("stage/([0-9]+)/[^/]*")


class PredictedStep(msgspec.Struct, frozen=True):
    """The prediction of a recorded step."""

    seconds: float
    bubble_share: float
    source: str = ""


class RecordedStep(msgspec.Struct, frozen=True):
    """A step in the timeline."""

    step: int
    start_us: float
    end_us: float
    bubble_share: float
    predicted: PredictedStep | None = None

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return (self.end_us - self.start_us) / 1e6


class RecordedStage(msgspec.Struct, frozen=True):
    """A stage in the timeline, as of its last step."""

    stage: int
    layers: tuple[int, int]


class Recorded(msgspec.Struct, frozen=True):
    """The summary in a timeline, without its spans."""

    steps: list[RecordedStep] = []
    stages: list[RecordedStage] = []


class _Timeline(msgspec.Struct, frozen=True):
    # The decoder skips all other keys, so also the spans.
    other: Recorded = msgspec.field(name="otherData", default_factory=Recorded)


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's folder.

    Args:
        name: The name of the folder.
        metrics: Each column of the metrics as a curve.
        plan: The plan that was deployed last.
        topology: The markup of the topology's picture.
        timeline: The markup of the timeline's picture.
        recorded: The steps and stages in the timeline.
        error: The error of a worker that has ended the run; None if there is none.
        problems: A sentence for each file that cannot be read.
    """

    name: str
    metrics: dict[str, Curve] = field(default_factory=dict)
    plan: Plan | None = None
    topology: str | None = None
    timeline: str | None = None
    recorded: Recorded = field(default_factory=Recorded)
    error: str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def has_moved_since(self) -> bool:
        """Whether layers have moved since the timeline's last step."""
        if self.plan is None:
            return False
        present = dict(enumerate((stage.layers for stage in self.plan.remote_stages), start=1))
        then = {stage.stage: stage.layers for stage in self.recorded.stages if stage.stage > 0}
        return bool(then) and then != present

    @property
    def stage_numbers(self) -> list[int]:
        """The numbers of the stages with metrics."""
        matches = (_STAGE_METRIC.fullmatch(name) for name in self.metrics)
        return sorted({int(match[1]) for match in matches if match})

    def stage_metric(self, number: int, name: str) -> Curve:
        """A metric of a stage; empty if the run has no such metric."""
        return self.metrics.get(f"stage/{number}/{name}", ())

    def last(self, name: str) -> float | None:
        """The last finite value of a metric; None if it has none."""
        finite = [value for _, value in self.metrics.get(name, ()) if math.isfinite(value)]
        return finite[-1] if finite else None

    def worker_of(self, number: int) -> str:
        """The worker of a stage, or the stage's number if the plan does not tell the worker."""
        if number == 0:
            return "coordinator"
        remote = [] if self.plan is None else self.plan.remote_stages
        return remote[number - 1].worker if number <= len(remote) else f"stage {number}"


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder, as far as its files can be read.

    Raises:
        PictureError: If the folder has no file of a run.
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

    return RunRecord(
        name=folder.resolve().name,
        metrics=read(METRICS, _metrics) or {},
        plan=read(PLAN_NAME, Plan.from_yaml),
        topology=read(TOPOLOGY, _text),
        timeline=read(TIMELINE_PICTURE, _text),
        recorded=read(TIMELINE, _recorded) or Recorded(),
        error=read(ERROR_NAME, _text),
        problems=problems,
    )


def _remedy(folder: Path) -> str:
    # Two levels reach lightning_logs/version_0 without a search of the whole disk.
    below = [
        path.parent
        for name in FILES
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
"""A finding names the busiest stage if it exceeds the others by this share of the step."""

LARGE_BUBBLE = 0.25
MUCH_TRANSFER = 0.15
MUCH_SENDING = 0.6
OFF = 0.15
"""A finding names a step that differs from its prediction by this share."""

_FASTER_LINKS = (
    "A faster link, or activation_dtype and gradient_dtype in the plan (bfloat16 halves what is "
    "sent, int8 quarters it) would help."
)


def findings(record: RunRecord) -> list[str]:
    """Sentences on what stands out in a run, its error first; a single sentence if nothing does."""
    ended = [] if record.error is None else [f"The run ended early. {record.error.strip()}"]
    return ended + _measured_findings(record)


def _measured_findings(record: RunRecord) -> list[str]:
    found = [
        *_of_loss(record),
        *_of_balance(record),
        *_of_bubble(record),
        *_of_links(record),
        *_of_prediction(record),
    ]
    if found:
        return found
    if not record.stage_numbers:
        return [
            "There are no measurements of the stages; add the callback StageMonitor to the Trainer."
        ]
    return ["Nothing stands out: the stages are evenly busy, and no link holds them up."]


def _of_loss(record: RunRecord) -> Iterator[str]:
    for name, curve in record.metrics.items():
        if "loss" in name and "/" not in name and curve and not math.isfinite(curve[-1][1]):
            yield (
                f"{name} is not a finite number at step {curve[-1][0]:.0f}; lower the learning "
                "rate, clip gradients, or compute in float32."
            )


def _of_balance(record: RunRecord) -> Iterator[str]:
    shares = _medians(record, "busy_share")
    if len(shares) < 2:
        return
    busiest = max(shares, key=lambda number: shares[number])
    others = statistics.mean(share for number, share in shares.items() if number != busiest)
    if shares[busiest] - others > UNEVEN:
        yield (
            f"{_said(record, busiest)} is the bottleneck: it computes "
            f"{in_percent(shares[busiest])} of the step, the others {in_percent(others)}. Give it "
            "fewer layers, or let plan='auto' measure again; replan=True moves layers during a run."
        )


def _of_bubble(record: RunRecord) -> Iterator[str]:
    bubble = record.last("pipeline/bubble_share")
    if bubble is None or bubble <= LARGE_BUBBLE or record.plan is None:
        return
    pieces, stages = record.plan.micro_batches, len(record.plan.remote_stages) + 1
    if pieces < 4 * stages:
        yield (
            f"The devices idle {in_percent(bubble)} of the time. A batch is cut into {pieces} "
            f"micro-batches for {stages} stages; more micro-batches fill the pipeline better, if "
            "the batch allows it."
        )


def _of_links(record: RunRecord) -> Iterator[str]:
    packing, sending = _medians(record, "transferring_share"), _medians(record, "sending_share")
    much = {number: share for number, share in packing.items() if share > MUCH_TRANSFER}
    for number, share in much.items():
        what = f"{_said(record, number)} spends {in_percent(share)} of the step on transfers."
        yield f"{what} {_FASTER_LINKS}"
    for number, share in sending.items():
        if share > MUCH_SENDING and number not in much:
            what = f"{_said(record, number)} sends during {in_percent(share)} of the time."
            yield f"{what} {_FASTER_LINKS}"


def _of_prediction(record: RunRecord) -> Iterator[str]:
    step = record.recorded.steps[-1] if record.recorded.steps else None
    if step is None or step.predicted is None or not step.predicted.seconds > 0:
        return
    ratio = step.seconds / step.predicted.seconds
    if abs(ratio - 1) > OFF:
        word = "slower" if ratio > 1 else "faster"
        yield (
            f"Step {step.step} took {step.seconds:.3g} s, {ratio:.2g} times the predicted "
            f"{step.predicted.seconds:.3g} s. If the devices have become {word} permanently, "
            "measure them again with PipelineProfiler(force=True)."
        )


def _medians(record: RunRecord, name: str) -> dict[int, float]:
    """The median of a metric over the last half of the run, for each stage with this metric."""
    found = {}
    for number in record.stage_numbers:
        curve = record.stage_metric(number, name)
        values = [value for _, value in curve[len(curve) // 2 :] if math.isfinite(value)]
        if values:
            found[number] = statistics.median(values)
    return found


def _said(record: RunRecord, number: int) -> str:
    return "The coordinator" if number == 0 else f"Stage {number} ({record.worker_of(number)})"
