"""The diagram of a topology as SVG, as PNG, or as Mermaid text.

    ┌ coordinator ───────────────────────────┐
    │ data ▸ embedding ▸ layers  head ▸ loss │
    └────────────┬───────────────▲───────────┘
           ┌─────▼───┐     ┌─────┴───┐
           │ stage 1 ├────▶│ stage 2 │      at most three in a row
           └─────────┘     └─────────┘

Each link is two lines: activations go one way, gradients go back beside them. Where a worker has
several stages, or a stage several processes, `lanes` draws the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import PurePath

from ..errors import PictureError
from ..pipeline.placement import COORDINATOR_STAGE
from ..telemetry.layer_ranges import layers_as_text, stages_as_text
from .diagram_lanes import lanes
from .diagram_parts import (
    CARD_WIDTH,
    LEGEND_ROW,
    MARGIN,
    MARK_HEIGHT,
    CardGrid,
    both_ways,
    card,
    device_lines,
    header,
    heading,
    heading_height,
    label_across,
    label_along,
    label_beside,
    labels,
    layer_map,
    legend,
    legend_rows,
    mark_at,
    marks_row,
    marks_width,
    memory_row,
    size_of,
)
from .svg import HUES, Point, element, moved, picture_file, png, rectangle, text, width_of
from .topology import EMBEDDING, DrawnHop, DrawnPart, DrawnPlace, Memory, Topology, memory_as_text

COLUMNS = 3
GAP = 96.0
GUTTER = 76.0
RAIL = 34.0
LEAST_WIDTH = 2 * CARD_WIDTH + GAP

_BAND_PADDING = 18
_PILL_HEIGHT = 38
_PILL_GAP = 22
_LAYERS_PILL = 136.0


def diagram(topology: Topology) -> str:
    """The picture as the text of a self-contained SVG file."""
    return _Diagram(topology).svg() if topology.is_line else lanes(topology)


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
    """The layout of the picture of workers with one stage for each.

    Coordinates are pixels from the upper left corner.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._columns = max(1, min(COLUMNS, len(topology.workers)))
        self._is_wrapped = len(topology.workers) > COLUMNS
        cards = self._columns * CARD_WIDTH + (self._columns - 1) * GAP
        self._inner = max(cards, LEAST_WIDTH, self._width_of_parts())
        self._card_width = (self._inner - (self._columns - 1) * GAP) / self._columns
        self._left = MARGIN + (RAIL if self._is_wrapped else 0)
        self._width = self._left + self._inner + MARGIN + (2 * RAIL if self._is_wrapped else 0)
        self._grid = CardGrid.around(topology.workers, self._card_width)

    def svg(self) -> str:
        return picture_file(
            self._width,
            self._height,
            f"Topology: {self._topology.title or size_of(self._topology)}",
            heading(self._topology, self._left, self._inner),
            self._band_content(),
            *(self._card(index) for index in range(len(self._topology.workers))),
            *(self._wire(index) for index in range(len(self._topology.hops))),
            self._arrival(),
            legend(self._legend_rows, self._left, self._bottom + 30),
            radius=14,
        )

    # places

    @cached_property
    def _band(self) -> _Box:
        header_height = 52 if self._topology.coordinator.device else 38
        height = 2 * _BAND_PADDING + header_height + _PILL_HEIGHT
        top = heading_height(self._topology, self._inner)
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
            for index in range(len(self._topology.workers))
        ]

    @property
    def _bottom(self) -> float:
        return self._boxes[-1].bottom if self._boxes else self._band.bottom

    @property
    def _height(self) -> float:
        return self._bottom + 30 + LEGEND_ROW * len(self._legend_rows) + MARGIN - 12

    @property
    def _legend_rows(self) -> list[list[tuple[str, str]]]:
        return legend_rows(self._topology, self._inner)

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
                header(place, self._machine(place), room),
                moved(left - marks_width(marks), 2, marks_row(marks)) if marks else "",
            ),
        ]
        if place.device:
            device = device_lines(place.device, left - 34, 1)
            x, y = band.x + _BAND_PADDING + 34, band.y + _BAND_PADDING + 36
            parts.append(text(x, y, device[0], "normal soft"))
        if place.memory is not None:
            bar = memory_row(place.memory, right)
            parts.append(moved(band.right - _BAND_PADDING - right, band.y + _BAND_PADDING + 4, bar))
        return element("g", *parts, *self._pills(), class_="place")

    @cached_property
    def _pill_boxes(self) -> dict[DrawnPart, _Box]:
        """The boxes of the coordinator's own parts, aligned to the left and to the right edge."""
        band = self._band
        y = band.bottom - _BAND_PADDING - _PILL_HEIGHT
        boxes: dict[DrawnPart, _Box] = {}
        before, behind = self._topology.own_parts
        left, right = band.x + _BAND_PADDING, band.right - _BAND_PADDING
        for part in before:
            boxes[part] = _Box(left, y, self._pill_width(part), _PILL_HEIGHT)
            left = boxes[part].right + _PILL_GAP
        for part in reversed(behind):
            width = self._pill_width(part)
            boxes[part] = _Box(right - width, y, width, _PILL_HEIGHT)
            right -= width + _PILL_GAP
        return boxes

    def _width_of_parts(self) -> float:
        """The width that the coordinator needs for its parts in a row."""
        before, behind = self._topology.own_parts
        widths = [self._pill_width(part) for part in [*before, *behind]]
        gaps = _PILL_GAP * (len(widths) - 1) + 2 * _BAND_PADDING
        # The links of first and last layers side by side need room for their labels.
        has_both = before[-1].layers is not None and behind[0].layers is not None
        return sum(widths) + gaps + has_both * GAP / 2

    def _pill_width(self, part: DrawnPart) -> float:
        if part.layers is not None:
            return max(_LAYERS_PILL, width_of(part.name, 12) + 22)
        return width_of(self._pill_text(part), 12) + 22

    def _pill_text(self, part: DrawnPart) -> str:
        return f"{part.name}, frozen" if part.name in self._topology.frozen_ends else part.name

    def _pills(self) -> list[str]:
        place, boxes = self._topology.coordinator, self._pill_boxes
        parts = []
        for part, box in boxes.items():
            x, y = box.middle
            parts.append(rectangle(box.x, box.y, box.width, box.height, "pill", radius=9))
            if part.layers is not None:
                strip = layer_map(
                    [part.layers],
                    self._topology.num_layers,
                    self._machine(place),
                    box.width - 20,
                    7,
                )
                parts.append(text(x, y - 1, part.name, "normal ink", "middle"))
                parts.append(moved(box.x + 10, y + 6, strip))
            else:
                parts.append(text(x, y + 4.5, self._pill_text(part), "normal ink", "middle"))
        before, behind = self._topology.own_parts
        chains = [before, behind] if self._topology.hops else [[*before, *behind]]
        parts += [
            _small_arrow(boxes[one], boxes[next_one])
            for chain in chains
            for one, next_one in pairwise(chain)
        ]
        return parts

    # the stages

    def _card(self, index: int) -> str:
        place, box = self._topology.workers[index], self._boxes[index]
        machine, num_layers = self._machine(place), self._topology.num_layers
        return moved(box.x, box.y, card(place, num_layers, machine, self._grid))

    def _machine(self, place: DrawnPlace) -> int:
        return self._topology.machines.index(place.machine)

    # the links

    def _wire(self, index: int) -> str:
        link, last = self._topology.hops[index].link, len(self._topology.hops) - 1
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

    def _arrival(self) -> str:
        """The first worker's embedding, on the edge of its card where the token ids arrive."""
        if not self._embeds_on_worker:
            return ""
        x, y = self._way_out()[-1]
        return mark_at(x, y + MARK_HEIGHT / 2, EMBEDDING)

    @property
    def _embeds_on_worker(self) -> bool:
        workers = self._topology.workers
        return bool(workers) and EMBEDDING in workers[0].marks

    def _way_out(self) -> list[Point]:
        """The line from the coordinator's last part before the stages to the first stage, or to
        the embedding on the edge of the first stage."""
        boxes, first = self._pill_boxes, self._boxes[0]
        start = boxes[self._topology.own_parts[0][-1]]
        x, top = start.middle[0], first.y - self._embeds_on_worker * MARK_HEIGHT / 2
        room = marks_width([EMBEDDING]) / 2 if self._embeds_on_worker else 20
        if first.x + room <= x <= first.right - room:
            return [(x, start.bottom), (x, top)]
        if self._embeds_on_worker and x < first.x + room:
            return self._turned((x, start.bottom), (first.x + 48, top))
        return self._turned((x, start.bottom), (first.right - 48, top))

    def _way_home(self) -> list[Point]:
        """The line from the last stage to the coordinator's first part after the stages."""
        first = self._pill_boxes[self._topology.own_parts[1][0]]
        last = self._boxes[self._topology.hops[-1].source - 1]
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
    ids = [f"process{place.number}" for place in topology.places]
    for number, machine in enumerate(topology.machines):
        name = next(p.machine_name for p in topology.places if p.machine == machine)
        yield f'  subgraph machine{number}["{_said(name)}"]'
        for own, place in zip(ids, topology.places, strict=True):
            if place.machine == machine:
                yield f'    {own}["{_content(place, topology)}"]'
        yield "  end"
    for hop in topology.hops:
        if not hop.is_inside:
            arrow = _mermaid_arrow(hop, topology)
            yield f"  {ids[hop.source]} {arrow} {ids[hop.target]}"
    for hop in topology.exchanges:
        yield f"  {ids[hop.source]} {_mermaid_exchange(hop)} {ids[hop.target]}"
    for own, place in zip(ids, topology.places, strict=True):
        hue = HUES[topology.machines.index(place.machine) % len(HUES)]
        yield f"  style {own} stroke:{hue},stroke-width:2px"


def _content(place: DrawnPlace, topology: Topology) -> str:
    shared = [held for held in place.ranges if held.stage != COORDINATOR_STAGE]
    has_number = len(shared) > 1 or any(held.share is not None for held in shared)
    held = stages_as_text(shared) if has_number else _layers_of(place)
    if place is topology.coordinator:
        before, behind = topology.own_parts
        frozen = {end: f"{end}, frozen" for end in topology.frozen_ends}
        names = [part.name for part in before if part.name != "data"]
        names += [stages_as_text(shared)] if shared else []
        names += [part.name for part in behind]
        held = " · ".join(frozen.get(name, name) for name in names)
    memory = "" if place.memory is None else _memory_in_words(place.memory)
    lines = [place.device, held, memory, " · ".join(place.marks)]
    name = f"<b>{_said(place.name)}</b>"
    return "<br/>".join([name, *(_said(line) for line in lines if line)])


def _layers_of(place: DrawnPlace) -> str:
    return layers_as_text(*(each.layers for each in place.ranges))


def _memory_in_words(memory: Memory) -> str:
    if not memory.used_bytes:
        return f"memory of {memory_as_text(memory)}"
    what = memory.name if memory.name == "weights" else "all of training"
    return f"{what}: {memory_as_text(memory)} of memory"


def _mermaid_arrow(hop: DrawnHop, topology: Topology) -> str:
    """The arrow of a link; it tells its two stages if a worker has several, or a stage several
    workers."""
    link = hop.link
    above, below = labels(link)
    after = (hop.stage + 1) % (topology.num_stages + 1)
    what = [] if topology.is_line else [f"{hop.stage} ▸ {after}"]
    what += ["token ids"] if link.is_one_way else []
    said = " · ".join([*what, *(label.content for label in (*above, *below))])
    back = "" if link.is_one_way else "<"
    return f'{back}-- "{_said(said)}" -->' if said else f"{back}-->"


def _mermaid_exchange(hop: DrawnHop) -> str:
    """The dotted line between two replicas; it tells their stage."""
    known = [label.content for side in labels(hop.link) for label in side]
    said = " · ".join([f"gradients of stage {hop.stage}", *known])
    return f'<-. "{_said(said)}" .->'


def _said(text: str) -> str:
    """Text for a quoted string, with codes for the characters of Mermaid's and HTML's syntax."""
    codes = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;"}
    return "".join(codes.get(character, character) for character in text if character.isprintable())


FORMATS: dict[str, Callable[[Topology], bytes]] = {
    ".svg": lambda topology: diagram(topology).encode(),
    ".png": lambda topology: png(diagram(topology)),
    ".mmd": lambda topology: mermaid(topology).encode(),
}


def check_format(name: str) -> None:
    """Refuse a file name whose suffix names no format of a picture.

    Raises:
        PictureError: With the formats.
    """
    if PurePath(name).suffix.lower() not in FORMATS:
        raise PictureError(
            f"{name!r} names no format of a picture; it must end in {', '.join(FORMATS)}."
        )


def picture_for(name: str, topology: Topology) -> bytes:
    """The picture in the format of a file name's suffix.

    Raises:
        PictureError: If the format is unknown, or cannot be made on this machine.
    """
    check_format(name)
    return FORMATS[PurePath(name).suffix.lower()](topology)
