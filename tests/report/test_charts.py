"""The step chart: well-formed, with every action, and hatched where a process is idle."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.protocol.fields import Span
from lightning_hetero.report.charts import (
    chart_of,
    line_chart,
    nice_ticks,
    shares_chart,
    thinned,
    typical,
)
from lightning_hetero.telemetry.layer_ranges import Range
from lightning_hetero.telemetry.step import ProcessSpans, RecordedStep, prediction_of

from ..telemetry.made_up import PLAN, made_up_step, staggered_step, turn_by_turn, with_loss
from .chromium import FAULTS, evaluate, needs_chromium, page

SVG = "{http://www.w3.org/2000/svg}"
finite = st.floats(-1e9, 1e9)
KINDS = {"busy": "hue-0", "waiting": "track"}


@given(finite, finite)
def test_ticks_are_around_all_values_and_few(one: float, other: float) -> None:
    least, most = sorted((one, other))
    ticks = nice_ticks(least, most)
    slack = 1e-9 * max(1.0, abs(least), abs(most))
    assert ticks[0] <= least + slack
    assert ticks[-1] >= most - slack
    assert 2 <= len(ticks) <= 8


@pytest.mark.parametrize(
    ("least", "most", "ticks"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (2.9, 3.1, [2.9, 2.95, 3.0, 3.05, 3.1]), (5, 5, None)],
)
def test_ticks_are_round(least: float, most: float, ticks: list[float] | None) -> None:
    found = nice_ticks(least, most)
    if ticks is None:
        assert found[0] < least < found[-1]
    else:
        assert found == pytest.approx(ticks)


def test_almost_equal_values_have_ticks_around_them() -> None:
    ticks = nice_ticks(-1e9, -999999999.9999999)
    assert ticks[0] < -1e9 < ticks[-1]


def test_a_typical_value_leaves_out_the_start_and_what_is_not_finite() -> None:
    curve = [(0.0, 99.0), (1.0, 99.0), (2.0, 1.0), (3.0, math.nan), (4.0, 3.0)]
    assert typical(curve) == 2.0
    assert typical([]) is None
    assert typical([(0.0, math.nan)]) is None


def test_a_long_curve_keeps_its_extremes() -> None:
    curve = [(float(step), math.sin(step)) for step in range(10_000)]
    curve[4321] = (4321.0, 99.0)
    short = thinned(curve, 200)
    assert len(short) <= 200
    assert (4321.0, 99.0) in short
    assert [step for step, _ in short] == sorted(step for step, _ in short)


def test_a_line_chart_has_a_line_for_each_curve() -> None:
    curves = {"train": [(0.0, 3.0), (1.0, 2.0)], "val": [(1.0, 2.5)], "off": [(0.0, math.nan)]}
    root = ElementTree.fromstring(line_chart(curves, "Loss"))  # noqa: S314
    assert len(list(root.iter(f"{SVG}polyline"))) == 1
    assert len(list(root.iter(f"{SVG}circle"))) == 1
    words = [node.text for node in root.iter(f"{SVG}text")]
    assert {"train", "val", "step 0", "optimizer steps", "step 1"} <= set(words)
    assert "off" not in words


def test_ticks_are_written_with_the_digits_that_they_have() -> None:
    root = ElementTree.fromstring(line_chart({"loss": [(0.0, 4.9), (9.0, 6.0)]}, "Loss"))  # noqa: S314
    words = [node.text for node in root.iter(f"{SVG}text")]
    assert {"4.75", "5.00", "5.25", "6.00"} <= set(words)


def test_without_values_there_is_no_chart() -> None:
    assert line_chart({"loss": []}, "Loss") == ""
    assert line_chart({"loss": [(1.0, math.inf)]}, "Loss") == ""
    assert shares_chart({"0": {"busy": []}}, KINDS, "Shares") == ""


def test_shares_lie_upon_each_other() -> None:
    curve = {"busy": [(0.0, 0.6), (4.0, 0.6)], "waiting": [(0.0, 0.4), (4.0, 0.4)]}
    root = ElementTree.fromstring(shares_chart({"0": curve}, KINDS, "Shares"))  # noqa: S314
    busy, waiting = root.iter(f"{SVG}polygon")
    tops = [
        {point.split(",")[1] for point in each.get("points", "").split()}
        for each in (busy, waiting)
    ]
    assert len(tops[0] & tops[1]) == 1
    assert "60 %" in [node.text for node in root.iter(f"{SVG}text")]


def test_one_step_fills_the_band() -> None:
    one = {"busy": [(7.0, 0.5)], "waiting": [(7.0, 0.5)]}
    many = {"busy": [(0.0, 0.5), (9.0, 0.5)], "waiting": [(0.0, 0.5), (9.0, 0.5)]}
    assert "<polygon" in shares_chart({"0": one, "1": many}, KINDS, "Shares")


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
    assert len(titles(chart_of(step, prediction_of(step, PLAN, None)))) == 18


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
    chart = chart_of(step, prediction_of(step, PLAN, None))
    assert "Simulated from the mean times of this step: " in chart


@needs_chromium
def test_no_text_is_cut_and_none_overlaps(tmp_path: Path) -> None:
    """By the boxes in a browser: texts within the picture, apart, and numbers within their bars."""
    charts = []
    for stages, pieces in ((2, 4), (5, 120), (12, 8)):
        for seconds in (0.0099, 1.0, 12345.0):
            step = staggered_step(stages, pieces, seconds)
            prediction = prediction_of(step, replace(PLAN, micro_batches=pieces), None)
            assert prediction is not None
            charts += [chart_of(step, None), chart_of(step, prediction)]
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
