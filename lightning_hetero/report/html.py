"""The report of a run: one HTML page without network access and scripts.

The page itself is the template ``page.html``; this module computes its content.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..errors import PlanError
from ..telemetry.layer_ranges import Range
from ..units import in_bytes, in_duration, in_micro_batches, in_percent
from .charts import line_chart, shares_chart
from .diagram import diagram
from .run_record import LostWorker, RunRecord, TimelineStep, findings
from .svg import FONTS, printable, style_sheet
from .topology import topology_of

_SHARES = {"busy": "hue-0", "transferring": "hue-2", "waiting": "track"}
_PIPELINE_NUMBERS: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_second": ("tokens per second", "{:,.0f}".format),
    "step_seconds": ("per step", in_duration),
    "bubble_share": ("bubble", in_percent),
    "bound_share": ("of the devices' bound", in_percent),
}
_OTHER_METRICS = ("stage/", "pipeline/", "recovery/")
_MOST_LOSSES = 8
_MOST_IN_A_ROW = 6
_MOST_COMPARED = 10
_MOST_LOST = 20


def report(record: RunRecord) -> str:
    """The page as HTML."""
    topology, no_topology = _topology(record)
    page = _environment().get_template("page.html")
    key_numbers = list(_key_numbers(record))
    shown = page.render(
        record=record,
        summary=_summary(record),
        when=_when(record),
        key_numbers=key_numbers,
        columns=_columns(len(key_numbers)),
        missing=_missing(record),
        findings=findings(record),
        topology=topology,
        no_topology=no_topology,
        loss=_loss(record),
        shares=_shares(record),
        speed=_speed(record),
        losses=_lost(record),
        reasons=_reasons(record),
        compared=_compared(record),
        layers_of=partial(_layers_of, record),
        fonts=FONTS,
        picture_style=style_sheet(),
    )
    return printable(shown)


def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    # Scripts in an image do not run.
    found.filters["base64"] = lambda svg: base64.b64encode(svg.encode()).decode()
    forms: dict[str, Callable[[float], str]] = {
        "milliseconds": "{:.3g} ms".format,
        "whole": "{:,.0f}".format,
        "duration": in_duration,
        "percent": in_percent,
        "bytes": in_bytes,
    }
    found.filters |= {name: partial(_or_dash, form) for name, form in forms.items()}
    return found


def _or_dash(form: Callable[[float], str], value: float | None) -> str:
    return "–" if value is None else form(value)


def _summary(record: RunRecord) -> str:
    plan = record.plan
    if plan is None or not plan.stages:
        return "A run of lightning-hetero."
    processes = len(plan.workers) + 1
    return (
        f"{plan.stages[-1].layers[1]} layers over {processes} processes, "
        f"{in_micro_batches(plan.micro_batches)}, at most {plan.max_in_flight} in flight."
    )


def _key_numbers(record: RunRecord) -> Iterator[tuple[str, str]]:
    for name in _losses(record)[:2]:
        if (value := record.last(name)) is not None:
            yield f"last {name}", f"{value:.4g}"
    for name, (label, form) in _PIPELINE_NUMBERS.items():
        value = record.typical(f"pipeline/{name}")
        # A step shorter than its bound is a wrong measurement; the findings name it.
        if value is not None and not (name == "bound_share" and value > 1):
            yield label, form(value)
    if busy := record.typical_of_processes("busy_share"):
        slowest = max(busy, key=lambda number: busy[number])
        yield f"busiest process, {record.name_of(slowest)}", f"{slowest}"


def _columns(count: int) -> int:
    """The columns of the key numbers, so that each row has at least two."""
    rows = -(-count // _MOST_IN_A_ROW) or 1
    return -(-count // rows)


def _missing(record: RunRecord) -> str:
    """One sentence on the missing facts of the folder, and how to record them; may be empty."""
    parts = []
    if not _losses(record):
        parts.append("the loss (log one with self.log, and give the Trainer a CSVLogger)")
    if not record.process_numbers:
        parts.append("the processes and the speed (callback StageMonitor, with a CSVLogger)")
    if not record.timeline or not record.recorded.steps:
        parts.append("a step's timeline (callback PipelineTimeline)")
    elif not _compared(record):
        parts.append("a step's prediction (plan='auto' or PipelineProfiler measures the devices)")
    return f"Not recorded in this run: {'; '.join(parts)}." if parts else ""


def _when(record: RunRecord) -> str:
    facts = record.facts
    if facts is None:
        written = datetime.fromtimestamp(record.written_at).astimezone()
        return f"Its files were last written on {_moment(written)}." if record.written_at else ""
    began = datetime.fromisoformat(facts.started_at)
    if not facts.ended_at:
        return f"Began on {_moment(began)}."
    ended = datetime.fromisoformat(facts.ended_at)
    lasted = in_duration((ended - began).total_seconds())
    return f"Began on {_moment(began)}, ended on {_moment(ended)}, after {lasted}."


def _moment(when: datetime) -> str:
    return when.strftime("%d %B %Y at %H:%M %Z").strip()


def _topology(record: RunRecord) -> tuple[str, str]:
    """The picture, or a sentence on why it is missing."""
    if record.topology is not None:
        return record.topology, ""
    if record.plan is None:
        return "", "No architecture.svg: a fit with a logger writes it when it begins."
    try:
        return diagram(topology_of(record.plan)), ""
    except PlanError as error:
        return "", f"The plan cannot be drawn: {error}"


def _losses(record: RunRecord) -> list[str]:
    names = [n for n in record.metrics if "loss" in n and not n.startswith(_OTHER_METRICS)]
    # Lightning logs `loss_step` and `loss_epoch` if the module asks for both.
    return sorted(names, key=lambda name: ("val" in name or "test" in name, name))[:_MOST_LOSSES]


def _loss(record: RunRecord) -> str:
    return line_chart({name: record.metrics[name] for name in _losses(record)}, "Loss over steps")


def _shares(record: RunRecord) -> str:
    rows = {
        f"{number} · {record.name_of(number)}": {
            kind: record.process_metric(number, f"{kind}_share") for kind in _SHARES
        }
        for number in record.process_numbers
        if record.process_metric(number, "busy_share")
    }
    return shares_chart(rows, _SHARES, "Shares of the step, by process")


def _speed(record: RunRecord) -> str:
    curve = record.metrics.get("pipeline/tokens_per_second", ())
    return line_chart({"tokens per second": curve}, "Speed over steps", 190, from_zero=True)


def _reasons(record: RunRecord) -> list[str]:
    """Why workers were lost; equal reasons once, with their workers."""
    found: dict[str, list[str]] = {}
    for lost in _lost(record):
        found.setdefault(lost.reason, []).append(f"{lost.name} in step {lost.step}")
    return [f"{', '.join(places)}: {reason}" for reason, places in found.items()]


def _lost(record: RunRecord) -> list[LostWorker]:
    """The latest lost workers."""
    return [] if record.facts is None else record.facts.losses[-_MOST_LOST:]


def _compared(record: RunRecord) -> list[TimelineStep]:
    """The last steps with a prediction."""
    return [step for step in record.recorded.steps if step.predicted][-_MOST_COMPARED:]


def _layers_of(record: RunRecord, number: int) -> str:
    if record.plan is None:
        return "–"
    if record.is_idle(number):
        return "none since a move"
    ranges = record.ranges.get(record.name_of(number), ())
    return ", ".join(map(_range_of, ranges)) or "none"


def _range_of(held: Range) -> str:
    first, end = held.layers
    share = "" if held.share is None else f" ({held.share_as_text})"
    return f"{first} to {end - 1}{share}"
