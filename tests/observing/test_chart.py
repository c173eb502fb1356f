"""The picture of a step: well-formed, every action in it, every row hatched where nobody works."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from lightning_hetero.observing.chart import chart_of
from lightning_hetero.observing.prediction import prediction_of
from lightning_hetero.observing.steps import RecordedStep

from .made_up import PLAN, made_up_step

SVG = "{http://www.w3.org/2000/svg}"


def titles(chart: str) -> list[str]:
    return [title.text or "" for title in ElementTree.fromstring(chart).iter(f"{SVG}title")]


def test_every_action_is_drawn_once_and_once_as_predicted() -> None:
    step = made_up_step()
    alone = titles(chart_of(step, None))
    assert [title.split(":")[0] for title in alone] == [
        *("0F0", "0L0", "0B0", "ApplyOptimizer"),
        *("1F0", "1B0", "ApplyOptimizer"),
    ]
    assert alone[0] == "0F0: 2 s"
    assert len(titles(chart_of(step, prediction_of(step, PLAN, None)))) == 14


def test_bars_stand_where_the_axis_says() -> None:
    root = ElementTree.fromstring(chart_of(made_up_step(), None))
    bars = [r for r in root.iter(f"{SVG}rect") if r.get("class") in ("forward", "backward")]
    hatched = [r for r in root.iter(f"{SVG}rect") if r.get("fill") == "url(#bubble)"]
    first, last = bars[0], bars[-1]
    scale = float(hatched[0].get("width", "")) / 20  # from the first action, at 1, to the end
    left = float(hatched[0].get("x", ""))
    assert abs(float(first.get("x", "")) - left) < 0.01
    assert abs(float(last.get("x", "")) - left - 12 * scale) < 0.1


def test_names_are_cut_and_escaped() -> None:
    step = made_up_step()
    stage = replace(step.stages[1], worker="<b>&" + "x" * 200)
    chart = chart_of(RecordedStep(0, 0.0, [step.stages[0], stage]), None)
    labels = [t.text or "" for t in ElementTree.fromstring(chart).iter(f"{SVG}text")]
    (label,) = (text for text in labels if text.startswith("stage 1: <b>&"))
    assert label.endswith("…")
    assert len(label) < 30
