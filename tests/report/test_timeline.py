"""The timeline of a step: well-formed, with every action, and hatched where a process is idle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_hetero.protocol.fields import Span
from lightning_hetero.report.timeline import chart_of
from lightning_hetero.telemetry.layer_ranges import Range
from lightning_hetero.telemetry.recorded_step import ProcessSpans, RecordedStep

from ..telemetry.made_up import made_up_step, predicted, staggered_step, turn_by_turn, with_loss
from .chromium import FAULTS, evaluate, needs_chromium, page

SVG = "{http://www.w3.org/2000/svg}"


def titles(chart: str) -> list[str]:
    _, *found = ElementTree.fromstring(chart).iter(f"{SVG}title")
    return [title.text or "" for title in found]


def test_every_action_is_drawn_once_and_once_as_predicted() -> None:
    step = made_up_step()
    alone = titles(chart_of(step, None))
    assert [title.split(":")[0] for title in alone] == [
        *("coordinator", "0F0", "0L0", "0B0", "ApplyOptimizer"),
        *("a", "1F0", "1B0", "ApplyOptimizer"),
    ]
    assert alone[1] == "0F0: 2 s"
    assert len(titles(chart_of(step, predicted(step)))) == 18


def texts(chart: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(chart).iter(f"{SVG}text")]


def test_a_process_with_several_stages_has_one_row_that_names_them() -> None:
    chart = chart_of(turn_by_turn(), None)
    assert [title.partition(": ")[0] for title in titles(chart)] == [
        *("coordinator", "0F0", "0L0", "0B0"),
        *("a", "2F0", "2B0"),
        *("b", "1F0", "3F0", "3B0", "1B0"),
    ]
    assert "b: stage 1: layers 1–2, stage 3: layer 4" in titles(chart)
    # Where a row has one stage, the micro-batch is enough.
    shown = [said for said in texts(chart) if said in ("0", "0F0", "2F0", "1F0", "3B0")]
    assert shown == ["0", "0", "0", "0", "0", "1F0", "3B0"]
    said = [text.replace("\N{NO-BREAK SPACE}", " ") for text in texts(chart)]
    assert {"layers 0 and 5", "stage 2: layer 3"} <= set(said)
    assert {"stage 1: layers 1–2,", "stage 3: layer 4"} <= set(said)


def test_bars_stand_where_the_axis_says() -> None:
    root = ElementTree.fromstring(chart_of(made_up_step(), None))
    titled = [g for g in root.iter(f"{SVG}g") if g.find(f"{SVG}title") is not None]
    bars = [r for g in titled for r in g if r.get("class") in ("forward", "backward")]
    hatched = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "bubble"]
    first, last = bars[0], bars[-1]
    scale = float(hatched[0].get("width", "")) / 20  # from the first action, at 1, to the end
    left = float(hatched[0].get("x", ""))
    assert abs(float(first.get("x", "")) - left) < 0.01
    assert abs(float(last.get("x", "")) - left - 12 * scale) < 0.1


def test_a_loss_is_drawn_in_the_row_of_its_worker() -> None:
    chart = chart_of(with_loss(), None)
    assert titles(chart)[5:] == [
        "a: stage 1: layers 1–2",
        "lost: It was cut <off>.: 3 s",
        "repeats steps 2 to 4: 2.5 s",
        "1B0: 3 s",
        "ApplyOptimizer: 1 s",
    ]
    root = ElementTree.fromstring(chart)
    (row,) = {r.get("y") for r in root.iter(f"{SVG}rect") if r.get("class") == "lost"} - {"5"}
    assert row in {r.get("y") for r in root.iter(f"{SVG}rect") if r.get("class") == "backward"}
    assert {"lost", "repeats"} <= set(texts(chart))
    assert "lost" not in texts(chart_of(made_up_step(), None))


def test_names_are_cut_and_escaped() -> None:
    step = made_up_step()
    process = replace(step.processes[1], name="<&" + "x" * 200 + ":9999")
    chart = chart_of(RecordedStep(0, 0.0, [step.processes[0], process]), None)
    (label,) = (text for text in texts(chart) if text.startswith("<&"))
    assert label.endswith("xx:9999")
    assert "…" in label
    assert len(label) < 30


def alone(spans: list[Span]) -> ProcessSpans:
    return ProcessSpans(0, "coordinator", [Range(0, (0, 1))], spans)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0125, "12.5 ms"), (0.99996, "1 s"), (999.9, "16.7 min")]
)
def test_seconds_have_no_exponents(seconds: float, shown: str) -> None:
    spans = [Span("forward", 0.0, seconds, 0)]
    chart = chart_of(RecordedStep(0, 0.0, [alone(spans)]), None)
    assert f"Step 0 as recorded: {shown}, bubble 0.0 %" in chart


def test_ticks_of_time_are_round_in_a_unit_of_their_size() -> None:
    spans = [Span("forward", 0.0, 400.0, 0)]
    chart = chart_of(RecordedStep(0, 0.0, [alone(spans)]), None)
    shown = [t.text for t in ElementTree.fromstring(chart).iter(f"{SVG}text")]
    assert {"0 min", "2 min", "4 min", "6 min"} <= set(shown)


def test_the_titles_are_plain_english() -> None:
    step = made_up_step()
    chart = chart_of(step, predicted(step))
    assert "Simulated from the profile: " in chart


@needs_chromium
def test_no_text_is_cut_and_none_overlaps(tmp_path: Path) -> None:
    """By the boxes in a browser: texts within the picture, apart, and numbers within their bars."""
    charts = []
    for stages, pieces in ((2, 4), (5, 120), (12, 8)):
        for seconds in (0.0099, 1.0, 12345.0):
            step = staggered_step(stages, pieces, seconds)
            charts += [chart_of(step, None), chart_of(step, predicted(step))]
    numbers = """
    for (const node of document.querySelectorAll('.inside')) {
      const bar = node.previousElementSibling.getBoundingClientRect();
      if (!inside(node.getBoundingClientRect(), {...bar.toJSON(), top: 0, bottom: 1e9}, 0))
        faults.push(`beyond its bar: ${said(node)}`);
    }"""
    counts = "document.querySelectorAll('svg').length, document.querySelectorAll('.inside').length"
    script = f"{FAULTS} {numbers} return [{counts}, [...new Set(faults)]];"
    shown, num_numbers, faults = evaluate(page(charts), script, tmp_path)
    assert (shown, faults) == (2 * len(charts), [])
    assert num_numbers > 100
