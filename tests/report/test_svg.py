from __future__ import annotations

import importlib.util
import struct
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import PictureError
from lightning_hetero.report.diagram import picture_for
from lightning_hetero.report.svg import beside, element, elided, png, text, width_of, wrapped

from .topologies import topology

TEXT = '<svg xmlns="http://www.w3.org/2000/svg" width="30" height="20"><text y="15">M</text></svg>'


def test_a_png_is_twice_as_large() -> None:
    pytest.importorskip("resvg_py")
    drawn = png(TEXT)
    assert drawn[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", drawn[16:24]) == (60, 40)


def test_without_the_library_its_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def find_all_but_it(name: str, *others: Any) -> Any:
        return None if name == "resvg_py" else find(name, *others)

    monkeypatch.setattr(importlib.util, "find_spec", find_all_but_it)
    with pytest.raises(PictureError, match=r"pip install 'lightning-hetero\[pictures\]'"):
        png(TEXT)


def test_without_any_font_there_is_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("resvg_py")
    draw = library.svg_to_bytes
    monkeypatch.setattr(
        library, "svg_to_bytes", lambda svg, **options: draw(svg, skip_system_fonts=True, **options)
    )
    with pytest.raises(PictureError, match="font"):
        png(TEXT)


def test_the_ending_of_a_name_decides() -> None:
    assert picture_for("a.svg", topology(2)).startswith(b"<svg")
    assert picture_for("a.MMD", topology(2)).startswith(b"flowchart")
    with pytest.raises(PictureError, match=r"end in \.svg, \.png, \.mmd"):
        picture_for("a.gif", topology(2))


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


def test_a_text_that_fits_stays() -> None:
    assert elided("strix.local", 200, 14) == "strix.local"


def test_the_middle_is_left_out() -> None:
    shorter = elided("workstation.example.org", 100, 12)
    assert shorter.startswith("works")
    assert shorter.endswith(".org")
    assert "…" in shorter


def test_bold_is_wider() -> None:
    assert width_of("stage", 12, is_bold=True) > width_of("stage", 12)


def test_words_of_a_line_stay_together() -> None:
    text = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
    lines = wrapped(text, 200, 12)
    assert len(lines) == 2
    assert " ".join(lines) == text


def test_no_text_has_no_line() -> None:
    assert wrapped("", 100, 12) == []


@given(st.text(max_size=80), st.floats(20, 300), st.integers(1, 4))
def test_nothing_is_wider_than_its_room(text: str, width: float, most_lines: int) -> None:
    lines = wrapped(text, width, 12, most_lines)
    assert len(lines) <= most_lines
    assert all(width_of(line, 12) <= width for line in lines)
