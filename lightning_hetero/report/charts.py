"""Charts as SVG: curves over steps, and shares of the time over steps."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..units import in_percent
from . import svg
from .svg import Point

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
    """A line for each curve over its steps. Infinite and missing values are skipped. Without a
    finite value, the chart is empty.
    """
    finite = {name: _finite(curve) for name, curve in curves.items() if _finite(curve)}
    if not finite:
        return ""
    steps, values = zip(*(point for curve in finite.values() for point in curve), strict=True)
    ticks = nice_ticks(min(*values, 0.0) if from_zero else min(values), max(values))
    room = WIDTH - _LEFT - _RIGHT
    reach = min(steps), max(steps)
    frame = _Frame(reach, (ticks[0], ticks[-1]), _LEFT, room, _TOP, height - _TOP - _FOOT)
    lines = [_line(frame, curve, number) for number, curve in enumerate(finite.values())]
    kinds = legend({name: svg.hue(number) for number, name in enumerate(finite)})
    return svg.picture(
        WIDTH, height, label, kinds, *_grid(frame, ticks), *_step_axis(frame), *lines
    )


def shares_chart(
    rows: Mapping[str, Mapping[str, Curve]], colours: Mapping[str, str], label: str
) -> str:
    """A band for each row: the stacked shares of all kinds over the steps, and after it the
    `typical` share of the first kind.

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
        parts.append(svg.text(0, y + 20, svg.elided(name, _LABEL - 12, 12), "normal ink"))
        parts += _bands(frame, curves, colours)
        share = typical(curves.get(next(iter(colours)), ()))
        said = "" if share is None else in_percent(share)
        parts.append(svg.text(WIDTH - _RIGHT, y + 20, said, "normal soft", "end"))
    height = _TOP + len(rows) * _BAND + _FOOT - 12
    return svg.picture(WIDTH, height, label, legend(colours), *parts, *_step_axis(frame))


def nice_ticks(least: float, most: float, count: int = 5) -> list[float]:
    """Evenly spaced round values around ``least`` and ``most``."""
    # A difference without a logarithm, or lost beside the values, counts as zero.
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
    """The median over the last half of a curve, without its start, if it has a finite value."""
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


def legend(colours: Mapping[str, str]) -> str:
    """The kinds of a picture, each after its colour."""
    parts, x = [], 0.0
    for name, colour in colours.items():
        said = svg.elided(name, 220, 12)
        if x + 18 + svg.width_of(said, 12) > WIDTH:
            break
        parts.append(svg.rectangle(x, 5, 12, 12, colour, radius=3))
        parts.append(svg.text(x + 18, 15.5, said, "normal soft"))
        x += 18 + svg.width_of(said, 12) + 20
    return "".join(parts)


def _grid(frame: _Frame, ticks: Sequence[float]) -> Iterator[str]:
    apart = ticks[1] - ticks[0]
    # The fewest digits to write every tick exactly: one for 0.5, two for 0.25.
    digits = next((n for n in range(6) if abs(round(apart, n) - apart) < 1e-6 * apart), 6)
    for tick in ticks:
        _, y = frame.place(frame.x[0], tick)
        path = f"M{frame.left:g} {y:.1f}H{frame.left + frame.width:g}"
        yield svg.element("path", d=path, class_="grid")
        said = f"{tick:,.{digits}f}"
        yield svg.text(frame.left - 8, y + 4, svg.elided(said, _LEFT - 8, 11), "small soft", "end")


def _step_axis(frame: _Frame) -> Iterator[str]:
    first, last = frame.x
    y = frame.top + frame.height + 18
    yield svg.text(frame.left, y, f"step {first:,.0f}", "small soft")
    yield svg.text(frame.left + frame.width / 2, y, "optimizer steps", "small soft", "middle")
    yield svg.text(frame.left + frame.width, y, f"step {last:,.0f}", "small soft", "end")


def _line(frame: _Frame, curve: Curve, number: int) -> str:
    if len(curve) == 1:
        x, y = frame.place(*curve[0])
        return svg.element("circle", cx=x, cy=y, r=3.0, class_=svg.hue(number))
    path = frame.path(thinned(curve))
    return svg.element("polyline", points=path, class_=f"trace stroke-{number % len(svg.HUES)}")


def _bands(frame: _Frame, curves: Mapping[str, Curve], colours: Mapping[str, str]) -> Iterator[str]:
    """Stacked areas; a kind without a value at a step has height zero there."""
    yield svg.rectangle(frame.left, frame.top, frame.width, frame.height, "track", radius=3)
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
        yield svg.element("polygon", points=frame.path([*above, *reversed(below)]), class_=colour)
        below = above


def _finite(curve: Curve) -> list[tuple[float, float]]:
    return [(step, value) for step, value in curve if math.isfinite(value)]


def _share(value: float, least: float, most: float) -> float:
    return (value - least) / (most - least) if most > least else 0.5
