"""What surrounds the places of a diagram: the heading above them and the legend below them."""

from __future__ import annotations

from collections.abc import Sequence

from .card import memory_class
from .svg import element, elided, in_rows, moved, rectangle, text, width_of, wrapped
from .topology import MEMORY_PARTS, Topology

MARGIN = 36.0
LEGEND_ROW = 22

_Item = tuple[str, str]


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
    lines = wrapped(" · ".join(whole), width, 12, most_lines=4)
    return [line.removesuffix(" ·") for line in lines]


def heading_height(topology: Topology, width: float) -> float:
    """The height of the heading, with the margin above it."""
    return MARGIN + 38 + 17 * len(fact_lines(topology, width))


def heading(topology: Topology, left: float, width: float) -> str:
    """The title, and the facts about the whole run."""
    title = elided(topology.title or size_of(topology), width, 20, is_bold=True)
    lines = [text(left, MARGIN + 16, title, "title ink")]
    for number, line in enumerate(fact_lines(topology, width)):
        lines.append(text(left, MARGIN + 40 + 17 * number, line, "normal soft"))
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
    return in_rows(items, lambda item: 28 + width_of(item[1], 11), 22, width)


def legend(rows: Sequence[Sequence[_Item]], left: float, top: float) -> str:
    """The rows of the legend below each other."""
    parts = []
    y = top
    for row in rows:
        x = left
        for kind, words in row:
            parts.append(moved(x, y, _swatch(kind), text(28, 11, words, "small soft")))
            x += 28 + width_of(words, 11) + 22
        y += LEGEND_ROW
    return element("g", *parts, class_="legend")


def _swatch(kind: str) -> str:
    if kind in MEMORY_PARTS:
        return rectangle(6, 2, 14, 10, memory_class(kind), radius=2)
    return element("path", d="M0 7 L22 7", class_=f"line {kind}-line")
