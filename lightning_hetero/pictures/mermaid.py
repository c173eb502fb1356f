"""The topology as Mermaid text, which GitHub, GitLab and many editors draw."""

from __future__ import annotations

from collections.abc import Iterator

from .style import HUES
from .topology import Link, Place, Topology, layers_as_text, memory_as_text
from .wiring import labels


def mermaid(topology: Topology) -> str:
    """The text of a flowchart."""
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
        yield f"  {ids[source.name]} {_arrow(link)} {ids[target.name]}"
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


def _arrow(link: Link) -> str:
    above, below = labels(link)
    said = " · ".join(label.content for label in (*above, *below))
    back = "" if link.is_one_way else "<"
    return f'{back}-- "{_said(said)}" -->' if said else f"{back}-->"


def _said(text: str) -> str:
    """Text inside of quotes, with what Mermaid or HTML would take for its own written as codes."""
    codes = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;"}
    return "".join(codes.get(character, character) for character in text if character.isprintable())
