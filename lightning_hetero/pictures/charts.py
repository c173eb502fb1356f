"""Charts as SVG: lines over steps, and shares of the time over steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .style import HUES, hue
from .svg import Point, element, escaped, rectangle, text
from .text import elided, width_of

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
