"""The parts of a diagram as SVG: cards of places, links with labels, heading and legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..telemetry.layer_ranges import layers_as_text, stages_as_text
from . import svg
from .svg import Point
from .topology import (
    EMBEDDING,
    HEAD,
    MEMORY_PARTS,
    DrawnLink,
    DrawnPlace,
    DrawnSpeed,
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
    lines = _lines(link)
    top = y - (len(lines) - 1) * LABEL_HEIGHT / 2 + 4
    return "".join(
        _in_a_line(x, top + number * LABEL_HEIGHT, line) for number, line in enumerate(lines)
    )


def labels_width(link: DrawnLink) -> float:
    """The width of the labels beside a vertical link."""
    lines = [" · ".join(one.content for one in line) for line in _lines(link)]
    return max((svg.width_of(line, 11) for line in lines), default=0.0)


def _lines(link: DrawnLink) -> list[list[Label]]:
    return [side[i : i + 2] for side in labels(link) for i in range(0, len(side), 2)]


def _in_a_line(x: float, y: float, parts: Sequence[Label]) -> str:
    spans = [
        svg.element(
            "tspan", svg.escaped(f"{' · ' * (number > 0)}{part.content}"), class_=part.class_
        )
        for number, part in enumerate(parts)
    ]
    return svg.element("text", *spans, x=x, y=y)


def _are_alike(one: DrawnSpeed, other: DrawnSpeed) -> bool:
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
