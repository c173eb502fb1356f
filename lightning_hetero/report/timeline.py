"""The timeline of one step as SVG: a row of bars for each process, as recorded and as predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..protocol.fields import Span
from ..telemetry.layer_ranges import stages_as_text
from ..telemetry.recorded_step import Absence, Prediction, ProcessSpans, RecordedStep, name_of
from ..units import in_duration, in_percent, time_unit
from . import svg
from .charts import legend, nice_ticks

# In pixels.
_STEP_WIDTH = 960.0
_STEP_LABEL = 190.0
_STEP_SHARE = 70.0
_MARGIN = 24.0
_ROW = 34.0
_BAR = 24.0
_LINE = 13.0
_MOST_LINES = 6
_TITLE = 30.0
_AXIS = 26.0
_LEGEND = 34.0
# Free pixels of a bar around its number.
_AROUND = 3

_ACTIONS: dict[str, str] = {
    "forward": "forward",
    "backward": "backward",
    "head, loss and its backward": "loss",
    "optimizer": "optimizer",
    "bubble": "bubble",
}
_ABSENCES: dict[str, str] = {"lost": "lost", "repeats": "repeats"}
_HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path d="M0 0V6" class="hatch"/></pattern></defs>'
    "<style>.hetero .bubble{fill:url(#hatch)}</style>"
)


@dataclass(frozen=True)
class _Panel:
    """The rows under one title, one for each process.

    Args:
        title: Names the panel.
        processes: The actions of each row.
        start_seconds: When the first action starts, on the clock of the actions.
        row_seconds: The time from there to the end of a row.
        step_seconds: The duration of the step; the busy shares are parts of it.
        absences: When processes were lost and replaced.
    """

    title: str
    processes: Sequence[ProcessSpans]
    start_seconds: float
    row_seconds: float
    step_seconds: float
    absences: Sequence[Absence] = ()

    @property
    def height(self) -> float:
        return _TITLE + self.row_height * len(self.processes)

    @property
    def row_height(self) -> float:
        """The height of a row, with room for the longest list of layers below a name."""
        return _ROW + _LINE * (max(len(_layer_lines(each)) for each in self.processes) - 1)


def chart_of(step: RecordedStep, prediction: Prediction | None) -> str:
    """A step as an SVG file: a row for each process, as recorded and as predicted.

    A process is idle where its row is hatched: the bubble.
    """
    panels = [_measured(step)]
    if prediction is not None:
        panels.append(_predicted(prediction))
    longest = max(panel.row_seconds for panel in panels) or 1e-9
    left = _MARGIN + _STEP_LABEL
    scale = (_STEP_WIDTH - left - _STEP_SHARE - _MARGIN) / longest
    parts: list[str] = []
    top = _MARGIN
    for panel in panels:
        parts.append(svg.moved(0, top, *_drawn(panel, left, scale)))
        top += panel.height
    parts.append(svg.moved(left, top, *_seconds_axis(longest, scale)))
    shown = _ACTIONS | (_ABSENCES if step.absences else {})
    parts.append(svg.moved(left, top + _AXIS + 4, legend(shown)))
    height = top + _AXIS + _LEGEND + _MARGIN
    return svg.picture_file(_STEP_WIDTH, height, f"Step {step.step}", _HATCH, *parts) + "\n"


def _measured(step: RecordedStep) -> _Panel:
    lasted, bubble = in_duration(step.seconds), in_percent(step.bubble)
    title = f"Step {step.step} as recorded: {lasted}, bubble {bubble}"
    start = step.first_action_seconds
    lasted_seconds = step.end_seconds - start
    return _Panel(title, step.processes, start, lasted_seconds, step.seconds, step.absences)


def _predicted(prediction: Prediction) -> _Panel:
    lasts, bubble = in_duration(prediction.seconds), in_percent(prediction.bubble)
    title = f"Simulated from the profile: {lasts}, bubble {bubble}"
    return _Panel(title, prediction.processes, 0.0, prediction.seconds, prediction.seconds)


def _drawn(panel: _Panel, left: float, scale: float) -> Iterator[str]:
    yield svg.text(_MARGIN, 16, panel.title, "name ink")
    for index, process in enumerate(panel.processes):
        y = _TITLE + index * panel.row_height
        yield _label(process, y)
        yield svg.rectangle(left, y, panel.row_seconds * scale, _BAR, "bubble")
        for away in panel.absences:
            if away.number == process.number:
                yield from _absence(away, panel.start_seconds, left, y, scale)
        # All actions of the coordinator have the number 0.
        has_stages = process.number > 0 and len({each.stage for each in process.ranges}) > 1
        for span in process.actions:
            x = left + (span.start_seconds - panel.start_seconds) * scale
            yield from _action(span, has_stages, x, y, scale)
        share = process.computing_seconds / panel.step_seconds if panel.step_seconds > 0 else 0.0
        yield svg.text(
            _STEP_WIDTH - _MARGIN, y + 16, f"{in_percent(share)} busy", "normal ink", "end"
        )


def _absence(
    away: Absence, start_seconds: float, left: float, y: float, scale: float
) -> Iterator[str]:
    """Two bars: until another process had the layers, and while it repeated the lost work."""
    parts = {
        "lost": (f"lost: {away.reason}", away.start_seconds, away.restored_seconds),
        "repeats": (f"repeats {away.repeated}", away.restored_seconds, away.end_seconds),
    }
    for kind, (said, start, end) in parts.items():
        first = max(start, start_seconds)
        width = max(0.4, (end - first) * scale)
        bar = svg.rectangle(left + (first - start_seconds) * scale, y, width, _BAR, kind)
        yield svg.titled(f"{said}: {in_duration(end - start)}", bar)


def _label(process: ProcessSpans, y: float) -> str:
    """The name of a process, and below it its layers by stages."""
    name = svg.text(_MARGIN, y + 9, svg.elided(process.name, _STEP_LABEL - 8, 12), "normal ink")
    layers = [
        svg.text(_MARGIN, y + 22 + number * _LINE, line, "small soft")
        for number, line in enumerate(_layer_lines(process))
    ]
    return svg.titled(f"{process.name}: {stages_as_text(process.ranges)}", name, *layers)


def _layer_lines(process: ProcessSpans) -> list[str]:
    """The layers by stages in lines; a line ends between two stages."""
    whole = stages_as_text(process.ranges).replace(" ", "\N{NO-BREAK SPACE}")
    parted = whole.replace(",\N{NO-BREAK SPACE}stage", ", stage")
    return svg.wrapped(parted, _STEP_LABEL - 8, 11, _MOST_LINES)


def _action(span: Span, has_stages: bool, x: float, y: float, scale: float) -> Iterator[str]:
    """A bar with its micro-batch, or with its whole name if the process has several stages."""
    name, seconds = name_of(span), span.end_seconds - span.start_seconds
    width = seconds * scale
    # A narrow gap separates neighbouring bars.
    shown = svg.rectangle(x, y, max(0.4, width - 0.6), _BAR, span.kind)
    yield svg.titled(f"{name}: {in_duration(seconds)}", shown)
    if span.microbatch is None:
        return
    said = name if has_stages else str(span.microbatch)
    if width >= svg.width_of(said, 12) + _AROUND:
        yield svg.text(x + width / 2, y + 16, said, "inside", "middle")


def _seconds_axis(longest: float, scale: float) -> Iterator[str]:
    size, unit = time_unit(longest)
    for tick in nice_ticks(0.0, longest / size, 6):
        if tick * size <= longest:
            x = tick * size * scale
            yield svg.element("path", d=f"M{x:.1f} 0V6", class_="grid")
            yield svg.text(x, 20, f"{tick:,.6g} {unit}", "small soft", "middle")
