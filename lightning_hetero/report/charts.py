"""Charts as SVG: curves over steps, shares of the time over steps, and what happens in one step."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..protocol.fields import Span
from ..telemetry.layer_ranges import stages_as_text
from ..telemetry.step import Absence, Prediction, ProcessSpans, RecordedStep, name_of
from ..units import in_duration, in_percent, time_unit
from .svg import (
    HUES,
    Point,
    element,
    elided,
    hue,
    moved,
    picture,
    picture_file,
    rectangle,
    text,
    titled,
    width_of,
    wrapped,
)

Curve = Sequence[tuple[float, float]]
"""Pairs of a step and its value, ordered by step."""

WIDTH = 880.0
MOST_POINTS = 400

_LEFT = 64.0
_RIGHT = 16.0
_TOP = 34.0
_FOOT = 28.0
_BAND = 44.0
_LABEL = 190.0
# Rounding errors below this add no tick.
_HAIR = 1e-9


@dataclass(frozen=True)
class _Frame:
    """Maps steps and values to points of the picture."""

    x: tuple[float, float]
    y: tuple[float, float]
    left: float
    width: float
    top: float
    height: float

    def place(self, step: float, value: float) -> Point:
        return (
            self.left + self.width * _share(step, *self.x),
            self.top + self.height * (1 - _share(value, *self.y)),
        )

    def path(self, curve: Curve) -> str:
        """The points of a curve as the value of an attribute."""
        places = (self.place(*point) for point in curve)
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def line_chart(
    curves: Mapping[str, Curve], label: str, height: float = 250.0, from_zero: bool = False
) -> str:
    """A line for each curve over its steps. Values that are not finite are skipped. The chart is
    empty if no value is finite."""
    finite = {name: _finite(curve) for name, curve in curves.items() if _finite(curve)}
    if not finite:
        return ""
    steps, values = zip(*(point for curve in finite.values() for point in curve), strict=True)
    ticks = nice_ticks(min(*values, 0.0) if from_zero else min(values), max(values))
    room = WIDTH - _LEFT - _RIGHT
    reach = min(steps), max(steps)
    frame = _Frame(reach, (ticks[0], ticks[-1]), _LEFT, room, _TOP, height - _TOP - _FOOT)
    lines = [_line(frame, curve, number) for number, curve in enumerate(finite.values())]
    legend = _legend({name: hue(number) for number, name in enumerate(finite)})
    return picture(WIDTH, height, label, legend, *_grid(frame, ticks), *_step_axis(frame), *lines)


def shares_chart(
    rows: Mapping[str, Mapping[str, Curve]], colours: Mapping[str, str], label: str
) -> str:
    """A band for each row, in which the shares of all kinds are stacked over the steps; behind it
    the `typical` share of the first kind.

    Args:
        rows: For each row, the curve of each kind.
        colours: The style class of each kind, from the bottom of the stack.
        label: The chart's title.
    """
    steps = [step for kinds_of in rows.values() for curve in kinds_of.values() for step, _ in curve]
    if not steps:
        return ""
    reach, room = (min(steps), max(steps)), WIDTH - _LABEL - _RIGHT - 56
    parts = []
    for index, (name, curves) in enumerate(rows.items()):
        y = _TOP + index * _BAND
        frame = _Frame(reach, (0, 1), _LABEL, room, y, _BAND - 12)
        parts.append(text(0, y + 20, elided(name, _LABEL - 12, 12), "normal ink"))
        parts += _bands(frame, curves, colours)
        share = typical(curves.get(next(iter(colours)), ()))
        said = "" if share is None else in_percent(share)
        parts.append(text(WIDTH - _RIGHT, y + 20, said, "normal soft", "end"))
    height = _TOP + len(rows) * _BAND + _FOOT - 12
    return picture(WIDTH, height, label, _legend(colours), *parts, *_step_axis(frame))


def nice_ticks(least: float, most: float, count: int = 5) -> list[float]:
    """Evenly spaced round values that enclose ``least`` and ``most``."""
    # A difference that has no logarithm, or that is lost beside the values, counts as none.
    if most - least < max(sys.float_info.min * count, _HAIR * max(abs(least), abs(most))):
        room = abs(least) * 0.1 or 1.0
        least, most = least - room, most + room
    rough = (most - least) / count
    size = 10.0 ** math.floor(math.log10(rough))
    apart = next(
        size * each for each in (1, 2, 2.5, 5, 10, 20) if size * each >= rough * (1 - _HAIR)
    )
    first, last = math.floor(least / apart + _HAIR), math.ceil(most / apart - _HAIR)
    return [apart * number for number in range(first, last + 1)]


def typical(curve: Curve) -> float | None:
    """The median over the last half of a curve, without its start; None without a finite value."""
    values = [value for _, value in curve[len(curve) // 2 :] if math.isfinite(value)]
    return statistics.median(values) if values else None


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """The curve with at most ``most`` points; each run of points keeps its extremes."""
    if len(curve) <= most:
        return curve
    size = math.ceil(len(curve) / (most // 2))
    found: list[tuple[float, float]] = []
    for start in range(0, len(curve), size):
        part = curve[start : start + size]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        found += sorted(ends)
    return found


def _legend(colours: Mapping[str, str]) -> str:
    parts, x = [], 0.0
    for name, colour in colours.items():
        said = elided(name, 220, 12)
        if x + 18 + width_of(said, 12) > WIDTH:
            break
        parts.append(rectangle(x, 5, 12, 12, colour, radius=3))
        parts.append(text(x + 18, 15.5, said, "normal soft"))
        x += 18 + width_of(said, 12) + 20
    return "".join(parts)


def _grid(frame: _Frame, ticks: Sequence[float]) -> Iterator[str]:
    apart = ticks[1] - ticks[0]
    # The fewest digits that write every tick exactly: one for 0.5, two for 0.25.
    digits = next((n for n in range(6) if abs(round(apart, n) - apart) < 1e-6 * apart), 6)
    for tick in ticks:
        _, y = frame.place(frame.x[0], tick)
        path = f"M{frame.left:g} {y:.1f}H{frame.left + frame.width:g}"
        yield element("path", d=path, class_="grid")
        said = f"{tick:,.{digits}f}"
        yield text(frame.left - 8, y + 4, elided(said, _LEFT - 8, 11), "small soft", "end")


def _step_axis(frame: _Frame) -> Iterator[str]:
    first, last = frame.x
    y = frame.top + frame.height + 18
    yield text(frame.left, y, f"step {first:,.0f}", "small soft")
    yield text(frame.left + frame.width / 2, y, "optimizer steps", "small soft", "middle")
    yield text(frame.left + frame.width, y, f"step {last:,.0f}", "small soft", "end")


def _line(frame: _Frame, curve: Curve, number: int) -> str:
    if len(curve) == 1:
        x, y = frame.place(*curve[0])
        return element("circle", cx=x, cy=y, r=3.0, class_=hue(number))
    path = frame.path(thinned(curve))
    return element("polyline", points=path, class_=f"trace stroke-{number % len(HUES)}")


def _bands(frame: _Frame, curves: Mapping[str, Curve], colours: Mapping[str, str]) -> Iterator[str]:
    """Stacked areas; a kind without a value at a step has height zero there."""
    yield rectangle(frame.left, frame.top, frame.width, frame.height, "track", radius=3)
    steps = sorted({step for curve in curves.values() for step, _ in _finite(curve)})
    if not steps:
        return
    steps = steps[:: math.ceil(len(steps) / MOST_POINTS)]
    # A single step is drawn over the whole width.
    steps, shown = (steps * 2, frame.x) if len(steps) == 1 else (steps, steps)
    below = [(place, 0.0) for place in shown]
    for kind, colour in colours.items():
        values = dict(_finite(curves.get(kind, ())))
        above = [
            (place, min(1.0, base + max(0.0, values.get(step, 0.0))))
            for (place, base), step in zip(below, steps, strict=True)
        ]
        yield element("polygon", points=frame.path([*above, *reversed(below)]), class_=colour)
        below = above


def _finite(curve: Curve) -> list[tuple[float, float]]:
    return [(step, value) for step, value in curve if math.isfinite(value)]


def _share(value: float, least: float, most: float) -> float:
    return (value - least) / (most - least) if most > least else 0.5


# The step chart, in pixels.
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
        step_seconds: The duration of the step, of which the busy shares are parts.
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

    A process computes nothing where its row is hatched: the bubble.
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
        parts.append(moved(0, top, *_drawn(panel, left, scale)))
        top += panel.height
    parts.append(moved(left, top, *_seconds_axis(longest, scale)))
    shown = _ACTIONS | (_ABSENCES if step.absences else {})
    parts.append(moved(left, top + _AXIS + 4, _legend(shown)))
    height = top + _AXIS + _LEGEND + _MARGIN
    return picture_file(_STEP_WIDTH, height, f"Step {step.step}", _HATCH, *parts) + "\n"


def _measured(step: RecordedStep) -> _Panel:
    lasted, bubble = in_duration(step.seconds), in_percent(step.bubble)
    title = f"Step {step.step} as recorded: {lasted}, bubble {bubble}"
    start = step.first_action_seconds
    lasted_seconds = step.end_seconds - start
    return _Panel(title, step.processes, start, lasted_seconds, step.seconds, step.absences)


def _predicted(prediction: Prediction) -> _Panel:
    sources = {
        "profile": "from the profile",
        "this step's own times": "from the mean times of this step",
    }
    title = (
        f"Simulated {sources[prediction.source]}: {in_duration(prediction.seconds)}, "
        f"bubble {in_percent(prediction.bubble)}"
    )
    return _Panel(title, prediction.processes, 0.0, prediction.seconds, prediction.seconds)


def _drawn(panel: _Panel, left: float, scale: float) -> Iterator[str]:
    yield text(_MARGIN, 16, panel.title, "name ink")
    for index, process in enumerate(panel.processes):
        y = _TITLE + index * panel.row_height
        yield _label(process, y)
        yield rectangle(left, y, panel.row_seconds * scale, _BAR, "bubble")
        for away in panel.absences:
            if away.number == process.number:
                yield from _absence(away, panel.start_seconds, left, y, scale)
        # All actions of the coordinator have the number 0.
        has_stages = process.number > 0 and len({each.stage for each in process.ranges}) > 1
        for span in process.actions:
            x = left + (span.start_seconds - panel.start_seconds) * scale
            yield from _action(span, has_stages, x, y, scale)
        share = process.computing_seconds / panel.step_seconds if panel.step_seconds > 0 else 0.0
        yield text(_STEP_WIDTH - _MARGIN, y + 16, f"{in_percent(share)} busy", "normal ink", "end")


def _absence(
    away: Absence, start_seconds: float, left: float, y: float, scale: float
) -> Iterator[str]:
    """Two bars: until another process had the layers, and while it repeated what was lost."""
    parts = {
        "lost": (f"lost: {away.reason}", away.start_seconds, away.restored_seconds),
        "repeats": (f"repeats {away.repeated}", away.restored_seconds, away.end_seconds),
    }
    for kind, (said, start, end) in parts.items():
        first = max(start, start_seconds)
        width = max(0.4, (end - first) * scale)
        bar = rectangle(left + (first - start_seconds) * scale, y, width, _BAR, kind)
        yield titled(f"{said}: {in_duration(end - start)}", bar)


def _label(process: ProcessSpans, y: float) -> str:
    """The name of a process, and below it its layers by stages."""
    name = text(_MARGIN, y + 9, elided(process.name, _STEP_LABEL - 8, 12), "normal ink")
    layers = [
        text(_MARGIN, y + 22 + number * _LINE, line, "small soft")
        for number, line in enumerate(_layer_lines(process))
    ]
    return titled(f"{process.name}: {stages_as_text(process.ranges)}", name, *layers)


def _layer_lines(process: ProcessSpans) -> list[str]:
    """The layers by stages in lines that end between stages."""
    whole = stages_as_text(process.ranges).replace(" ", "\N{NO-BREAK SPACE}")
    parted = whole.replace(",\N{NO-BREAK SPACE}stage", ", stage")
    return wrapped(parted, _STEP_LABEL - 8, 11, _MOST_LINES)


def _action(span: Span, has_stages: bool, x: float, y: float, scale: float) -> Iterator[str]:
    """A bar with its micro-batch, or with its whole name if the process has several stages."""
    name, seconds = name_of(span), span.end_seconds - span.start_seconds
    width = seconds * scale
    # A narrow gap separates neighbouring bars.
    shown = rectangle(x, y, max(0.4, width - 0.6), _BAR, span.kind)
    yield titled(f"{name}: {in_duration(seconds)}", shown)
    if span.microbatch is None:
        return
    said = name if has_stages else str(span.microbatch)
    if width >= width_of(said, 12) + _AROUND:
        yield text(x + width / 2, y + 16, said, "inside", "middle")


def _seconds_axis(longest: float, scale: float) -> Iterator[str]:
    size, unit = time_unit(longest)
    for tick in nice_ticks(0.0, longest / size, 6):
        if tick * size <= longest:
            x = tick * size * scale
            yield element("path", d=f"M{x:.1f} 0V6", class_="grid")
            yield text(x, 20, f"{tick:,.6g} {unit}", "small soft", "middle")
