from __future__ import annotations

from dataclasses import replace

from lightning_hetero.pictures.mermaid import mermaid

from .topologies import bare, coordinator_last, topology


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
