"""The diagram of a topology in which a worker has several stages, as SVG.

Each process has a lane. The layers go from left to right, so that no arrow goes back:

    ┌ coordinator ┐  layers 0–1 ─┐                                   ┌▶ layer 6 ▸ head
    ┌ a ──────────┐              └▶ layers 2–3 ─┐     ┌▶ layer 5 ────┘
    ┌ b ──────────┐                             └▶ layer 4
"""

from __future__ import annotations

from functools import cached_property

from ..telemetry.ranges import layers_as_text
from .card import CARD_WIDTH, CardGrid, card
from .frame import LEGEND_ROW, MARGIN, heading, heading_height, legend, legend_rows, size_of
from .links import LABEL_HEIGHT, both_ways, label_beside, labels_width
from .svg import Point, arrow, elided, hue, moved, picture_file, rectangle, text, titled, width_of
from .topology import EMBEDDING, Hop, Topology

_GAP = 64.0
_BETWEEN_LANES = 5 * LABEL_HEIGHT
_STOP_HEIGHT = 50.0
_MOST_OF_STOP = 220.0
# Between the line of a link and its labels.
_ASIDE = 14.0


def lanes(topology: Topology) -> str:
    """The picture as the text of a self-contained SVG file."""
    return _Lanes(topology).svg()


class _Lanes:
    """The layout of the picture. Coordinates are pixels from the upper left corner.

    A stop is a place on the way of the activations: the coordinator's first part, each stage, and
    the coordinator's last part.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._grid = CardGrid.around(topology.places, CARD_WIDTH)
        self._stops = self._lines_of_stops()

    def svg(self) -> str:
        topology = self._topology
        height = self._bottom + 30 + LEGEND_ROW * len(self._legend_rows) + MARGIN - 12
        return picture_file(
            MARGIN + self._inner + MARGIN,
            height,
            f"Topology: {topology.title or size_of(topology)}",
            heading(topology, MARGIN, self._inner),
            *(self._lane(index) for index in range(len(topology.places))),
            *(self._stop(number) for number in range(len(self._stops))),
            *map(self._wire, topology.hops),
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

    def _lines_of_stops(self) -> list[tuple[str, str]]:
        """The two lines of text of each stop."""
        topology = self._topology
        before, behind = topology.own_parts
        found = [self._of_coordinator([part.name for part in before])]
        held = {each.stage: each for place in topology.workers for each in place.ranges}
        for number in range(1, len(topology.links)):
            also = f", {EMBEDDING}" if number == 1 and self._embeds_on_worker else ""
            found.append((layers_as_text(held[number].layers), f"stage {number}{also}"))
        return [*found, self._of_coordinator([part.name for part in behind])]

    def _of_coordinator(self, names: list[str]) -> tuple[str, str]:
        """The coordinator's parts in two lines, of which the layers have one."""
        frozen = {end: f"{end}, frozen" for end in self._topology.frozen_ends}
        layers = [name for name in names if name.startswith("layer")]
        others = " ▸ ".join(frozen.get(name, name) for name in names if name not in layers)
        if not layers:
            return others, ""
        return (layers[0], others) if names[0] in layers else (others, layers[0])

    @property
    def _embeds_on_worker(self) -> bool:
        return EMBEDDING in self._topology.workers[0].marks

    @cached_property
    def _widths(self) -> list[float]:
        """The width of each stop; it has room for the labels of the link before it."""
        found = []
        for number, (first, second) in enumerate(self._stops):
            own = max(width_of(first, 12, is_bold=True), width_of(second, 11)) + 22
            link = self._topology.links[number - 1] if number else None
            # Labels begin in the middle of the gap, and end before the middle of the next one.
            room = 0.0 if link is None else labels_width(link) + 2 * _ASIDE - _GAP
            found.append(max(84.0, min(own, _MOST_OF_STOP), room))
        return found

    @cached_property
    def _columns(self) -> list[float]:
        """The left edge of each stop."""
        x, found = MARGIN + CARD_WIDTH + 28, []
        for width in self._widths:
            found.append(x)
            x += width + _GAP
        return found

    def _lane(self, index: int) -> str:
        place, y = self._topology.places[index], self._y(index)
        num_layers, machine = self._topology.num_layers, self._machine(index)
        lane = rectangle(MARGIN, y, self._inner, self._grid.height, "lane", radius=12)
        return lane + moved(MARGIN, y, card(place, num_layers, machine, self._grid))

    def _stop(self, number: int) -> str:
        index, (first, second) = self._topology.route[number], self._stops[number]
        x, width = self._columns[number], self._widths[number]
        y, room, middle = self._middle(index) - _STOP_HEIGHT / 2, width - 12, x + width / 2
        parts = [
            rectangle(x, y, width, _STOP_HEIGHT, "pill", radius=9),
            rectangle(x + 10, y, width - 20, 3, hue(self._machine(index))),
        ]
        if second:
            shown = elided(second, room, 11)
            parts.append(text(middle, y + 39, shown, "small soft", "middle"))
        shown = elided(first, room, 12, is_bold=True)
        parts.append(text(middle, y + (22 if second else 30), shown, "normal ink", "middle"))
        return titled(", ".join(each for each in (first, second) if each), *parts)

    def _machine(self, index: int) -> int:
        return self._topology.machines.index(self._topology.places[index].machine)

    # the links

    def _wire(self, hop: Hop) -> str:
        start, end = self._ends(hop)
        if hop.is_inside:
            return arrow([start, end], "activation")
        middle = start[0] + (end[0] - start[0]) / 2
        points = [start, (middle, start[1]), (middle, end[1]), end]
        # Lanes have stops, which labels would meet; so labels are below the upper lane.
        below = self._y(min(hop.source, hop.target)) + self._grid.height + _BETWEEN_LANES / 2
        return both_ways(points, hop.link) + label_beside(middle + _ASIDE, below, hop.link, "start")

    def _ends(self, hop: Hop) -> tuple[Point, Point]:
        number = hop.stage
        right = self._columns[number] + self._widths[number]
        return (right, self._middle(hop.source)), (
            self._columns[number + 1],
            self._middle(hop.target),
        )
