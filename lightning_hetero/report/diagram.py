"""The diagram of a topology as SVG, as PNG, or as Mermaid text.

    ┌ coordinator ───────────────────────────┐
    │ data ▸ embedding ▸ layers  head ▸ loss │
    └────────────┬───────────────▲───────────┘
           ┌─────▼───┐     ┌─────┴───┐
           │ stage 1 ├────▶│ stage 2 │      at most three in a row
           └─────────┘     └─────────┘

Each link is two lines: activations go one way, gradients go back beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import PurePath

from ..errors import PictureError
from .card import (
    CardGrid,
    card,
    header,
    layer_map,
    marks_row,
    marks_width,
    memory_class,
    memory_row,
)
from .svg import (
    HUES,
    Point,
    arrow,
    beside,
    element,
    elided,
    escaped,
    in_rows,
    moved,
    picture_file,
    png,
    rectangle,
    text,
    titled,
    width_of,
    wrapped,
)
from .topology import (
    MEMORY_PARTS,
    Link,
    Place,
    Speed,
    Topology,
    layers_as_text,
    memory_as_text,
    speed_as_text,
)

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
    there = beside(points, 0 if link.is_one_way else APART)
    back = list(reversed(beside(points, -APART)))
    lines = arrow(there, "activation")
    if not link.is_one_way:
        lines += arrow(back, "gradient")
    said = [label.content for side in labels(link) for label in side]
    return titled(", ".join(said), lines, class_="link") if said else lines


def labels(link: Link) -> tuple[list[Label], list[Label]]:
    """The labels on the activations' side and on the gradients' side, from the line outwards."""
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


COLUMNS = 3
CARD_WIDTH = 252.0
GAP = 96.0
GUTTER = 76.0
MARGIN = 36.0
RAIL = 34.0
LEAST_WIDTH = 2 * CARD_WIDTH + GAP

_BAND_PADDING = 18
_PILL_HEIGHT = 38
_PILL_GAP = 22
_LAYERS_PILL = 136.0
_LEGEND_ROW = 22


def diagram(topology: Topology) -> str:
    """The picture as the text of a self-contained SVG file."""
    return _Diagram(topology).svg()


@dataclass(frozen=True)
class _Box:
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> Point:
        return self.x + self.width / 2, self.y + self.height / 2

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height


class _Diagram:
    """The layout of the picture. Coordinates are pixels from the upper left corner."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._columns = max(1, min(COLUMNS, len(topology.stages)))
        self._is_wrapped = len(topology.stages) > COLUMNS
        cards = self._columns * CARD_WIDTH + (self._columns - 1) * GAP
        self._inner = max(cards, LEAST_WIDTH)
        self._card_width = CARD_WIDTH if self._columns > 1 else self._inner
        self._left = MARGIN + (RAIL if self._is_wrapped else 0)
        self._width = self._left + self._inner + MARGIN + (2 * RAIL if self._is_wrapped else 0)
        self._grid = CardGrid.around(topology.stages, self._card_width)

    def svg(self) -> str:
        return picture_file(
            self._width,
            self._height,
            f"Topology: {self._topology.title or self._size}",
            self._heading(),
            self._band_content(),
            *(self._card(index) for index in range(len(self._topology.stages))),
            *(self._wire(index) for index in range(len(self._topology.links))),
            self._legend(),
            radius=14,
        )

    # places

    @cached_property
    def _band(self) -> _Box:
        header_height = 52 if self._topology.coordinator.device else 38
        height = 2 * _BAND_PADDING + header_height + _PILL_HEIGHT
        top = MARGIN + 38 + 17 * len(self._fact_lines)
        return _Box(self._left, top, self._inner, height)

    @cached_property
    def _boxes(self) -> list[_Box]:
        """The boxes of the workers' cards."""
        top = self._band.bottom + GUTTER
        return [
            _Box(
                self._left + (index % self._columns) * (self._card_width + GAP),
                top + (index // self._columns) * (self._grid.height + GUTTER),
                self._card_width,
                self._grid.height,
            )
            for index in range(len(self._topology.stages))
        ]

    @property
    def _bottom(self) -> float:
        return self._boxes[-1].bottom if self._boxes else self._band.bottom

    @property
    def _height(self) -> float:
        return self._bottom + 30 + _LEGEND_ROW * len(self._legend_rows) + MARGIN - 12

    # heading

    @cached_property
    def _fact_lines(self) -> list[str]:
        facts = [*([self._size] if self._topology.title else []), *self._topology.facts]
        # Non-breaking spaces make lines end between facts where possible.
        whole = (fact.replace(" ", "\N{NO-BREAK SPACE}") for fact in facts)
        lines = wrapped(" · ".join(whole), self._inner, 12, most_lines=4)
        return [line.removesuffix(" ·") for line in lines]

    @property
    def _size(self) -> str:
        places = len(self._topology.places)
        processes = f"{places} processes" if places > 1 else "one process"
        return f"{self._topology.num_layers} layers over {processes}"

    def _heading(self) -> str:
        title = elided(self._topology.title or self._size, self._inner, 20, is_bold=True)
        lines = [text(self._left, MARGIN + 16, title, "title ink")]
        for number, line in enumerate(self._fact_lines):
            lines.append(text(self._left, MARGIN + 40 + 17 * number, line, "normal soft"))
        return "".join(lines)

    # the coordinator

    def _band_content(self) -> str:
        place, band = self._topology.coordinator, self._band
        right = CARD_WIDTH - 2 * _BAND_PADDING
        has_memory = place.memory is not None
        left = band.width - 2 * _BAND_PADDING - (right + 24 if has_memory else 0)
        marks = place.marks
        room = left - (marks_width(marks) + 12 if marks else 0)
        parts = [
            rectangle(band.x, band.y, band.width, band.height, "card edge", radius=12),
            moved(
                band.x + _BAND_PADDING,
                band.y + _BAND_PADDING,
                header(place, "0", self._machine(place), room),
                moved(left - marks_width(marks), 2, marks_row(marks)) if marks else "",
            ),
        ]
        if place.device:
            device = elided(place.device, left - 34, 12)
            x, y = band.x + _BAND_PADDING + 34, band.y + _BAND_PADDING + 36
            parts.append(text(x, y, device, "normal soft"))
        if place.memory is not None:
            bar = memory_row(place.memory, self._machine(place), right)
            parts.append(moved(band.right - _BAND_PADDING - right, band.y + _BAND_PADDING + 4, bar))
        return element("g", *parts, *self._pills(), class_="place")

    @cached_property
    def _pill_boxes(self) -> dict[str, _Box]:
        """The boxes of the coordinator's own parts, aligned to the left and to the right edge."""
        band = self._band
        y = band.bottom - _BAND_PADDING - _PILL_HEIGHT
        boxes: dict[str, _Box] = {}
        before, behind = self._topology.own_parts
        left, right = band.x + _BAND_PADDING, band.right - _BAND_PADDING
        for name in before:
            boxes[name] = _Box(left, y, self._pill_width(name), _PILL_HEIGHT)
            left = boxes[name].right + _PILL_GAP
        for name in reversed(behind):
            width = self._pill_width(name)
            boxes[name] = _Box(right - width, y, width, _PILL_HEIGHT)
            right -= width + _PILL_GAP
        return boxes

    def _pill_width(self, name: str) -> float:
        return _LAYERS_PILL if name == "layers" else width_of(self._pill_text(name), 12) + 22

    def _pill_text(self, name: str) -> str:
        return f"{name}, frozen" if name in self._topology.frozen_ends else name

    def _pills(self) -> list[str]:
        place, boxes = self._topology.coordinator, self._pill_boxes
        parts = []
        for name, box in boxes.items():
            x, y = box.middle
            parts.append(rectangle(box.x, box.y, box.width, box.height, "pill", radius=9))
            if name == "layers":
                strip = layer_map(
                    place.layers, self._topology.num_layers, self._machine(place), box.width - 20, 7
                )
                parts.append(text(x, y - 1, layers_as_text(place.layers), "normal ink", "middle"))
                parts.append(moved(box.x + 10, y + 6, strip))
            else:
                parts.append(text(x, y + 4.5, self._pill_text(name), "normal ink", "middle"))
        before, behind = self._topology.own_parts
        chains = [before, behind] if self._topology.stages else [[*before, *behind]]
        parts += [
            _small_arrow(boxes[one], boxes[next_one])
            for chain in chains
            for one, next_one in pairwise(chain)
        ]
        return parts

    # the stages

    def _card(self, index: int) -> str:
        place, box = self._topology.stages[index], self._boxes[index]
        machine, num_layers = self._machine(place), self._topology.num_layers
        return moved(box.x, box.y, card(place, index + 1, num_layers, machine, self._grid))

    def _machine(self, place: Place) -> int:
        return self._topology.machines.index(place.machine)

    # the links

    def _wire(self, index: int) -> str:
        link, last = self._topology.links[index], len(self._boxes)
        if index == 0:
            points = self._way_out()
            (x, _), is_straight = points[0], len(points) == 2
            # A line that starts at the left edge has no room for labels on its left.
            is_left = is_straight and not link.is_one_way
            anchor, shift = ("end", -14) if is_left else ("start", 14)
            label = label_beside(x + shift, self._band.bottom + GUTTER / 2, link, anchor)
        elif index == last:
            points = self._way_home()
            (x, y), side = points[-1], 1 if len(points) == 2 else -1
            anchor = "end" if side < 0 else "start"
            label = label_beside(x + side * 14, self._band.bottom + GUTTER / 2, link, anchor)
        elif index % self._columns:
            before, after = self._boxes[index - 1], self._boxes[index]
            y = before.middle[1]
            points = [(before.right, y), (after.x, y)]
            label = label_across((before.right + after.x) / 2, y, link)
        else:
            points = self._next_row(index)
            label = label_along(self._left + self._inner / 2, points[2][1], link)
        return both_ways(points, link) + label

    def _way_out(self) -> list[Point]:
        """The line from the coordinator's last part before the stages to the first stage."""
        boxes, first = self._pill_boxes, self._boxes[0]
        start = boxes[self._topology.own_parts[0][-1]]
        x = start.middle[0]
        if first.x + 20 <= x <= first.right - 20:
            return [(x, start.bottom), (x, first.y)]
        return self._turned((x, start.bottom), (first.right - 48, first.y))

    def _way_home(self) -> list[Point]:
        """The line from the last stage to the coordinator's first part after the stages."""
        first, last = self._pill_boxes[self._topology.own_parts[1][0]], self._boxes[-1]
        x = first.middle[0]
        if not self._is_wrapped and last.x + 20 <= x <= last.right - 20:
            return [(x, last.y), (x, first.bottom)]
        if not self._is_wrapped:
            return self._turned((last.x + 48, last.y), (x, first.bottom))
        rail = self._left + self._inner + 2 * RAIL - 10
        level = self._band.bottom + GUTTER / 2
        y = last.middle[1]
        return [(last.right, y), (rail, y), (rail, level), (x, level), (x, first.bottom)]

    def _turned(self, start: Point, end: Point) -> list[Point]:
        """A line with two corners in the gutter below the coordinator."""
        level = self._band.bottom + GUTTER / 2
        return [start, (start[0], level), (end[0], level), end]

    def _next_row(self, index: int) -> list[Point]:
        """The line from the end of a row of cards to the start of the next row."""
        before, after = self._boxes[index - 1], self._boxes[index]
        right, left = before.right + RAIL - 6, after.x - RAIL + 2
        level = before.bottom + GUTTER / 2
        start, end = before.middle[1], after.middle[1]
        out = [(before.right, start), (right, start), (right, level)]
        return [*out, (left, level), (left, end), (after.x, end)]

    # the legend

    @cached_property
    def _legend_rows(self) -> list[list[tuple[str, str]]]:
        """The kind of each item and its words, in rows."""
        items = []
        if self._topology.links:
            items += [("activation", "activations"), ("gradient", "gradients")]
        used = {
            name
            for place in self._topology.places
            if place.memory is not None and place.memory.total_bytes
            for name, amount in place.memory.used_bytes.items()
            if amount
        }
        words = {"training": "gradients and optimizer", "other": "working memory"}
        items += [(name, words.get(name, name)) for name in MEMORY_PARTS if name in used]
        return in_rows(items, lambda item: 28 + width_of(item[1], 11), 22, self._inner)

    def _legend(self) -> str:
        parts = []
        y = self._bottom + 30
        for row in self._legend_rows:
            x = self._left
            for kind, words in row:
                parts.append(moved(x, y, _swatch(kind), text(28, 11, words, "small soft")))
                x += 28 + width_of(words, 11) + 22
            y += _LEGEND_ROW
        return element("g", *parts, class_="legend")


def _swatch(kind: str) -> str:
    if kind in MEMORY_PARTS:
        return rectangle(6, 2, 14, 10, f"soft {memory_class(kind)}", radius=2)
    return element("path", d="M0 7 L22 7", class_=f"line {kind}-line")


def _small_arrow(before: _Box, after: _Box) -> str:
    y = before.middle[1]
    start, end = before.right + 5, after.x - 4
    line = element("path", d=f"M{start:g} {y:g} L{end - 4:g} {y:g}", class_="line activation-line")
    corners = f"{end:g},{y:g} {end - 6:g},{y - 3.5:g} {end - 6:g},{y + 3.5:g}"
    return line + element("polygon", points=corners, class_="activation-head")


def mermaid(topology: Topology) -> str:
    """The topology as a Mermaid flowchart, which GitHub, GitLab and many editors draw."""
    return "\n".join(_lines(topology)) + "\n"


def _lines(topology: Topology) -> Iterator[str]:
    yield "flowchart LR"
    ids = {place.name: f"stage{number}" for number, place in enumerate(topology.places)}
    for number, machine in enumerate(topology.machines):
        yield f'  subgraph machine{number}["{_said(machine)}"]'
        for place in topology.places:
            if place.machine == machine:
                yield f'    {ids[place.name]}["{_content(place, topology)}"]'
        yield "  end"
    around = [*topology.places, topology.coordinator]
    for link, source, target in zip(topology.links, around, around[1:], strict=False):
        yield f"  {ids[source.name]} {_mermaid_arrow(link)} {ids[target.name]}"
    for place in topology.places:
        hue = HUES[topology.machines.index(place.machine) % len(HUES)]
        yield f"  style {ids[place.name]} stroke:{hue},stroke-width:2px"


def _content(place: Place, topology: Topology) -> str:
    held = layers_as_text(place.layers)
    if place is topology.coordinator:
        before, behind = topology.own_parts
        said = {"layers": held} | {end: f"{end}, frozen" for end in topology.frozen_ends}
        held = " · ".join(said.get(part, part) for part in [*before, *behind] if part != "data")
    memory = "" if place.memory is None else f"memory {memory_as_text(place.memory)}"
    lines = [place.device, held, memory, " · ".join(place.marks)]
    name = f"<b>{_said(place.name)}</b>"
    return "<br/>".join([name, *(_said(line) for line in lines if line)])


def _mermaid_arrow(link: Link) -> str:
    above, below = labels(link)
    said = " · ".join(label.content for label in (*above, *below))
    back = "" if link.is_one_way else "<"
    return f'{back}-- "{_said(said)}" -->' if said else f"{back}-->"


def _said(text: str) -> str:
    """Text for a quoted string, with codes for the characters of Mermaid's and HTML's syntax."""
    codes = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;"}
    return "".join(codes.get(character, character) for character in text if character.isprintable())


PICTURE_NAME = "architecture"
"""The file name of a run's picture, without its suffix."""

PLAN_NAME = "plan.yaml"
"""The file name of a run's plan."""

ERROR_NAME = "error.txt"
"""The file name of the error of a worker that has ended a run."""

FORMATS: dict[str, Callable[[Topology], bytes]] = {
    ".svg": lambda topology: diagram(topology).encode(),
    ".png": lambda topology: png(diagram(topology)),
    ".mmd": lambda topology: mermaid(topology).encode(),
}


def picture_for(name: str, topology: Topology) -> bytes:
    """The picture in the format of a file name's suffix.

    Raises:
        PictureError: If the format is unknown, or cannot be made on this machine.
    """
    suffix = PurePath(name).suffix.lower()
    if suffix not in FORMATS:
        raise PictureError(
            f"{name!r} names no format of a picture; it must end in {', '.join(FORMATS)}."
        )
    return FORMATS[suffix](topology)
