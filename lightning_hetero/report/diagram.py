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

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import PurePath

from ..errors import PictureError
from ..pipeline.placement import COORDINATOR_STAGE
from ..telemetry.layer_ranges import Range, layers_as_text, stages_as_text
from . import svg
from .diagram_parts import (
    CARD_WIDTH,
    LABEL_HEIGHT,
    LEGEND_ROW,
    MARGIN,
    CardGrid,
    both_ways,
    card,
    heading,
    heading_height,
    label_beside,
    labels,
    labels_width,
    legend,
    legend_rows,
    size_of,
)
from .svg import Point
from .topology import (
    EMBEDDING,
    HEAD,
    DrawnHop,
    DrawnLink,
    DrawnPlace,
    Memory,
    Topology,
    memory_as_text,
)

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
        frozen = {end: f"{end}, frozen" for end in self._topology.frozen_ends}
        layers = [name for name in names if name.startswith("layer")]
        others = " ▸ ".join(frozen.get(name, name) for name in names if name not in layers)
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
        frozen = {end: f"{end}, frozen" for end in topology.frozen_ends}
        names = [*before[1:], *([stages_as_text(shared)] if shared else []), *behind]
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
