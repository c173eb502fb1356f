"""SVG as text: elements, the width of text, the style sheet of all pictures, and PNG.

All text and all attributes are escaped here. The reader's fonts are unknown, so widths of text are
estimated for a wide font.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, starmap
from pathlib import Path
from typing import TypeVar

from ..errors import PictureError

Point = tuple[float, float]

# Arrows: the radius of corners, the length of the head, and the gap at both ends.
_RADIUS = 10.0
_HEAD = 8.0
_CLEAR = 3.0

# Characters forbidden in XML 1.0, escaped or not.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def element(name: str, *children: str, **attributes: str | float | None) -> str:
    """An element around its children; the children are markup already.

    ``text_anchor=`` writes ``text-anchor``, and ``class_=`` writes ``class``. An attribute of None
    is omitted.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    content = "".join(children)
    return f"<{name}{shown}>{content}</{name}>" if content else f"<{name}{shown}/>"


def escaped(text: str) -> str:
    """Text as markup."""
    return html.escape(printable(text))


def printable(text: str) -> str:
    """The text with a replacement character for each character forbidden in XML."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


def text(x: float, y: float, content: str, class_: str, anchor: str | None = None) -> str:
    """A line of text; ``y`` is its baseline."""
    return element("text", escaped(content), x=x, y=y, class_=class_, text_anchor=anchor)


def rectangle(
    x: float, y: float, width: float, height: float, class_: str, radius: float = 0
) -> str:
    """A rectangle, with round corners if the radius is above 0."""
    return element("rect", x=x, y=y, width=width, height=height, rx=radius or None, class_=class_)


def moved(x: float, y: float, *children: str) -> str:
    """A group with its origin at this point."""
    return element("g", *children, transform=f"translate({_number(x)} {_number(y)})")


def titled(title: str, *children: str, class_: str | None = None) -> str:
    """A group with a tooltip."""
    return element("g", element("title", escaped(title)), *children, class_=class_)


def arrow(points: Sequence[Point], name: str) -> str:
    """An arrow from the first point to the last one, with a gap at both ends."""
    *_, before, end = points
    tip = _towards(end, before, _CLEAR)
    neck = _towards(end, before, _CLEAR + _HEAD - 1)
    start = _towards(points[0], points[1], _CLEAR)
    line = _rounded_line([start, *points[1:-1], neck], f"line {name}-line")
    return line + _arrow_head(tip, before, f"{name}-head")


def _rounded_line(points: Sequence[Point], class_: str) -> str:
    """A line through points, with round corners in place of right angles."""
    (x, y), *_ = points
    path = [f"M{_number(x)} {_number(y)}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        reach = min(_RADIUS, _distance(before, corner) / 2, _distance(corner, after) / 2)
        enter, leave = _towards(corner, before, reach), _towards(corner, after, reach)
        path.append(f"L{_pair(enter)} Q{_pair(corner)} {_pair(leave)}")
    path.append(f"L{_pair(points[-1])}")
    return element("path", d=" ".join(path), class_=class_)


def _arrow_head(tip: Point, origin: Point, class_: str) -> str:
    """An arrow head at ``tip``, pointing away from ``origin``."""
    back = _towards(tip, origin, _HEAD)
    dx, dy = (back[0] - tip[0]) / 2, (back[1] - tip[1]) / 2
    corners = [tip, (back[0] + dy, back[1] - dx), (back[0] - dy, back[1] + dx)]
    return element("polygon", points=" ".join(_pair(corner) for corner in corners), class_=class_)


def _towards(start: Point, end: Point, reach: float) -> Point:
    """The point at this distance from ``start`` on the way to ``end``."""
    share = reach / (_distance(start, end) or 1)
    return start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])


def beside(points: Sequence[Point], distance: float) -> list[Point]:
    """The parallel of a line with right angles, at this distance to its left, or to its right if
    the distance is negative."""
    normals = list(starmap(_normal, pairwise(points)))
    shifts = [normals[0]]
    for before, after in pairwise(normals):
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


# Advances of DejaVu Sans in em, one of the widest faces in use.
_WIDTHS = {
    character: width
    for width, characters in {
        0.28: "ijl'",
        0.34: " \N{NO-BREAK SPACE}.,:;I|/\\J·",
        0.40: "ftr!()[]{}-",
        0.56: "csz_L–",
        0.64: 'abdeghknopquvxy0123456789EFSTPY$?*"',
        0.70: "ABCKRVXZ",
        0.79: "DGHNOQU",
        0.84: "wM+=<>×~#",
        1.00: "mW@%&…",
    }.items()
    for character in characters
}
_UNKNOWN_WIDTH = 0.8
_WIDE_WIDTH = 1.05
_BOLD = 1.14


def width_of(text: str, size: float, is_bold: bool = False) -> float:
    """The width of a line of text in pixels, at most."""
    ems = sum(_WIDTHS.get(character) or _other_width(character) for character in text)
    return ems * size * (_BOLD if is_bold else 1.0)


def elided(text: str, width: float, size: float, is_bold: bool = False) -> str:
    """The text, with an ellipsis in place of its middle if it is wider than ``width``."""
    if width_of(text, size, is_bold) <= width:
        return text
    for kept in range(len(text) - 1, 0, -1):
        left = (kept + 1) // 2
        shorter = f"{text[:left]}…{text[len(text) - kept + left :]}"
        if width_of(shorter, size, is_bold) <= width:
            return shorter
    return "…"


def wrapped(text: str, width: float, size: float, most_lines: int = 2) -> list[str]:
    """The text in lines of at most ``width``; the last line is elided if the rest is too long."""
    words = [word for word in text.split(" ") if word]
    rows = in_rows(words, lambda word: width_of(word, size), width_of(" ", size), width)
    last = [word for row in rows[most_lines - 1 :] for word in row]
    lines = [*rows[: most_lines - 1], last]
    return [elided(" ".join(line), width, size) for line in lines if line]


def _other_width(character: str) -> float:
    is_wide = unicodedata.east_asian_width(character) in "WF"
    return _WIDE_WIDTH if is_wide or ord(character) > 0xFFFF else _UNKNOWN_WIDTH


Item = TypeVar("Item")


def in_rows(
    items: Iterable[Item], width_of_item: Callable[[Item], float], gap: float, width: float
) -> list[list[Item]]:
    """The items in rows of at most ``width``, with a gap between the items of a row."""
    rows: list[list[Item]] = []
    room = 0.0
    for item in items:
        needed = width_of_item(item) + gap
        if not rows or room < needed:
            rows.append([])
            room = width + gap
        rows[-1].append(item)
        room -= needed
    return rows


FONTS = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"

HUES = ("#2f6fde", "#0f9d76", "#d4772a", "#8b5cd6", "#cf4a6f", "#1795b8", "#7d8a22", "#a9633a")
"""The colours of machines and curves; they are readable on a light and on a dark background."""


def style_sheet() -> str:
    """The CSS rules for elements of class ``hetero``, with a dark mode."""
    hues = (
        f".hetero .hue-{number}{{fill:{hue}}}.hetero .stroke-{number}{{stroke:{hue}}}"
        for number, hue in enumerate(HUES)
    )
    rules = Path(__file__).with_name("picture.css").read_text(encoding="utf-8")
    return f".hetero text{{font-family:{FONTS}}}{''.join(hues)}{rules}"


def hue(number: int) -> str:
    """The style class of a hue; the hues repeat."""
    return f"hue-{number % len(HUES)}"


def picture(width: float, height: float, title: str, /, *children: str, **attributes: float) -> str:
    """An SVG picture for a page with the style sheet."""
    return element(
        "svg",
        element("title", escaped(title)),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        class_="hetero",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        **attributes,
    )


def picture_file(width: float, height: float, title: str, *children: str, radius: float = 0) -> str:
    """A self-contained SVG picture with its style sheet, background and size."""
    style = element("style", style_sheet())
    paper = rectangle(0, 0, width, height, "paper", radius)
    return picture(width, height, title, style, paper, *children, width=width, height=height)


_LIBRARY = "resvg_py"

INSTALL = "pip install 'lightning-hetero[pictures]'"
"""The command that installs the library for PNG files."""

_TEXT = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">'
    '<text x="0" y="16" font-family="sans-serif">M</text></svg>'
)


def png(svg: str) -> bytes:
    """The picture as PNG, twice as large.

    Raises:
        PictureError: If the library or a font is missing.
    """
    if importlib.util.find_spec(_LIBRARY) is None:
        raise PictureError(f"PNGs need a library: {INSTALL}.")
    library = importlib.import_module(_LIBRARY)

    def draw(markup: str) -> bytes:
        return bytes(library.svg_to_bytes(markup, zoom=2.0, sans_serif_family="DejaVu Sans"))

    # Without a font the library omits all text and reports no error.
    if draw(_TEXT) == draw(_TEXT.replace(">M<", "> <")):
        raise PictureError(
            "PNGs need a font, and this machine has none; install one such as DejaVu Sans."
        )
    return draw(svg)
