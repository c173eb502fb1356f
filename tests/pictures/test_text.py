from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.pictures.text import elided, width_of, wrapped


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
