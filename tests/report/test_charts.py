"""Charts: round ticks, every curve, and shares that add up."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.report.charts import (
    line_chart,
    nice_ticks,
    shares_chart,
    thinned,
    typical,
)

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
