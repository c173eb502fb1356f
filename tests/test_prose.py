"""The measures of docstrings, and the ceiling of every room."""

from __future__ import annotations

from pathlib import Path

import pytest

from .prose import CEILINGS, GOAL, Ceiling, Prose, ceiling_of, main, prose_of, rooms

MEASURED = rooms()


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


@pytest.mark.parametrize("room", MEASURED)
def test_each_room_is_within_its_ceiling(room: str) -> None:
    assert MEASURED[room].is_within(ceiling_of(room))


@pytest.mark.parametrize("room", MEASURED)
def test_a_ceiling_shrinks_with_its_room(room: str) -> None:
    assert not MEASURED[room].is_far_below(ceiling_of(room)), "Lower the ceiling in tests/prose.py."


@pytest.mark.parametrize(
    "ceiling", [Ceiling(2.5, 0.4, 0), Ceiling(2.0, 0.9, 0), GOAL._replace(openings=11)]
)
def test_a_ceiling_far_above_its_room_has_to_be_lowered(ceiling: Ceiling) -> None:
    prose = Prose(1000, relatives=10, negatives=2)
    assert prose.is_within(GOAL)
    assert prose.is_far_below(ceiling)
    assert not prose.is_far_below(GOAL)


def test_the_command_reports_a_room_above_its_ceiling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main() == 0
    monkeypatch.setitem(CEILINGS, "worker", Ceiling(0.1, 0.1, 0))
    assert main() == 1
    assert "Above the ceiling in tests/prose.py: worker." in capsys.readouterr().out
