from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.pictures.svg import beside, element, text


def test_an_attribute_is_named_as_in_svg_and_left_out_if_none() -> None:
    made = element("text", "a", text_anchor="end", class_="ink", x=1.5, fill=None)
    assert made == '<text text-anchor="end" class="ink" x="1.5">a</text>'


@given(st.text())
def test_any_text_is_well_formed(content: str) -> None:
    node = ElementTree.fromstring(text(0, 0, content, content))  # noqa: S314
    assert "".join(node.itertext()).count("<") == content.count("<")


def test_markup_in_a_text_is_only_text() -> None:
    assert "<script>" not in text(0, 0, "<script>alert(1)</script>", '"><script>')


@pytest.mark.parametrize(
    ("points", "left"),
    [
        ([(0, 0), (10, 0)], [(0, -2), (10, -2)]),
        ([(0, 0), (10, 0), (10, 10)], [(0, -2), (12, -2), (12, 10)]),
        ([(0, 0), (10, 0), (10, -10)], [(0, -2), (8, -2), (8, -10)]),
    ],
    ids=["straight", "down", "up"],
)
def test_a_line_beside_another_keeps_its_distance(
    points: list[tuple[float, float]], left: list[tuple[float, float]]
) -> None:
    assert beside(points, 2) == left
