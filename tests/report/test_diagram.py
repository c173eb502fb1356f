from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from lightning_hetero.report.diagram import LAYERS_HEIGHT, device_lines, diagram, layer_map, mermaid
from lightning_hetero.report.topology import DrawnPlace, Memory, Topology

from .topologies import GIB, bare, coordinator_last, shaped, topology

SVG = "{http://www.w3.org/2000/svg}"


def words(drawn: Topology) -> list[str]:
    """Every text of the picture."""
    root = ElementTree.fromstring(diagram(drawn))  # noqa: S314
    return ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]


def test_every_fact_is_in_the_picture() -> None:
    found = words(topology(2))
    for said in (
        *("coordinator this machine", "NVIDIA GeForce RTX 5090"),
        *("data ▸ embedding, frozen", "head, frozen ▸ loss"),
        *("layers 0–2", "strix.local:9999", "layers 3–7", "5 of 13", "48 of 96 GiB", "recomputed"),
        *("118 MB/s", "0.4 ms", "bfloat16", "59 MB/s · 12 ms", "activations", "working memory"),
    ):
        assert said in found, f"{said!r} is not among {found}."


def test_unknown_facts_are_left_out() -> None:
    found = " ".join(words(bare(2)))
    for said in ("memory", "MB/s", "GiB", "frozen,", "weights"):
        assert said not in found
    assert "layers 3–7" in found
    assert found.startswith("13 layers over 3 processes")


def test_a_picture_needs_no_other_file() -> None:
    drawn = diagram(topology(12))
    assert "http" not in drawn.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "<script" not in drawn


def test_the_same_facts_make_the_same_picture() -> None:
    assert diagram(topology(5)) == diagram(topology(5))


def test_machines_have_colours_of_their_own() -> None:
    root = ElementTree.fromstring(diagram(topology(5)))  # noqa: S314
    chips = [node.get("class") for node in root.iter(f"{SVG}circle")]
    assert chips == ["hue-0", "hue-1", "hue-2", "hue-3", "hue-4", "hue-4"]


def test_a_name_from_elsewhere_is_only_text() -> None:
    drawn = topology(1)
    hostile = replace(drawn.workers[0], name='<script>"&\x00', device="]]><svg onload=x>")
    found = words(replace(drawn, title="</svg><b>", workers=[hostile]))
    assert '<script>"&\N{REPLACEMENT CHARACTER}' in found


def memory_bars(drawn: Topology) -> list[ElementTree.Element]:
    """The parts of all memory bars; swatches of the legend have a `y`."""
    root = ElementTree.fromstring(diagram(drawn))  # noqa: S314
    return [
        node
        for node in root.iter(f"{SVG}rect")
        if (node.get("class") or "").startswith("of-") and node.get("y") == "0"
    ]


def links_of(drawn: Topology) -> list[str]:
    """The classes of the lines of all links, with their paths."""
    root = ElementTree.fromstring(diagram(drawn))  # noqa: S314
    return [
        f"{node.get('class')} {node.get('d')}"
        for node in root.iter(f"{SVG}path")
        if (node.get("class") or "").startswith("line ")
    ]


def test_the_legend_has_the_colours_of_the_bars() -> None:
    drawn = topology(3)
    root = ElementTree.fromstring(diagram(drawn))  # noqa: S314
    (legend,) = (g for g in root.iter(f"{SVG}g") if g.get("class") == "legend")
    swatches = {node.get("class") for node in legend.iter(f"{SVG}rect")}
    assert swatches == {bar.get("class") for bar in memory_bars(drawn)}
    assert swatches == {"of-weights", "of-training", "of-in-flight", "of-other"}


def test_token_ids_are_drawn_as_such_to_the_embedding() -> None:
    drawn = coordinator_last(2)
    assert [line.split()[1] for line in links_of(drawn)] == [
        *("token-line", "activation-line", "gradient-line", "activation-line", "gradient-line"),
        *("token-line", "activation-line", "gradient-line"),  # the legend's
    ]
    found = words(drawn)
    assert {"token ids", "data", "stage 1, embedding"} <= set(found)
    assert "embedding" not in found, "the card does not repeat it"
    assert "token ids" not in words(topology(2))


def test_without_workers_all_parts_are_in_one_lane() -> None:
    found = words(topology(0))
    assert {"data ▸ embedding, frozen", "layers 0–2", "head, frozen ▸ loss"} <= set(found)
    assert len(links_of(topology(0))) == 1


def test_workers_behind_tunnels_are_machines_of_their_own() -> None:
    places = [
        replace(place, name=f"127.0.0.1:{9998 + number}", host=host, identity=identity)
        for number, (place, host, identity) in enumerate(
            zip(topology(3).workers, ("ada", "bob", "bob"), ("a", "b", "c"), strict=True)
        )
    ]
    drawn = replace(topology(3), workers=places)
    root = ElementTree.fromstring(diagram(drawn))  # noqa: S314
    chips = [node.get("class") for node in root.iter(f"{SVG}circle")]
    assert chips == ["hue-0", "hue-1", "hue-2", "hue-3"]
    assert "127.0.0.1:9998 ada" in words(drawn)
    subgraphs = [line for line in mermaid(drawn).splitlines() if "subgraph" in line]
    assert [re.findall(r'"(.*)"', line)[0] for line in subgraphs] == [
        "this machine",
        "ada",
        "bob",
        "bob",
    ]


def test_processes_of_one_machine_have_one_colour() -> None:
    stages = [
        replace(place, host=host, identity="same")
        for place, host in zip(topology(2).workers, ("ada", "container"), strict=True)
    ]
    drawn = replace(topology(2), workers=stages)
    assert len(drawn.machines) == 2


@pytest.mark.parametrize(
    ("device", "lines"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.50GHz", ["Intel Xeon", "2.50GHz"]),
        ("NVIDIA GeForce RTX 5090", ["NVIDIA GeForce", "RTX 5090"]),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", ["RTX PRO 6000", "Blackwell …"]),
    ],
)
def test_a_long_device_name_is_shortened_by_words(device: str, lines: list[str]) -> None:
    assert device_lines(device, 100) == lines


def test_the_strip_of_layers_ends_with_the_bar_below_it() -> None:
    root = ElementTree.fromstring(layer_row(12))
    cells = list(root.iter(f"{SVG}rect"))
    assert float(cells[-1].get("x", "")) + float(cells[-1].get("width", "")) == pytest.approx(220)
    bottom = max(float(cell.get("height", "")) for cell in cells) + 20
    assert bottom + 10 < LAYERS_HEIGHT, "a gap remains above the memory's text and bar"


def layer_row(num_layers: int) -> str:
    strip = layer_map([(0, 3)], num_layers, 0, 220)
    return f'<svg xmlns="http://www.w3.org/2000/svg">{strip}</svg>'


def test_mermaid_says_what_the_memory_is_for() -> None:
    weights = replace(topology(1).workers[0], memory=Memory(24 * GIB, {"weights": GIB}))
    shown = mermaid(replace(topology(1), workers=[weights]))
    assert "weights: 1.0 of 24 GiB of memory" in shown
    assert "all of training: " in shown
    unknown = replace(weights, memory=Memory(24 * GIB))
    assert "memory of 24 GiB" in mermaid(replace(topology(1), workers=[unknown]))


@pytest.mark.parametrize("used", [0.0, 5.0, 20.0])
def test_a_memory_bar_ends_with_the_memory(used: float) -> None:
    drawn = topology(1)
    memory = Memory(10 * GIB, {"weights": used * GIB, "in flight": used * GIB})
    unmeasured = replace(drawn.coordinator, memory=None)
    stages = [replace(drawn.workers[0], memory=memory)]
    bars = memory_bars(replace(drawn, coordinator=unmeasured, workers=stages))
    ends = [float(bar.get("x", "")) + float(bar.get("width", "")) for bar in bars]
    assert max(ends, default=0.0) == pytest.approx(220 * min(2 * used / 10, 1))


def test_a_model_of_hundred_layers_has_one_bar_for_a_range() -> None:
    drawn = replace(topology(2, 0), num_layers=100)
    assert diagram(drawn).count("<rect") < 50


def test_every_place_and_link_is_there() -> None:
    lines = mermaid(topology(5)).splitlines()
    assert lines[0] == "flowchart LR"
    assert [line.strip() for line in lines if "subgraph" in line] == [
        'subgraph machine0["this machine"]',
        'subgraph machine1["strix.local"]',
        'subgraph machine2["old-tower"]',
        'subgraph machine3["192.168.178.142"]',
        'subgraph machine4["lab-7"]',
    ]
    arrows = [line.split() for line in lines if "-->" in line]
    assert [(a[0], a[-1]) for a in arrows] == [
        (f"process{i}", f"process{(i + 1) % 6}") for i in range(6)
    ]
    assert "embedding, frozen · layers 0–2 · head, frozen · loss" in "".join(lines)


def test_token_ids_go_one_way() -> None:
    text = mermaid(coordinator_last(2))
    assert "<br/>layers 10–12 · head, frozen · loss<br/>" in text
    arrows = [line.strip() for line in text.splitlines() if "-->" in line]
    assert [arrow.split()[1][0] for arrow in arrows] == ["-", "<", "<"]
    assert ["token ids" in arrow for arrow in arrows] == [True, False, False]


def test_without_measurements_links_say_nothing() -> None:
    assert "  process0 <--> process1" in mermaid(bare(1)).splitlines()


def test_quotes_and_markup_are_codes() -> None:
    drawn = topology(1)
    hostile = replace(drawn.workers[0], device='"]; click x "javascript:1" <b>\n%%')
    line = next(
        line for line in mermaid(replace(drawn, workers=[hostile])).splitlines() if "click" in line
    )
    assert line.count('"') == 2
    assert "#lt;b#gt;" in line


def arrows_of(drawn: Topology) -> list[tuple[str, str, str]]:
    """Source, target and label of each arrow of the Mermaid text."""
    lines = [line.strip() for line in mermaid(drawn).splitlines() if "-->" in line]
    return [
        (line.split()[0], line.split()[-1], "".join(re.findall('"(.*?) ·', line))) for line in lines
    ]


def test_a_ring_is_drawn_along_its_layers() -> None:
    assert arrows_of(shaped("C", "b", "a", "b", "C")) == [
        ("process0", "process1", "0 ▸ 1"),
        ("process1", "process2", "1 ▸ 2"),
        ("process2", "process1", "2 ▸ 3"),
        ("process1", "process0", "3 ▸ 0"),
    ]
    shown = mermaid(shaped("C", "b", "a", "b", "C"))
    assert "stage 1: layer 1, stage 3: layer 3" in shown
    assert "embedding · layer 0 · layer 4 · head · loss" in shown


def test_between_two_stages_of_one_process_nothing_is_sent() -> None:
    drawn = shaped("a", "a", "b", "C")
    assert [arrow[:2] for arrow in arrows_of(drawn)] == [
        ("process0", "process1"),
        ("process1", "process2"),
        ("process2", "process0"),
    ]
    # Two lines for each of three links, one inside the process, and two in the legend.
    assert len(links_of(drawn)) == 9


def test_each_process_has_a_lane_with_a_stop_for_each_of_its_stages() -> None:
    found = words(shaped("C", "a", "b", "a", "b", "C"))
    for said in (
        *("layers 0 and 5", "layers 1 and 3", "layers 2 and 4", "data ▸ embedding", "head ▸ loss"),
        *(f"stage {number}" for number in (1, 2, 3, 4)),
    ):
        assert found.count(said) == 1, said
    chips = [said for said in found if said in "012345"]
    assert chips == ["0", "1", "2"]


def lines_between(drawn: Topology) -> list[tuple[float, float, float, float]]:
    """Where the lines of activations begin and end."""
    found = []
    for line in links_of(drawn):
        if line.startswith("line activation-line M"):
            numbers = [float(number) for number in re.findall(r"-?[\d.]+", line)]
            found.append((*numbers[:2], *numbers[-2:]))
    return found[:-1]  # without the legend's


@pytest.mark.parametrize(
    "names", ["Cabc", "aba", "CabcabcC", "aabC", "abababab", "CaabbaaC", "CaC"]
)
def test_the_lines_of_lanes_go_from_left_to_right_and_do_not_meet(names: str) -> None:
    drawn = shaped(*names, *(["a"] if len(set(names)) == len(names) else []))
    ways = lines_between(drawn)
    assert len(ways) == len(drawn.hops)
    for before, after in pairwise(ways):
        assert before[0] < before[2] < after[0]


def test_replicas_are_above_each_other_with_their_shares() -> None:
    drawn = shaped("C", "a3+b2+c0", "a1+C1")
    found = words(drawn)
    for said in (
        *("stage 1 · 3 of 5", "stage 1 · 2 of 5", "stage 1 · warm spare"),
        "gradients of replicas",
    ):
        assert found.count(said) == 1, said
    assert found.count("stage 2 · 1 of 2") == 2
    root = ElementTree.fromstring(diagram(drawn))  # noqa: S314
    pills = [node for node in root.iter(f"{SVG}rect") if node.get("class") == "pill"]
    columns = [float(node.get("x", "")) for node in pills]
    assert [columns.count(x) for x in dict.fromkeys(columns)] == [1, 3, 2, 1]


def vertical_lines(drawn: Topology) -> list[tuple[float, float, float]]:
    """Where lines of activations go up or down: x, and the two ends."""
    found = []
    for line in links_of(drawn):
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", line)]
        if line.startswith("line activation-line M") and len(numbers) > 6:
            found.append((numbers[2], *sorted((numbers[1], numbers[-1]))))
    return found


@pytest.mark.parametrize("names", [("C", "a2+b1", "C"), ("a1+b1+c1", "d1+e1"), ("a2+C1", "b")])
def test_links_of_replicas_stand_apart(names: tuple[str, ...]) -> None:
    drawn = shaped(*names)
    between = [hop for hop in drawn.hops if not hop.is_inside]
    lines = sorted(vertical_lines(drawn))
    assert len(lines) == len(between)
    assert all(other[0] - one[0] > 10 for one, other in pairwise(lines))


def test_mermaid_tells_the_shares_and_who_exchanges_gradients() -> None:
    shown = mermaid(shaped("C", "a2+b1", "C"))
    assert "stage 1: layer 1 (2 of 3)" in shown
    assert '  process1 <-. "gradients of stage 1" .-> process2' in shown.splitlines()
    hosted = mermaid(shaped("a2+C1", "b"))
    assert "embedding · stage 1: layer 0 (1 of 3) · head · loss" in hosted
    assert '  process0 <-. "gradients of stage 1" .-> process1' in hosted.splitlines()
    of_all = mermaid(shaped("a+C+b"))
    assert '  process1 <-. "gradients of stage 1" .-> process2' not in of_all.splitlines()
    split = mermaid(shaped("a+C+b", optimizer="split"))
    assert '  process1 <-. "gradients of stage 1" .-> process2' in split.splitlines()
    assert [arrow[:2] for arrow in arrows_of(shaped("a2+C1", "b"))] == [
        *(("process0", "process1"), ("process0", "process2")),
        *(("process1", "process2"), ("process2", "process0")),
    ]


@pytest.mark.parametrize("names", ["CaC", "aba"])
def test_a_worker_without_layers_is_drawn_without_links(names: str) -> None:
    drawn = shaped(*names)
    idle = replace(drawn, workers=[*drawn.workers, DrawnPlace("idle:1", 9)])
    assert words(idle).count("idle:1") == 1
    assert "9" in words(idle)
    assert "process9" in mermaid(idle)
    assert "no layers" in words(idle)
    assert arrows_of(idle) == [
        (source, target, f"{hop.stage} ▸ {(hop.stage + 1) % len(drawn.hops)}")
        for (source, target, _), hop in zip(arrows_of(drawn), drawn.hops, strict=True)
    ]
