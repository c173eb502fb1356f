"""The lines between places: activations one way, gradients beside them the other way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .svg import Point, arrow_head, beside, element, escaped, rounded_line, text, titled, towards
from .topology import Link, Speed, speed_as_text

APART = 5.0
LABEL_HEIGHT = 14
_HEAD = 8.0
_CLEAR = 3.0
_ALIKE = 0.1

_BOTH = "small soft"
_ACTIVATIONS = "small activation-head"
_GRADIENTS = "small gradient-head"


@dataclass(frozen=True)
class Label:
    """A fact of a link, in the colour of its direction."""

    content: str
    class_: str


def both_ways(points: Sequence[Point], link: Link) -> str:
    """Activations along the points, gradients back; on a link of one way token ids alone."""
    there = beside(points, 0 if link.is_one_way else APART)
    back = list(reversed(beside(points, -APART)))
    lines = _arrow(there, "activation")
    if not link.is_one_way:
        lines += _arrow(back, "gradient")
    said = [label.content for side in labels(link) for label in side]
    return titled(", ".join(said), lines, class_="link") if said else lines


def labels(link: Link) -> tuple[list[Label], list[Label]]:
    """What to write at the activations' side and at the gradients' side, from the line on."""
    forward, backward = link.forward, link.backward
    above = [Label(link.activation_dtype, _ACTIVATIONS)] if link.activation_dtype else []
    below = [Label(link.gradient_dtype, _GRADIENTS)] if link.gradient_dtype else []
    if forward is None or backward is None or _are_alike(forward, backward):
        known = forward or backward
        rate, latency = speed_as_text(known) if known else ("", "")
        both = [[Label(rate, _BOTH)], [Label(latency, _BOTH)]] if known else [[], []]
        return [*both[0], *above], [*both[1], *below]
    there = [Label(said, _ACTIVATIONS) for said in speed_as_text(forward)]
    back = [Label(said, _GRADIENTS) for said in speed_as_text(backward)]
    return [*there, *above], [*back, *below]


def label_across(x: float, y: float, link: Link) -> str:
    """Above and below a level line whose middle is there, a fact to a line."""
    above, below = labels(link)
    rows = [(y - 11 - number * LABEL_HEIGHT, one) for number, one in enumerate(above)]
    rows += [(y + 20 + number * LABEL_HEIGHT, one) for number, one in enumerate(below)]
    return "".join(text(x, row, one.content, one.class_, "middle") for row, one in rows)


def label_along(x: float, y: float, link: Link) -> str:
    """Above a level line that goes back to the left, in a line."""
    both = [one for side in labels(link) for one in side]
    return _in_a_line(x, y - 12, both, "middle") if both else ""


def label_beside(x: float, y: float, link: Link, anchor: str) -> str:
    """Beside an upright line whose middle is there: lines of each direction, two facts each."""
    lines = [side[i : i + 2] for side in labels(link) for i in range(0, len(side), 2)]
    top = y - (len(lines) - 1) * LABEL_HEIGHT / 2 + 4
    return "".join(
        _in_a_line(x, top + number * LABEL_HEIGHT, line, anchor)
        for number, line in enumerate(lines)
    )


def _in_a_line(x: float, y: float, parts: Sequence[Label], anchor: str) -> str:
    spans = [
        element("tspan", escaped(f"{' · ' * (number > 0)}{part.content}"), class_=part.class_)
        for number, part in enumerate(parts)
    ]
    return element("text", *spans, x=x, y=y, text_anchor=anchor)


def _are_alike(one: Speed, other: Speed) -> bool:
    return abs(one.bytes_per_second / other.bytes_per_second - 1) < _ALIKE


def _arrow(points: Sequence[Point], name: str) -> str:
    """From the first point to the last one, clear of what is there."""
    *_, before, end = points
    tip = towards(end, before, _CLEAR)
    neck = towards(end, before, _CLEAR + _HEAD - 1)
    start = towards(points[0], points[1], _CLEAR)
    line = rounded_line([start, *points[1:-1], neck], f"line {name}-line")
    return line + arrow_head(tip, before, f"{name}-head", _HEAD)
