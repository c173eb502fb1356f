"""Elements of SVG as text. Everything that comes from elsewhere is escaped here."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

Point = tuple[float, float]

# What XML 1.0 cannot hold, escaped or not.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def element(name: str, *children: str, **attributes: str | float | None) -> str:
    """An element around its children, which are markup. ``text_anchor=`` is ``text-anchor``, and
    ``class_=`` is ``class``; what is None is left out."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    content = "".join(children)
    return f"<{name}{shown}>{content}</{name}>" if content else f"<{name}{shown}/>"


def escaped(text: str) -> str:
    """Text as markup."""
    return html.escape(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text))


def text(x: float, y: float, content: str, class_: str, anchor: str | None = None) -> str:
    """A line of text; ``y`` is its base line."""
    return element("text", escaped(content), x=x, y=y, class_=class_, text_anchor=anchor)


def rectangle(
    x: float, y: float, width: float, height: float, class_: str, radius: float = 0
) -> str:
    """A rectangle with round corners."""
    return element("rect", x=x, y=y, width=width, height=height, rx=radius or None, class_=class_)


def moved(x: float, y: float, *children: str) -> str:
    """A group with its origin elsewhere."""
    return element("g", *children, transform=f"translate({_number(x)} {_number(y)})")


def titled(title: str, *children: str, class_: str | None = None) -> str:
    """A group that says more when pointed at."""
    return element("g", element("title", escaped(title)), *children, class_=class_)


def rounded_line(points: Sequence[Point], class_: str, radius: float = 10) -> str:
    """A line through points whose corners are right angles, and round."""
    (x, y), *_ = points
    path = [f"M{_number(x)} {_number(y)}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        reach = min(radius, _distance(before, corner) / 2, _distance(corner, after) / 2)
        enter, leave = towards(corner, before, reach), towards(corner, after, reach)
        path.append(f"L{_pair(enter)} Q{_pair(corner)} {_pair(leave)}")
    path.append(f"L{_pair(points[-1])}")
    return element("path", d=" ".join(path), class_=class_)


def arrow_head(tip: Point, origin: Point, class_: str, size: float = 8) -> str:
    """A head that points from ``origin`` to its tip."""
    back = towards(tip, origin, size)
    dx, dy = (back[0] - tip[0]) / 2, (back[1] - tip[1]) / 2
    corners = [tip, (back[0] + dy, back[1] - dx), (back[0] - dy, back[1] + dx)]
    return element("polygon", points=" ".join(_pair(corner) for corner in corners), class_=class_)


def towards(start: Point, end: Point, reach: float) -> Point:
    """The point so far from ``start`` on the way to ``end``."""
    share = reach / (_distance(start, end) or 1)
    return start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])


def beside(points: Sequence[Point], distance: float) -> list[Point]:
    """The line so far to the left of one with right angles; to the right, if negative."""
    normals = [_normal(start, end) for start, end in zip(points, points[1:], strict=False)]
    shifts = [normals[0]]
    for before, after in zip(normals, normals[1:], strict=False):
        is_straight = before == after
        shifts.append(before if is_straight else (before[0] + after[0], before[1] + after[1]))
    shifts.append(normals[-1])
    return [
        (x + distance * dx, y + distance * dy)
        for (x, y), (dx, dy) in zip(points, shifts, strict=True)
    ]


def _normal(start: Point, end: Point) -> Point:
    length = _distance(start, end) or 1
    return (end[1] - start[1]) / length, (start[0] - end[0]) / length


def _distance(start: Point, end: Point) -> float:
    return abs(end[0] - start[0]) + abs(end[1] - start[1])


def _pair(point: Point) -> str:
    return f"{_number(point[0])} {_number(point[1])}"


def _number(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
