"""Charts as SVG: lines over steps, and shares of the time over steps.

A step as a picture: a row for each stage, as it happened and as it was predicted.

Where a row is hatched the stage computes nothing: the bubble.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..protocol.messages import SpanKind
from ..telemetry.prediction import Prediction
from ..telemetry.step import RecordedStep, StageSpans
from .svg import HUES, Point, element, elided, escaped, hue, rectangle, text, width_of

Curve = Sequence[tuple[float, float]]
"""Steps with their values, in the order of the steps."""

WIDTH = 880.0
MOST_POINTS = 400

_LEFT = 64.0
_RIGHT = 16.0
_TOP = 34.0
_FOOT = 28.0
_BAND = 44.0
_LABEL = 190.0
# What floating point may be off by without a further tick.
_HAIR = 1e-9


@dataclass(frozen=True)
class _Frame:
    """Where values are on the paper."""

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


def line_chart(
    curves: Mapping[str, Curve], label: str, height: float = 250.0, from_zero: bool = False
) -> str:
    """A line for each curve, over its steps; values that are no numbers are left out."""
    finite = {name: _finite(curve) for name, curve in curves.items() if _finite(curve)}
    points = [point for curve in finite.values() for point in curve]
    if not points:
        return ""
    least = min(value for _, value in points)
    ticks = nice_ticks(min(least, 0.0) if from_zero else least, max(v for _, v in points))
    frame = _Frame(
        _reach(step for step, _ in points),
        (ticks[0], ticks[-1]),
        *(_LEFT, WIDTH - _LEFT - _RIGHT, _TOP, height - _TOP - _FOOT),
    )
    parts = [*_grid(frame, ticks), *_step_axis(frame)]
    for number, curve in enumerate(finite.values()):
        parts.append(_line(frame, curve, number))
    return _chart(
        height, label, _legend({name: hue(number) for number, name in enumerate(finite)}), *parts
    )


def shares_chart(
    rows: Mapping[str, Mapping[str, Curve]], colours: Mapping[str, str], label: str
) -> str:
    """A band for each row: its kinds of shares upon each other over the steps.

    Args:
        rows: For each row, the share of each kind at the steps.
        colours: The class of each kind, from below.
        label: What the chart is of.
    """
    steps = [step for kinds_of in rows.values() for curve in kinds_of.values() for step, _ in curve]
    if not steps:
        return ""
    reach = _reach(steps)
    parts = []
    y = _TOP
    for name, curves in rows.items():
        frame = _Frame(reach, (0, 1), _LABEL, WIDTH - _LABEL - _RIGHT - 56, y, _BAND - 12)
        parts.append(text(0, y + 20, elided(name, _LABEL - 12, 12), "normal ink"))
        parts += _bands(frame, curves, colours)
        parts.append(
            text(WIDTH - _RIGHT, y + 20, _last(curves, next(iter(colours))), "normal soft", "end")
        )
        y += _BAND
    end = _Frame(reach, (0, 1), _LABEL, WIDTH - _LABEL - _RIGHT - 56, y - _BAND, _BAND - 12)
    return _chart(y + _FOOT - 12, label, _legend(colours), *parts, *_step_axis(end))


def nice_ticks(least: float, most: float, count: int = 5) -> list[float]:
    """Round values around all of these, evenly apart."""
    if most <= least:
        room = abs(least) * 0.1 or 1.0
        least, most = least - room, most + room
    rough = (most - least) / count
    size = 10.0 ** math.floor(math.log10(rough))
    apart = next(
        size * each for each in (1, 2, 2.5, 5, 10, 20) if size * each >= rough * (1 - _HAIR)
    )
    first, last = math.floor(least / apart + _HAIR), math.ceil(most / apart - _HAIR)
    return [apart * number for number in range(first, last + 1)]


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """At most so many points, with the extremes of what is left out."""
    if len(curve) <= most:
        return curve
    size = math.ceil(len(curve) / (most // 2))
    found: list[tuple[float, float]] = []
    for start in range(0, len(curve), size):
        part = curve[start : start + size]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        found += sorted(ends)
    return found


def _chart(height: float, label: str, *parts: str) -> str:
    return element(
        "svg",
        element("title", escaped(label)),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        class_="hetero",
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
    )


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
    # As few as tell the ticks apart: one for 0.5, two for 0.25.
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
    yield text(frame.left + frame.width, y, f"step {last:,.0f}", "small soft", "end")


def _line(frame: _Frame, curve: Curve, number: int) -> str:
    points = [frame.place(*point) for point in thinned(curve)]
    if len(points) == 1:
        ((x, y),) = points
        return element("circle", cx=x, cy=y, r=3.0, class_=hue(number))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return element("polyline", points=path, class_=f"trace stroke-{number % len(HUES)}")


def _bands(frame: _Frame, curves: Mapping[str, Curve], colours: Mapping[str, str]) -> Iterator[str]:
    """Areas upon each other; a kind without a value at a step has none there."""
    yield rectangle(frame.left, frame.top, frame.width, frame.height, "track", radius=3)
    steps = sorted({step for curve in curves.values() for step, _ in _finite(curve)})
    steps = steps[:: math.ceil(len(steps) / MOST_POINTS)] if steps else []
    below = [0.0] * len(steps)
    # One step alone is shown as if it had lasted.
    shown = [frame.x[0], frame.x[1]] if len(steps) == 1 else steps
    for kind, colour in colours.items():
        values = dict(_finite(curves.get(kind, ())))
        above = [
            min(1.0, base + max(0.0, values.get(step, 0.0)))
            for base, step in zip(below, steps, strict=True)
        ]
        yield _area(frame, shown, _stretched(below, shown), _stretched(above, shown), colour)
        below = above


def _area(
    frame: _Frame,
    steps: Sequence[float],
    below: Sequence[float],
    above: Sequence[float],
    colour: str,
) -> str:
    there = [frame.place(*point) for point in zip(steps, above, strict=True)]
    back = [frame.place(*point) for point in zip(steps, below, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*there, *reversed(back)])
    return element("polygon", points=path, class_=colour) if path else ""


def _stretched(values: Sequence[float], steps: Sequence[float]) -> Sequence[float]:
    return values if len(values) == len(steps) else [values[0]] * len(steps)


def _last(curves: Mapping[str, Curve], kind: str) -> str:
    """The present share of a kind."""
    curve = _finite(curves.get(kind, ()))
    return f"{100 * curve[-1][1]:.0f} %" if curve else ""


def _finite(curve: Curve) -> list[tuple[float, float]]:
    return [(step, value) for step, value in curve if math.isfinite(value)]


def _reach(values: Sequence[float] | Iterator[float]) -> tuple[float, float]:
    known = list(values)
    return min(known), max(known)


def _share(value: float, least: float, most: float) -> float:
    return (value - least) / (most - least) if most > least else 0.5


_WIDTH = 1200
_LABELS = 190
_SHARES = 70
_MARGIN = 24
_ROW = 34
_BAR = 24
_TITLE = 30
_AXIS = 26
_LEGEND = 34
_TEXT_SIZE, _NUMBER_SIZE = 12, 11
# Pixels of a bar that its number leaves free.
_AROUND = 3

_COLORS: dict[SpanKind, str] = {
    "forward": "#3b82c4",
    "backward": "#d9822b",
    "loss": "#8b5fbf",
    "optimizer": "#3a9d6e",
}
_NAMES: dict[SpanKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "loss": "head, loss and its backward",
    "optimizer": "optimizer",
}
_STYLE = (
    "text{font-family:'DejaVu Sans',Verdana,sans-serif;fill:#1f2733}"
    f"text{{font-size:{_TEXT_SIZE}px}}.inside,.axis{{font-size:{_NUMBER_SIZE}px}}"
    ".title{font-size:14px;font-weight:bold}.inside{fill:#fff;text-anchor:middle}"
    ".axis{fill:#667085;text-anchor:middle}.share{text-anchor:end}"
    ".line{stroke:#d0d5dd;stroke-width:1}"
)
_HATCH = (
    '<defs><pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f2f4f7"/>'
    '<line x1="0" y1="0" x2="0" y2="6" stroke="#c4cad4" stroke-width="2"/></pattern></defs>'
)


@dataclass(frozen=True)
class _Bar:
    kind: SpanKind
    title: str
    number: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class _Panel:
    """Rows under one title, from the first action on."""

    title: str
    seconds: float
    rows: Sequence[tuple[str, float, Sequence[_Bar]]]

    @property
    def height(self) -> float:
        return _TITLE + _ROW * len(self.rows)


def chart_of(step: RecordedStep, prediction: Prediction | None) -> str:
    """The picture as SVG; it needs nothing else."""
    panels = [_measured(step)]
    if prediction is not None:
        panels.append(_predicted(step, prediction))
    longest = max(panel.seconds for panel in panels) or 1e-9
    height = 2 * _MARGIN + sum(panel.height for panel in panels) + _AXIS + _LEGEND
    scale = (_WIDTH - 2 * _MARGIN - _LABELS - _SHARES) / longest
    parts: list[str] = []
    top = float(_MARGIN)
    for panel in panels:
        parts += _drawn(panel, top, scale)
        top += panel.height
    parts += _axis(longest, top, scale)
    parts += _step_legend(top + _AXIS)
    body = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
        f'width="{_WIDTH}" height="{height:.0f}" role="img"><style>{_STYLE}</style>{_HATCH}'
        f'<rect width="{_WIDTH}" height="{height:.0f}" fill="#fff"/>{body}</svg>\n'
    )


def _measured(step: RecordedStep) -> _Panel:
    zero = step.first_action_seconds
    rows = [
        (_label(stage), _busy_share(stage.computing_seconds, step.seconds), _bars(stage, zero))
        for stage in step.stages
    ]
    title = f"Step {step.step} as it was: {_milliseconds(step.seconds)}, bubble {step.bubble:.0%}"
    return _Panel(title, step.end_seconds - zero, rows)


def _bars(stage: StageSpans, zero: float) -> list[_Bar]:
    return [
        _Bar(
            span.kind,
            stage.name_of(span),
            "" if span.microbatch is None else str(span.microbatch),
            span.start_seconds - zero,
            span.end_seconds - zero,
        )
        for span in stage.actions
    ]


def _predicted(step: RecordedStep, prediction: Prediction) -> _Panel:
    rows = []
    for stage in step.stages:
        own = [span for span in prediction.spans if span.stage == stage.stage]
        bars = [
            _Bar(s.kind, s.name, _number_in(s.name), s.start_seconds, s.end_seconds) for s in own
        ]
        busy = sum(bar.end_seconds - bar.start_seconds for bar in bars)
        rows.append((_label(stage), _busy_share(busy, prediction.seconds), bars))
    sources = {"profile": "by what was measured before", "this step's own times": "by its means"}
    title = (
        f"Simulated {sources[prediction.source]}: {_milliseconds(prediction.seconds)}, "
        f"bubble {prediction.bubble:.0%}"
    )
    return _Panel(title, prediction.seconds, rows)


def _drawn(panel: _Panel, top: float, scale: float) -> Iterator[str]:
    left = _MARGIN + _LABELS
    yield _text(_MARGIN, top + 16, panel.title, "title")
    for index, (label, share, bars) in enumerate(panel.rows):
        y = top + _TITLE + index * _ROW
        yield _text(_MARGIN, y + 16, elided(label, _LABELS - 8, _TEXT_SIZE), "label")
        size = f'width="{panel.seconds * scale:.2f}" height="{_BAR}"'
        yield f'<rect x="{left}" y="{y:.1f}" {size} fill="url(#bubble)"/>'
        for bar in bars:
            yield from _bar(bar, left, y, scale)
        yield _text(_WIDTH - _MARGIN, y + 16, f"{share:.0%} busy", "share")


def _bar(bar: _Bar, left: float, y: float, scale: float) -> Iterator[str]:
    x = left + bar.start_seconds * scale
    width = (bar.end_seconds - bar.start_seconds) * scale
    title = f"{bar.title}: {_milliseconds(bar.end_seconds - bar.start_seconds)}"
    # A hair's breadth apart, so that neighbours are told from each other.
    shown = max(0.4, width - 0.6)
    yield (
        f'<rect class="{bar.kind}" x="{x:.2f}" y="{y:.1f}" width="{shown:.2f}" height="{_BAR}" '
        f'fill="{_COLORS[bar.kind]}"><title>{html.escape(title)}</title></rect>'
    )
    if bar.number and width >= width_of(bar.number, _NUMBER_SIZE) + _AROUND:
        yield _text(x + width / 2, y + 16, bar.number, "inside")


def _axis(longest: float, top: float, scale: float) -> Iterator[str]:
    left = _MARGIN + _LABELS
    every = _round_number(longest / 8)
    for index in range(int(longest / every) + 1):
        x = left + index * every * scale
        yield f'<line class="line" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{top + 6:.1f}"/>'
        yield _text(x, top + 20, _milliseconds(index * every), "axis")


def _step_legend(top: float) -> Iterator[str]:
    x = float(_MARGIN + _LABELS)
    shown = [(_COLORS[kind], name) for kind, name in _NAMES.items()]
    for fill, name in [*shown, ("url(#bubble)", "bubble")]:
        yield f'<rect x="{x:.1f}" y="{top + 8:.1f}" width="14" height="14" fill="{fill}"/>'
        yield _text(x + 20, top + 19, name, "legend")
        x += 20 + width_of(name, _TEXT_SIZE) + 30


def _text(x: float, y: float, content: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{html.escape(content)}</text>'


def _label(stage: StageSpans) -> str:
    return stage.worker if stage.stage == 0 else f"stage {stage.stage}: {stage.worker}"


def _number_in(name: str) -> str:
    return name.lstrip("0123456789")[1:] if name[0].isdigit() else ""


def _busy_share(busy: float, seconds: float) -> float:
    return busy / seconds if seconds > 0 else 0.0


def _milliseconds(seconds: float) -> str:
    # Whatever is rounded to a thousand would be shown with an exponent.
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def _round_number(value: float) -> float:
    """1, 2 or 5 times a power of ten, not below the value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= value * (1 - 1e-9))
