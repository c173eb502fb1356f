"""The measures of docstrings and pages, and their limits for every room and folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from .prose import Prose, main, pages, prose_of, rooms

MEASURED = {**rooms(), **pages()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Sends a frame.", Prose(3)),
        ("The frame that nobody wants, nor sends.", Prose(7, relatives=1, negatives=2)),
        ("What it wants.  Those too.\n\nWho knows? Whose is it?", Prose(10, 3, 0, openings=3)),
        ("It's another one; whatever.", Prose(4)),
    ],
)
def test_counts_of_a_docstring(text: str, expected: Prose) -> None:
    assert prose_of(text) == expected


def test_counts_only_docstrings_of_a_room(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    source = (
        '"""That."""\n# no\nclass A:\n    """None."""\n    def f(self):\n        return "nor"\n'
    )
    (tmp_path / "room" / "file.py").write_text(source)
    (tmp_path / "file.py").write_text("x = 1\n")
    assert rooms(tmp_path) == {"": Prose(), "room": Prose(2, 1, 1)}


def test_counts_no_code_of_a_page(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    text = "See [that](which.md).\n\n    what nobody\n\n```python\nnone = 1\n```\n\nTwo words.\n"
    (tmp_path / "docs" / "page.md").write_text(text)
    (tmp_path / "README.md").write_text("One.\n")
    assert pages(tmp_path) == {"top": Prose(1), "docs/": Prose(4, 1)}


@pytest.mark.parametrize("room", MEASURED)
def test_each_room_is_plain(room: str) -> None:
    assert MEASURED[room].is_plain


@pytest.mark.parametrize(
    "prose", [Prose(100, relatives=3), Prose(1000, negatives=5), Prose(100, openings=1)]
)
def test_a_room_above_a_limit_is_not(prose: Prose) -> None:
    assert not prose.is_plain


def test_the_command_reports_a_room_above_its_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main() == 0
    monkeypatch.setattr(f"{prose_of.__module__}.rooms", lambda: {"worker": Prose(10, relatives=1)})
    assert main() == 1
    assert "Above the limits in tests/prose.py: worker." in capsys.readouterr().out
