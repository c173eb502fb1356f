"""How the docstrings of the package read: long chains of clauses, and negations.

Prints the measures of every room, and ends with 1 if a room is above its ceiling:

    python -m tests.prose

A relative word joins a clause to another one; a negative word is a denial in place of a fact. Both
are counted per 100 words of the docstrings of modules, classes and functions.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "lightning_hetero"

RELATIVES = frozenset({"that", "which", "what", "whose", "those"})
NEGATIVES = frozenset({"no", "none", "nobody", "nothing", "nor"})
_WORD = re.compile(r"[a-z']+")
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\n")
_BAD_OPENING = re.compile(r"\s*(?:What|Those|Who)\b")


class Ceiling(NamedTuple):
    """The most that a room may have: words per 100 words, and sentences."""

    relatives: float
    negatives: float
    openings: int


GOAL = Ceiling(relatives=2.0, negatives=0.4, openings=0)

# Ceilings only shrink. Files beside the folders are the room "".
CEILINGS = {
    "": Ceiling(4.2, 1.2, 7),
    "callbacks": Ceiling(3.4, 1.0, 1),
    "cli": Ceiling(4.4, 2.0, 7),
    "coordinator": Ceiling(5.0, 1.3, 36),
    "devices": Ceiling(4.0, 1.0, 5),
    "discovery": Ceiling(4.4, 1.0, 0),
    "doctor": Ceiling(2.8, 2.1, 1),
    "launch": Ceiling(4.3, 1.9, 9),
    "model": Ceiling(4.3, 1.0, 52),
    "pipeline": Ceiling(3.7, 1.0, 26),
    "planner": Ceiling(3.4, 1.1, 20),
    "profiler": Ceiling(3.9, 1.3, 8),
    "protocol": Ceiling(4.5, 1.1, 21),
    "report": Ceiling(3.1, 1.1, 5),
    "strategy": Ceiling(4.4, 1.3, 40),
    "telemetry": Ceiling(2.5, 1.2, 5),
    "transport": Ceiling(4.1, 1.7, 14),
    "verify": Ceiling(3.6, 0.9, 2),
    "worker": Ceiling(4.8, 1.5, 19),
}
# A ceiling this far above its room, in words per 100 words, has to be lowered.
SLACK = 0.3


@dataclass(frozen=True)
class Prose:
    """Counts over docstrings.

    Args:
        words: All words.
        relatives: The words of `RELATIVES`.
        negatives: The words of `NEGATIVES`.
        openings: Sentences with What, Those or Who as their first word.
    """

    words: int = 0
    relatives: int = 0
    negatives: int = 0
    openings: int = 0

    def __add__(self, other: Prose) -> Prose:
        return Prose(
            self.words + other.words,
            self.relatives + other.relatives,
            self.negatives + other.negatives,
            self.openings + other.openings,
        )

    def per_100_words(self, count: int) -> float:
        return 100 * count / max(self.words, 1)

    def is_within(self, ceiling: Ceiling) -> bool:
        return (
            self.per_100_words(self.relatives) <= ceiling.relatives
            and self.per_100_words(self.negatives) <= ceiling.negatives
            and self.openings <= ceiling.openings
        )

    def is_far_below(self, ceiling: Ceiling) -> bool:
        """Whether a ceiling above the goal is above this room by more than the slack."""
        relatives, negatives, openings = (max(pair) for pair in zip(ceiling, GOAL, strict=True))
        return (
            max(self.per_100_words(self.relatives), GOAL.relatives) < relatives - SLACK
            or max(self.per_100_words(self.negatives), GOAL.negatives) < negatives - SLACK
            or self.openings < openings
        )


def prose_of(text: str) -> Prose:
    """The counts of one docstring."""
    words = _WORD.findall(text.lower())
    return Prose(
        len(words),
        sum(word in RELATIVES for word in words),
        sum(word in NEGATIVES for word in words),
        sum(bool(_BAD_OPENING.match(s)) for s in _END_OF_SENTENCE.split(text)),
    )


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def rooms(package: Path = PACKAGE) -> dict[str, Prose]:
    """The counts of each room: a folder of the package."""
    found: dict[str, Prose] = {}
    for file in sorted(package.rglob("*.py")):
        room = "/".join(file.relative_to(package).parts[:-1])
        tree = ast.parse(file.read_text("utf-8"))
        found[room] = sum(map(prose_of, docstrings(tree)), found.get(room, Prose()))
    return found


def line(name: str, prose: Prose) -> str:
    relatives = prose.per_100_words(prose.relatives)
    negatives = prose.per_100_words(prose.negatives)
    return f"{name:<12}{prose.words:>7,}{relatives:>11.2f}{negatives:>11.2f}{prose.openings:>10}"


def main() -> int:
    measured = rooms()
    total = sum(measured.values(), Prose())
    print(f"{'room':<12}{'words':>7}{'relatives':>11}{'negatives':>11}{'openings':>10}")
    print(*(line(room, prose) for room, prose in measured.items()), sep="\n")
    print(line("all", total))
    above = [room for room, prose in measured.items() if not prose.is_within(CEILINGS[room])]
    if above:
        print(f"Above the ceiling in tests/prose.py: {', '.join(above)}. Write shorter clauses.")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
