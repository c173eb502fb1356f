"""The links of a topology as SVG: two lines each, and labels beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .svg import Point, arrow, beside, element, escaped, text, titled, width_of
from .topology import Link, Speed, speed_as_text

APART = 5.0
LABEL_HEIGHT = 14
_ALIKE = 0.1

_BOTH = "small soft"
_ACTIVATIONS = "small activation-head"
_GRADIENTS = "small gradient-head"


@dataclass(frozen=True)
class Label:
    """A text beside a link, with the style class of its direction."""

    content: str
    class_: str


def both_ways(points: Sequence[Point], link: Link) -> str:
    """The two lines of a link: activations along the points, gradients back. A one-way link carries
    only token ids."""
    if link.is_one_way:
        lines = arrow(points, "token")
    else:
        lines = arrow(beside(points, APART), "activation")
        lines += arrow(list(reversed(beside(points, -APART))), "gradient")
    said = [label.content for side in labels(link) for label in side]
    return titled(", ".join(said), lines, class_="link") if said else lines


def labels(link: Link) -> tuple[list[Label], list[Label]]:
    """The labels on the activations' side and on the gradients' side, from the line outwards."""
    forward, backward = link.forward, None if link.is_one_way else link.backward
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
    """Labels above and below the middle of a horizontal link, one per line."""
    above, below = labels(link)
    rows = [(y - 11 - number * LABEL_HEIGHT, one) for number, one in enumerate(above)]
    rows += [(y + 20 + number * LABEL_HEIGHT, one) for number, one in enumerate(below)]
    return "".join(text(x, row, one.content, one.class_, "middle") for row, one in rows)


def label_along(x: float, y: float, link: Link) -> str:
    """Labels in one line above a horizontal link that goes back to the left."""
    both = [one for side in labels(link) for one in side]
    return _in_a_line(x, y - 12, both, "middle") if both else ""


def label_beside(x: float, y: float, link: Link, anchor: str) -> str:
    """Labels beside the middle of a vertical link, two per line and direction."""
    lines = _lines(link)
    top = y - (len(lines) - 1) * LABEL_HEIGHT / 2 + 4
    return "".join(
        _in_a_line(x, top + number * LABEL_HEIGHT, line, anchor)
        for number, line in enumerate(lines)
    )


def labels_width(link: Link) -> float:
    """The width of the labels beside a vertical link."""
    lines = [" · ".join(one.content for one in line) for line in _lines(link)]
    return max((width_of(line, 11) for line in lines), default=0.0)


def _lines(link: Link) -> list[list[Label]]:
    return [side[i : i + 2] for side in labels(link) for i in range(0, len(side), 2)]


def _in_a_line(x: float, y: float, parts: Sequence[Label], anchor: str) -> str:
    spans = [
        element("tspan", escaped(f"{' · ' * (number > 0)}{part.content}"), class_=part.class_)
        for number, part in enumerate(parts)
    ]
    return element("text", *spans, x=x, y=y, text_anchor=anchor)


def _are_alike(one: Speed, other: Speed) -> bool:
    return abs(one.bytes_per_second / other.bytes_per_second - 1) < _ALIKE
