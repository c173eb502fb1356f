"""The diagram of a topology as SVG, as PNG, or as Mermaid text.

Each process has a lane. The layers go from left to right, and so do all arrows:

    ┌ coordinator ┐  layers 0–1 ─┐                                   ┌▶ layer 6 ▸ head
    ┌ a ──────────┐              └▶ layers 2–3 ─┐     ┌▶ layer 5 ────┘
    ┌ b ──────────┐                             └▶ layer 4

Replicas of a stage are above each other, each with its share of the micro-batches:

    ┌ coordinator ┐  layer 0 ─┬┐               ┌┬▶ head
    ┌ a ──────────┐           │└▶ 2 of 3 ──────┘│
    ┌ b ──────────┐           └─▶ 1 of 3 ───────┘

Each link is two lines: activations go one way, gradients go back beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import PurePath

from ..errors import PictureError
from ..pipeline.placement import COORDINATOR_STAGE
from ..planner.profile import Link
from ..telemetry.layer_ranges import Range, layers_as_text, stages_as_text
from . import svg
from .svg import Point
from .topology import (
    EMBEDDING,
    HEAD,
    MEMORY_PARTS,
    DrawnHop,
    DrawnLink,
    DrawnPlace,
    Memory,
    Topology,
    is_loopback,
    memory_as_text,
    short_device,
    speed_as_text,
    split_address,
)

CARD_WIDTH = 252.0
PADDING = 16
INNER_WIDTH = CARD_WIDTH - 2 * PADDING
HEADER_HEIGHT = 40
DEVICE_LINE_HEIGHT = 16
LAYERS_HEIGHT = 46
MEMORY_HEIGHT = 38
MARKS_HEIGHT = 28
MARK_HEIGHT = 20
APART = 5.0
LABEL_HEIGHT = 14
MARGIN = 36.0
LEGEND_ROW = 22

_BAR_HEIGHT = 8
_LEAST_CELL = 6.0
_CELL_GAP = 2.0
_PILL_GAP = 6
# Links whose figures differ by less have one label for both directions.
_ALIKE = 0.1

_BOTH = "small soft"
_ACTIVATIONS = "small activation-head"
_GRADIENTS = "small gradient-head"

# The kind of an item of the legend, and its words.
_Item = tuple[str, str]

_GAP = 64.0
_BETWEEN_LANES = 5 * LABEL_HEIGHT
_STOP_HEIGHT = 50.0
_MOST_OF_STOP = 220.0
# Between the line of a link and its labels.
_ASIDE = 14.0
# Links side by side in one gap: how many of them have labels, and the distance without any.
_MOST_LABELLED = 6
_APART = 16.0
# The room of the line between replicas, at the right edge of their stops.
_EXCHANGE = 22.0


def diagram(topology: Topology) -> str:
    """The picture as the text of a self-contained SVG file."""
    return _Lanes(topology).svg()


class _Lanes:
    """The layout of the picture. Coordinates are pixels from the upper left corner.

    A stop is a place on the way of the activations: the coordinator's first part, each stage, and
    the coordinator's last part. Each of these has a column. Replicas have a stop each in their
    column.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._grid = CardGrid.around(topology.places)
        self._stops = self._lines_of_stops()
        # The links in the gap after each column, from left to right, so that few lines cross:
        # downward links with the longest first, upward links with the shortest first.
        self._gaps: list[list[DrawnHop]] = [[] for _ in self._stops]
        # Without stages, the coordinator's first part leads to its last part.
        self._hops = topology.hops or [DrawnHop(0, 0, 0, DrawnLink())]
        for hop in sorted(self._hops, key=lambda hop: hop.source - hop.target):
            if not hop.is_inside:
                self._gaps[hop.stage].append(hop)

    def svg(self) -> str:
        topology = self._topology
        height = self._bottom + 30 + LEGEND_ROW * len(self._legend_rows) + MARGIN - 12
        return svg.picture_file(
            MARGIN + self._inner + MARGIN,
            height,
            f"Topology: {topology.title or size_of(topology)}",
            heading(topology, MARGIN, self._inner),
            *(self._lane(index) for index in range(len(topology.places))),
            *(self._stop(n, place) for n, places in enumerate(self._stops) for place in places),
            *map(self._wire, self._hops),
            *(self._exchange(number) for number in range(len(self._stops))),
            legend(self._legend_rows, MARGIN, self._bottom + 30),
            radius=14,
        )

    @property
    def _inner(self) -> float:
        return self._columns[-1] + self._widths[-1] + 16 - MARGIN

    @cached_property
    def _top(self) -> float:
        return heading_height(self._topology, self._inner)

    @property
    def _bottom(self) -> float:
        return self._y(len(self._topology.places) - 1) + self._grid.height

    @property
    def _legend_rows(self) -> list[list[tuple[str, str]]]:
        return legend_rows(self._topology, self._inner)

    def _y(self, place: int) -> float:
        """The upper edge of a lane."""
        return self._top + place * (self._grid.height + _BETWEEN_LANES)

    def _middle(self, place: int) -> float:
        return self._y(place) + self._grid.height / 2

    # the stops

    def _lines_of_stops(self) -> list[dict[int, tuple[str, str]]]:
        """For each column the two lines of text of each stop, by the index of its place."""
        topology = self._topology
        before, behind = topology.own_parts
        found = [{0: self._of_coordinator(before)}]
        for number in range(1, topology.num_stages + 1):
            also = f", {EMBEDDING}" if number == 1 and EMBEDDING not in before else ""
            also += f", {HEAD}" if number == topology.num_stages and HEAD not in behind else ""
            held = topology.ranges_of_stage(number)
            found.append({place: _of_stage(each, also) for place, each in held.items()})
        return [*found, {0: self._of_coordinator(behind)}]

    def _of_coordinator(self, names: list[str]) -> tuple[str, str]:
        """The coordinator's parts in two lines; one is for the layers."""
        layers = [name for name in names if name.startswith("layer")]
        others = " ▸ ".join(self._topology.shown(name) for name in names if name not in layers)
        if not layers:
            return others, ""
        return (layers[0], others) if names[0] in layers else (others, layers[0])

    @cached_property
    def _widths(self) -> list[float]:
        """The width of each column; it has room for the labels of the last link before it."""
        found = []
        for number, stops in enumerate(self._stops):
            own = max(
                max(svg.width_of(first, 12, is_bold=True), svg.width_of(second, 11))
                for first, second in stops.values()
            )
            before = self._gaps[number - 1] if number else []
            # Labels begin after the last line of the gap, and end before the next gap's first.
            room = self._labels_room(before[-1]) - _GAP if before else 0.0
            room += _EXCHANGE if len(stops) > 1 else 0.0
            found.append(max(84.0, min(own + 22, _MOST_OF_STOP), room))
        return found

    def _labels_room(self, hop: DrawnHop) -> float:
        """The room of a link's labels beside its line; 0 if they are left out."""
        is_crowded = len(self._gaps[hop.stage]) > _MOST_LABELLED
        width = 0.0 if is_crowded else labels_width(hop.link)
        return width + 2 * _ASIDE if width else 0.0

    @cached_property
    def _bends(self) -> list[list[float]]:
        """Where each link of each gap goes up or down, from the left edge of the gap."""
        found = []
        for hops in self._gaps:
            at, bends = _GAP / 2, []
            for hop in hops:
                bends.append(at)
                at += max(self._labels_room(hop), _APART)
            found.append(bends)
        return found

    @cached_property
    def _columns(self) -> list[float]:
        """The left edge of each column."""
        x, found = MARGIN + CARD_WIDTH + 28, []
        for width, bends in zip(self._widths, self._bends, strict=True):
            found.append(x)
            x += width + _GAP + (bends[-1] - bends[0] if bends else 0.0)
        return found

    def _lane(self, index: int) -> str:
        place, y = self._topology.places[index], self._y(index)
        num_layers, machine = self._topology.num_layers, self._machine(index)
        lane = svg.rectangle(MARGIN, y, self._inner, self._grid.height, "lane", radius=12)
        return lane + svg.moved(MARGIN, y, card(place, num_layers, machine, self._grid))

    def _stop(self, number: int, index: int) -> str:
        first, second = self._stops[number][index]
        x, width = self._columns[number], self._widths[number]
        y, room, middle = self._middle(index) - _STOP_HEIGHT / 2, width - 12, x + width / 2
        parts = [
            svg.rectangle(x, y, width, _STOP_HEIGHT, "pill", radius=9),
            svg.rectangle(x + 10, y, width - 20, 3, svg.hue(self._machine(index))),
        ]
        if second:
            shown = svg.elided(second, room, 11)
            parts.append(svg.text(middle, y + 39, shown, "small soft", "middle"))
        shown = svg.elided(first, room, 12, is_bold=True)
        parts.append(svg.text(middle, y + (22 if second else 30), shown, "normal ink", "middle"))
        return svg.titled(", ".join(each for each in (first, second) if each), *parts)

    def _machine(self, index: int) -> int:
        return self._topology.machines.index(self._topology.places[index].machine)

    # the links

    def _wire(self, hop: DrawnHop) -> str:
        start, end = self._ends(hop)
        if hop.is_inside:
            return svg.arrow([start, end], "activation")
        x = start[0] + self._bends[hop.stage][self._gaps[hop.stage].index(hop)]
        wire = both_ways([start, (x, start[1]), (x, end[1]), end], hop.link)
        if not self._labels_room(hop):
            return wire
        # Labels would meet the stops of a lane; so they are below the upper lane.
        below = self._y(min(hop.source, hop.target)) + self._grid.height + _BETWEEN_LANES / 2
        return wire + label_beside(x + _ASIDE, below, hop.link)

    def _ends(self, hop: DrawnHop) -> tuple[Point, Point]:
        number = hop.stage
        right = self._columns[number] + self._widths[number]
        return (right, self._middle(hop.source)), (
            self._columns[number + 1],
            self._middle(hop.target),
        )

    def _exchange(self, number: int) -> str:
        """The lines for the exchange of gradients between the replicas of a column."""
        x = self._columns[number] + self._widths[number] - _EXCHANGE / 2
        lines = []
        for upper, lower in pairwise(self._stops[number]):
            top, bottom = self._middle(upper) + _STOP_HEIGHT / 2, self._middle(lower)
            path = f"M{x:g} {top:g} L{x:g} {bottom - _STOP_HEIGHT / 2:g}"
            lines.append(svg.element("path", d=path, class_="line exchange-line"))
        if not lines:
            return ""
        return svg.titled(f"replicas exchange gradients of stage {number}", *lines, class_="link")


def _of_stage(held: Range, also: str) -> tuple[str, str]:
    """The two lines of text of a stop of a stage."""
    share = f" · {held.share_as_text}" if held.share is not None else ""
    return layers_as_text(held.layers), f"stage {held.stage}{also}{share}"


@dataclass(frozen=True)
class CardGrid:
    """The common layout of all cards of a picture, with level rows.

    Args:
        device_lines: The number of lines of the longest device name.
        has_memory: Whether any card has a memory bar.
        mark_rows: The largest number of rows of marks.
    """

    device_lines: int
    has_memory: bool
    mark_rows: int

    @classmethod
    def around(cls, places: Sequence[DrawnPlace]) -> CardGrid:
        """The layout with room for all these places."""
        return cls(
            max(len(device_lines(place.device, INNER_WIDTH)) for place in places),
            any(place.memory for place in places),
            max(len(_mark_rows(place)) for place in places),
        )

    @property
    def height(self) -> float:
        """The height of a card."""
        return (
            PADDING
            + HEADER_HEIGHT
            + self.device_lines * DEVICE_LINE_HEIGHT
            + LAYERS_HEIGHT
            + self.has_memory * MEMORY_HEIGHT
            + self.mark_rows * MARKS_HEIGHT
        )


def card(place: DrawnPlace, num_layers: int, machine: int, grid: CardGrid) -> str:
    """The card of a worker, with its upper left corner at the origin."""
    parts = [
        svg.rectangle(0, 0, CARD_WIDTH, grid.height, "card edge", radius=12),
        svg.moved(PADDING, PADDING, header(place, machine, INNER_WIDTH)),
    ]
    y = PADDING + HEADER_HEIGHT
    for line, content in enumerate(device_lines(place.device, INNER_WIDTH)):
        parts.append(svg.text(PADDING, y + line * DEVICE_LINE_HEIGHT, content, "normal soft"))
    y += grid.device_lines * DEVICE_LINE_HEIGHT
    parts.append(svg.moved(PADDING, y, layers_row(place, num_layers, machine, INNER_WIDTH)))
    y += LAYERS_HEIGHT
    if place.memory is not None:
        parts.append(svg.moved(PADDING, y, memory_row(place.memory, INNER_WIDTH)))
    y += grid.has_memory * MEMORY_HEIGHT
    for row, marks in enumerate(_mark_rows(place)):
        parts.append(svg.moved(PADDING, y + row * MARKS_HEIGHT, marks_row(marks)))
    said = [place.name, place.device, stages_as_text(place.ranges), *place.marks]
    return svg.titled(", ".join(part for part in said if part), *parts, class_="place")


def _mark_rows(place: DrawnPlace) -> list[list[str]]:
    """The marks in the card, in rows. The marks of the model's ends are at their stages."""
    marks = [mark for mark in place.marks if mark not in (EMBEDDING, HEAD)]
    return svg.in_rows(marks, _pill_width, _PILL_GAP, INNER_WIDTH)


def device_lines(device: str, width: float) -> list[str]:
    """The name of a device in two lines of at most this width; words without room are left out."""

    def fits(name: str) -> bool:
        return not any("…" in line for line in svg.wrapped(name.rstrip(" …"), width, 12, 2))

    return svg.wrapped(short_device(device, fits), width, 12, 2)


def header(place: DrawnPlace, machine: int, width: float) -> str:
    """The number of the place in its machine's colour, and its name."""
    host, port = split_address(place.name)
    aside = f"{port} {place.machine_name}" if port and is_loopback(host) else port or place.host
    room = width - 34
    aside_width = svg.width_of(aside, 12) + 6 if aside else 0
    if aside and not port and svg.width_of(host, 14, is_bold=True) + aside_width > room:
        aside, aside_width = "", 0
    name = svg.elided(host, room - aside_width, 14, is_bold=True)
    parts = [svg.element("tspan", svg.escaped(name), class_="name ink")]
    if aside:
        # A space character, not only a gap, so that screen readers separate the two words.
        said = aside if port else f" {aside}"
        parts.append(svg.element("tspan", svg.escaped(said), class_="normal soft", dx=1))
    circle = svg.element("circle", cx=12, cy=12, r=12, class_=svg.hue(machine))
    chip = svg.text(12, 16.5, str(place.number), "chip", "middle")
    return circle + chip + svg.element("text", *parts, x=34, y=17)


def layers_row(place: DrawnPlace, num_layers: int, machine: int, width: float) -> str:
    """The layers of a place, and their position in the model."""
    count = f"{place.num_layers} of {num_layers}"
    layers = [each.layers for each in place.ranges]
    room = width - svg.width_of(count, 11) - 8
    words = svg.text(
        0, 12, svg.elided(layers_as_text(*layers), room, 13, is_bold=True), "strong ink"
    )
    words += svg.text(width, 12, count, "small soft", "end")
    return words + svg.moved(0, 20, layer_map(layers, num_layers, machine, width))


def layer_map(
    ranges: Sequence[tuple[int, int]], num_layers: int, machine: int, width: float
) -> str:
    """All layers of the model in a row; the place's own layers are coloured."""
    # The last cell ends with the row, as bars below it do.
    cell = (width + _CELL_GAP) / max(num_layers, 1)
    if cell >= _LEAST_CELL:
        held = {number for layers in ranges for number in range(*layers)}
        colours = [svg.hue(machine) if n in held else "track" for n in range(num_layers)]
        return "".join(
            svg.rectangle(index * cell, 0, cell - _CELL_GAP, 10, colour, radius=2)
            for index, colour in enumerate(colours)
        )
    parts = [svg.rectangle(0, 0, width, 10, "track", radius=3)]
    cell = width / num_layers
    for first, end in ranges:
        length = max((end - first) * cell, 3)
        start = min(first * cell, width - length)
        parts.append(svg.rectangle(start, 0, length, 10, svg.hue(machine), radius=2))
    return "".join(parts)


def memory_row(memory: Memory, width: float) -> str:
    """The memory of a place as text and as a bar."""
    parts = [
        svg.text(0, 8, memory.name, "small soft"),
        svg.text(width, 8, memory_as_text(memory), "small soft", "end"),
    ]
    if memory.total_bytes and memory.used_bytes:
        parts.append(svg.moved(0, 15, _memory_bar(memory, width)))
    return "".join(parts)


def _memory_bar(memory: Memory, width: float) -> str:
    """The bar of the memory's parts, in the legend's colours; it ends at the device's memory."""
    parts = [svg.rectangle(0, 0, width, _BAR_HEIGHT, "track", radius=3)]
    start = 0.0
    for name in MEMORY_PARTS:
        share = memory.used_bytes.get(name, 0.0) / memory.total_bytes
        length = min(share * width, width - start)
        if length > 0:
            parts.append(svg.rectangle(start, 0, length, _BAR_HEIGHT, memory_class(name)))
            start += length
    return "".join(parts)


def memory_class(name: str) -> str:
    """The style class of a part of the memory bar."""
    return f"of-{name.replace(' ', '-')}"


def marks_row(marks: Sequence[str]) -> str:
    """A row of marks, each in a rounded box."""
    parts, x = [], 0.0
    for mark in marks:
        width = _pill_width(mark)
        parts.append(svg.rectangle(x, 0, width, MARK_HEIGHT, "pill", radius=MARK_HEIGHT / 2))
        parts.append(svg.text(x + width / 2, 14, mark, "small ink", "middle"))
        x += width + _PILL_GAP
    return "".join(parts)


def _pill_width(mark: str) -> float:
    return svg.width_of(mark, 11) + 18


@dataclass(frozen=True)
class Label:
    """A text beside a link, with the style class of its direction."""

    content: str
    class_: str


def both_ways(points: Sequence[Point], link: DrawnLink) -> str:
    """The two lines of a link: activations along the points, gradients back. A one-way link carries
    only token ids."""
    if link.is_one_way:
        lines = svg.arrow(points, "token")
    else:
        lines = svg.arrow(svg.beside(points, APART), "activation")
        lines += svg.arrow(list(reversed(svg.beside(points, -APART))), "gradient")
    said = [label.content for side in labels(link) for label in side]
    return svg.titled(", ".join(said), lines, class_="link") if said else lines


def labels(link: DrawnLink) -> tuple[list[Label], list[Label]]:
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


def label_beside(x: float, y: float, link: DrawnLink) -> str:
    """Labels on the right of the middle of a vertical link, two per line and direction."""
    lines = _label_lines(link)
    top = y - (len(lines) - 1) * LABEL_HEIGHT / 2 + 4
    return "".join(
        _in_a_line(x, top + number * LABEL_HEIGHT, line) for number, line in enumerate(lines)
    )


def labels_width(link: DrawnLink) -> float:
    """The width of the labels beside a vertical link."""
    lines = [" · ".join(one.content for one in line) for line in _label_lines(link)]
    return max((svg.width_of(line, 11) for line in lines), default=0.0)


def _label_lines(link: DrawnLink) -> list[list[Label]]:
    return [side[i : i + 2] for side in labels(link) for i in range(0, len(side), 2)]


def _in_a_line(x: float, y: float, parts: Sequence[Label]) -> str:
    spans = [
        svg.element(
            "tspan", svg.escaped(f"{' · ' * (number > 0)}{part.content}"), class_=part.class_
        )
        for number, part in enumerate(parts)
    ]
    return svg.element("text", *spans, x=x, y=y)


def _are_alike(one: Link, other: Link) -> bool:
    return abs(one.bytes_per_second / other.bytes_per_second - 1) < _ALIKE


def size_of(topology: Topology) -> str:
    """The layers and the processes, in words."""
    places = len(topology.places)
    processes = f"{places} processes" if places > 1 else "one process"
    return f"{topology.num_layers} layers over {processes}"


def fact_lines(topology: Topology, width: float) -> list[str]:
    """The facts about the whole run, in lines of at most this width."""
    facts = [*([size_of(topology)] if topology.title else []), *topology.facts]
    # Non-breaking spaces make lines end between facts where possible.
    whole = (fact.replace(" ", "\N{NO-BREAK SPACE}") for fact in facts)
    lines = svg.wrapped(" · ".join(whole), width, 12, most_lines=4)
    return [line.removesuffix(" ·") for line in lines]


def heading_height(topology: Topology, width: float) -> float:
    """The height of the heading, with the margin above it."""
    return MARGIN + 38 + 17 * len(fact_lines(topology, width))


def heading(topology: Topology, left: float, width: float) -> str:
    """The title, and the facts about the whole run."""
    title = svg.elided(topology.title or size_of(topology), width, 20, is_bold=True)
    lines = [svg.text(left, MARGIN + 16, title, "title ink")]
    for number, line in enumerate(fact_lines(topology, width)):
        lines.append(svg.text(left, MARGIN + 40 + 17 * number, line, "normal soft"))
    return "".join(lines)


def legend_rows(topology: Topology, width: float) -> list[list[_Item]]:
    """The kind of each item of the legend and its words, in rows."""
    items = []
    if topology.hops:
        ways = [hop.link.is_one_way for hop in topology.hops]
        items += [("token", "token ids")] if any(ways) else []
        items += [("activation", "activations"), ("gradient", "gradients")]
        items += [("exchange", "gradients of replicas")] if topology.exchanges else []
    used = {
        name
        for place in topology.places
        if place.memory is not None and place.memory.total_bytes
        for name, amount in place.memory.used_bytes.items()
        if amount
    }
    words = {"training": "gradients and optimizer", "other": "working memory"}
    items += [(name, words.get(name, name)) for name in MEMORY_PARTS if name in used]
    return svg.in_rows(items, lambda item: 28 + svg.width_of(item[1], 11), 22, width)


def legend(rows: Sequence[Sequence[_Item]], left: float, top: float) -> str:
    """The rows of the legend below each other."""
    parts = []
    y = top
    for row in rows:
        x = left
        for kind, words in row:
            parts.append(svg.moved(x, y, _swatch(kind), svg.text(28, 11, words, "small soft")))
            x += 28 + svg.width_of(words, 11) + 22
        y += LEGEND_ROW
    return svg.element("g", *parts, class_="legend")


def _swatch(kind: str) -> str:
    if kind in MEMORY_PARTS:
        return svg.rectangle(6, 2, 14, 10, memory_class(kind), radius=2)
    return svg.element("path", d="M0 7 L22 7", class_=f"line {kind}-line")


def mermaid(topology: Topology) -> str:
    """The topology as a Mermaid flowchart; GitHub, GitLab and many editors draw it."""
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
        hue = svg.HUES[topology.machines.index(place.machine) % len(svg.HUES)]
        yield f"  style {own} stroke:{hue},stroke-width:2px"


def _content(place: DrawnPlace, topology: Topology) -> str:
    shared = [held for held in place.ranges if held.stage != COORDINATOR_STAGE]
    has_number = len(shared) > 1 or any(held.share is not None for held in shared)
    held = stages_as_text(shared) if has_number else _layers_of(place)
    if place is topology.coordinator:
        before, behind = topology.own_parts
        names = [*before[1:], *([stages_as_text(shared)] if shared else []), *behind]
        held = " · ".join(map(topology.shown, names))
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
    """The arrow of a link; it names its two stages if a worker has several stages, or a stage
    several workers.
    """
    link = hop.link
    above, below = labels(link)
    after = (hop.stage + 1) % (topology.num_stages + 1)
    what = [] if topology.is_line else [f"{hop.stage} ▸ {after}"]
    what += ["token ids"] if link.is_one_way else []
    said = " · ".join([*what, *(label.content for label in (*above, *below))])
    back = "" if link.is_one_way else "<"
    return f'{back}-- "{_said(said)}" -->' if said else f"{back}-->"


def _mermaid_exchange(hop: DrawnHop) -> str:
    """The dotted line between two replicas; it names their stage."""
    known = [label.content for side in labels(hop.link) for label in side]
    said = " · ".join([f"gradients of stage {hop.stage}", *known])
    return f'<-. "{_said(said)}" .->'


def _said(text: str) -> str:
    """Text for a quoted string, with codes for the characters of Mermaid's and HTML's syntax."""
    codes = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;"}
    return "".join(codes.get(character, character) for character in text if character.isprintable())


FORMATS: dict[str, Callable[[Topology], bytes]] = {
    ".svg": lambda topology: diagram(topology).encode(),
    ".png": lambda topology: svg.png(diagram(topology)),
    ".mmd": lambda topology: mermaid(topology).encode(),
}


def check_format(name: str) -> None:
    """Refuse a file name if its suffix is not a format of pictures.

    Raises:
        PictureError: With the formats.
    """
    if PurePath(name).suffix.lower() not in FORMATS:
        raise PictureError(
            f"{name!r} does not name a format of pictures; it must end in {', '.join(FORMATS)}."
        )


def picture_for(name: str, topology: Topology) -> bytes:
    """The picture in the format of a file name's suffix.

    Raises:
        PictureError: If the format is unknown, or cannot be made on this machine.
    """
    check_format(name)
    return FORMATS[PurePath(name).suffix.lower()](topology)
