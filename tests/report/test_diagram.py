from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from lightning_hetero.report.diagram import diagram, mermaid
from lightning_hetero.report.topology import Memory, Topology

from .topologies import GIB, bare, coordinator_last, topology

SVG = "{http://www.w3.org/2000/svg}"


def words(drawn: Topology) -> list[str]:
    """Every text of the picture."""
    root = ElementTree.fromstring(diagram(drawn))  # noqa: S314
    return ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]


def test_every_fact_is_in_the_picture() -> None:
    found = words(topology(2))
    for said in (
        *(
            "coordinator this machine",
            "NVIDIA GeForce RTX 5090",
            "embedding, frozen",
            "head, frozen",
        ),
        *("layers 0–2", "strix.local:9999", "layers 3–7", "5 of 13", "48 of 96 GiB", "recomputed"),
        *("118 MB/s", "0.4 ms", "bfloat16", "59 MB/s", "loss", "activations", "working memory"),
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
    hostile = replace(drawn.stages[0], name='<script>"&\x00', device="]]><svg onload=x>")
    found = words(replace(drawn, title="</svg><b>", stages=[hostile]))
    assert '<script>"&\N{REPLACEMENT CHARACTER}' in found


@pytest.mark.parametrize("used", [0.0, 5.0, 20.0])
def test_a_memory_bar_ends_with_the_memory(used: float) -> None:
    drawn = topology(1)
    memory = Memory(10 * GIB, {"weights": used * GIB, "in flight": used * GIB})
    root = ElementTree.fromstring(  # noqa: S314
        diagram(replace(drawn, stages=[replace(drawn.stages[0], memory=memory)]))
    )
    bars = [node for node in root.iter(f"{SVG}rect") if "hue-1 of-" in (node.get("class") or "")]
    ends = [float(bar.get("x", "")) + float(bar.get("width", "")) for bar in bars]
    assert max(ends, default=0.0) == pytest.approx(568 * min(2 * used / 10, 1))


def test_a_model_of_hundred_layers_has_one_bar_for_a_range() -> None:
    drawn = replace(topology(2, 0), num_layers=100)
    assert diagram(drawn).count("<rect") < 40


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
        (f"stage{i}", f"stage{(i + 1) % 6}") for i in range(6)
    ]
    assert "embedding, frozen · layers 0–2 · head, frozen · loss" in "".join(lines)


def test_token_ids_go_one_way() -> None:
    text = mermaid(coordinator_last(2))
    assert "<br/>layers 10–12 · head, frozen · loss<br/>" in text
    arrows = [line.strip() for line in text.splitlines() if "-->" in line]
    assert [arrow.split()[1][0] for arrow in arrows] == ["-", "<", "<"]


def test_without_measurements_links_say_nothing() -> None:
    assert "  stage0 <--> stage1" in mermaid(bare(1)).splitlines()


def test_quotes_and_markup_are_codes() -> None:
    drawn = topology(1)
    hostile = replace(drawn.stages[0], device='"]; click x "javascript:1" <b>\n%%')
    line = next(
        line for line in mermaid(replace(drawn, stages=[hostile])).splitlines() if "click" in line
    )
    assert line.count('"') == 2
    assert "#lt;b#gt;" in line
