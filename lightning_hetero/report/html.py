"""The report of a run: one HTML page that needs no network and runs no script."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

from ..errors import PlanError
from ..units import in_bytes, in_percent
from .charts import line_chart, shares_chart
from .diagram import diagram
from .run_record import RecordedStep, RunRecord, findings
from .svg import FONTS, element, escaped, style_sheet
from .topology import topology_of

_SHARES = {"busy": "hue-0", "transferring": "hue-2", "waiting": "track"}
_MOST_LOSSES = 8

_PAGE_STYLE = f"""
:root{{--paper:#fff;--wash:#f4f6fa;--edge:#d5dce6;--ink:#172033;--soft:#5b6880}}
@media(prefers-color-scheme:dark){{
:root{{--paper:#10161f;--wash:#0b1017;--edge:#334155;--ink:#e8edf4;--soft:#9fb0c6}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--wash);color:var(--ink);font:15px/1.5 {FONTS}}}
main{{max-width:1000px;margin:0 auto;padding:40px 20px 60px}}
h1{{font-size:26px;margin:0 0 4px}} h2{{font-size:17px;margin:0 0 14px}}
p{{margin:0 0 8px}} .aside{{color:var(--soft)}}
section{{background:var(--paper);border:1px solid var(--edge);border-radius:12px;
padding:22px 24px;margin-top:18px;overflow-x:auto}}
svg{{display:block;width:100%;height:auto}}
img{{display:block;max-width:100%;height:auto;margin:0 auto}}
table+table{{margin-top:22px}}
ul{{margin:0;padding-left:20px}}
table{{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}}
th,td{{text-align:right;padding:7px 10px;border-bottom:1px solid var(--edge);white-space:nowrap}}
th{{color:var(--soft);font-weight:600}} th:first-child,td:first-child{{text-align:left}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;
margin-top:20px}}
.tile{{background:var(--paper);border:1px solid var(--edge);border-radius:12px;padding:14px 16px}}
.tile b{{display:block;font-size:21px}} .tile span{{color:var(--soft);font-size:13px;
overflow-wrap:anywhere}}
@media print{{section,.tile{{break-inside:avoid}}}}
"""


def report(record: RunRecord) -> str:
    """The page."""
    body = element(
        "main",
        element("h1", escaped(record.name)),
        element("p", escaped(_summary(record)), class_="aside"),
        *_tiles(record),
        *(_section(title, content) for title, content in _sections(record)),
    )
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        + element("title", escaped(f"{record.name}: lightning-hetero"))
        + f"<style>{_PAGE_STYLE}{style_sheet()}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _sections(record: RunRecord) -> Iterator[tuple[str, str]]:
    yield "What stands out", _bullets(findings(record))
    yield "Topology", _topology(record)
    yield "Loss", _loss(record)
    yield "What the stages do", _shares(record)
    yield "Speed", _speed(record)
    yield "Timeline of a step", _timeline(record)
    yield "Plan against measurement", _comparison(record) + _stage_table(record)
    if record.problems:
        yield "Not read", _bullets(record.problems)


def _section(title: str, content: str) -> str:
    return element("section", element("h2", escaped(title)), content)


def _summary(record: RunRecord) -> str:
    plan = record.plan
    if plan is None or not plan.stages:
        return "A run of lightning-hetero."
    processes = len(plan.remote_stages) + 1
    return (
        f"{plan.stages[-1].layers[1]} layers over {processes} processes, {plan.micro_batches} "
        f"micro-batches, at most {plan.max_in_flight} in flight."
    )


def _tiles(record: RunRecord) -> list[str]:
    tiles = [
        element("div", element("b", escaped(value)), element("span", escaped(name)), class_="tile")
        for name, value in _key_numbers(record)
    ]
    return [element("div", *tiles, class_="tiles")] if tiles else []


def _key_numbers(record: RunRecord) -> Iterator[tuple[str, str]]:
    for name in _losses(record)[:2]:
        value = record.last(name)
        if value is not None:
            yield f"last {name}", f"{value:.4g}"
    if (speed := record.last("pipeline/tokens_per_second")) is not None:
        yield "tokens per second", f"{speed:,.0f}"
    if (seconds := record.last("pipeline/step_seconds")) is not None:
        yield "seconds per step", f"{seconds:.3g}"
    if (bubble := record.last("pipeline/bubble_share")) is not None:
        yield "bubble", in_percent(bubble)
    if (bound := record.last("pipeline/bound_share")) is not None:
        yield "of the devices' bound", in_percent(bound)
    if (slowest := record.last("pipeline/bottleneck_stage")) is not None:
        yield f"slowest stage, {record.worker_of(int(slowest))}", f"{slowest:.0f}"


def _topology(record: RunRecord) -> str:
    if record.topology is not None:
        return _image(record.topology, "Topology of the run")
    if record.plan is not None:
        try:
            return _image(diagram(topology_of(record.plan)), "Topology of the plan")
        except PlanError as error:
            return _missing(f"The plan cannot be drawn: {error}")
    return _missing("No architecture.svg: it is written when a fit with a logger begins.")


def _losses(record: RunRecord) -> list[str]:
    names = [n for n in record.metrics if "loss" in n and not n.startswith(("stage/", "pipeline/"))]
    # Lightning logs `loss_step` and `loss_epoch` where both are asked for.
    return sorted(names, key=lambda name: ("val" in name or "test" in name, name))[:_MOST_LOSSES]


def _loss(record: RunRecord) -> str:
    chart = line_chart({name: record.metrics[name] for name in _losses(record)}, "Loss over steps")
    return chart or _missing(
        "No loss in metrics.csv: log one with self.log, and give the Trainer a CSVLogger."
    )


def _shares(record: RunRecord) -> str:
    rows = {
        f"{number} · {record.worker_of(number)}": {
            kind: record.stage_metric(number, f"{kind}_share") for kind in _SHARES
        }
        for number in record.stage_numbers
        if record.stage_metric(number, "busy_share")
    }
    return shares_chart(rows, _SHARES, "Shares of the step, by stage") or _no_monitor()


def _speed(record: RunRecord) -> str:
    curve = record.metrics.get("pipeline/tokens_per_second", ())
    return line_chart({"tokens per second": curve}, "Speed over steps", 190, True) or _no_monitor()


def _timeline(record: RunRecord) -> str:
    if record.timeline is None:
        return _missing(
            "No timeline.svg: the callback PipelineTimeline records steps and draws one."
        )
    moved = "This step was before layers moved; the plan is now another one."
    note = element("p", escaped(moved), class_="aside") if record.has_moved_since else ""
    return note + _image(record.timeline, "Timeline of a step")


def _comparison(record: RunRecord) -> str:
    steps = [step for step in record.recorded.steps if step.predicted is not None]
    if not steps:
        return _missing("No step was recorded with its prediction.")
    return _table(
        ("step", "measured", "predicted", "measured bubble", "predicted bubble", "predicted from"),
        [_compared(step) for step in steps[-10:]],
    )


def _compared(step: RecordedStep) -> list[str]:
    predicted = step.predicted
    if predicted is None:
        return [str(step.step)]
    return [
        str(step.step),
        f"{step.seconds:.3g} s",
        f"{predicted.seconds:.3g} s",
        in_percent(step.bubble_share),
        in_percent(predicted.bubble_share),
        predicted.source or "–",
    ]


def _stage_table(record: RunRecord) -> str:
    if not record.stage_numbers:
        return ""
    header = ("stage", "layers", "busy", "forward", "backward", "tokens/s", "memory", "peak")
    return _table(header, [_stage_row(record, number) for number in record.stage_numbers])


def _stage_row(record: RunRecord, number: int) -> list[str]:
    def last(name: str) -> float | None:
        return record.last(f"stage/{number}/{name}")

    def shown(name: str, form: str) -> str:
        value = last(name)
        return "–" if value is None else form.format(value)

    def in_memory(name: str) -> str:
        value = last(name)
        return "–" if value is None else in_bytes(value)

    busy = last("busy_share")
    return [
        f"{number} · {record.worker_of(number)}",
        _layers_of(record, number),
        "–" if busy is None else in_percent(busy),
        shown("forward_ms", "{:.3g} ms"),
        shown("backward_ms", "{:.3g} ms"),
        shown("tokens_per_second", "{:,.0f}"),
        in_memory("memory_bytes"),
        in_memory("memory_peak_bytes"),
    ]


def _layers_of(record: RunRecord, number: int) -> str:
    for stage in [] if record.plan is None else record.plan.stages:
        if stage.worker == record.worker_of(number):
            first, end = stage.layers
            return f"{first} to {end - 1}" if end > first else "none"
    return "–"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = element("tr", *(element("th", escaped(cell)) for cell in header))
    body = (element("tr", *(element("td", escaped(cell)) for cell in row)) for row in rows)
    return element("table", head, *body)


def _bullets(sentences: Sequence[str]) -> str:
    return element("ul", *(element("li", escaped(sentence)) for sentence in sentences))


def _no_monitor() -> str:
    return _missing(
        "No metrics of the stages in metrics.csv: give the Trainer the callback StageMonitor and a "
        "CSVLogger."
    )


def _missing(sentence: str) -> str:
    return element("p", escaped(sentence), class_="aside")


def _image(svg: str, words: str) -> str:
    """A picture that was a file: as an image it can run nothing, whatever is in it."""
    data = base64.b64encode(svg.encode()).decode()
    return element("img", src=f"data:image/svg+xml;base64,{data}", alt=words)
