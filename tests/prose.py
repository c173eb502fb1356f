"""How the docstrings and the pages read: long chains of clauses, and negations.

Prints the measures of every room of the package and of every folder of pages, and ends with 1 if
one is above a limit:

    python -m tests.prose

A relative word joins a clause to another one; a negative word is a denial in place of a fact. Both
are counted per 100 words of the docstrings of modules, classes and functions, and of pages without
their code.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_hetero"

RELATIVES = frozenset({"that", "which", "what", "whose", "those"})
NEGATIVES = frozenset({"no", "none", "nobody", "nothing", "nor"})
_WORD = re.compile(r"[a-z']+")
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\n")
_CODE = re.compile(r"```.*?```|^    .*?$|(?<=\])\([^)]*\)", re.DOTALL | re.MULTILINE)
_BAD_OPENING = re.compile(r"\s*(?:What|Those|Who)\b")


MOST_RELATIVES = 2.0
MOST_NEGATIVES = 0.4


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

    @property
    def is_plain(self) -> bool:
        return (
            self.per_100_words(self.relatives) <= MOST_RELATIVES
            and self.per_100_words(self.negatives) <= MOST_NEGATIVES
            and self.openings == 0
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


def pages(root: Path = ROOT) -> dict[str, Prose]:
    """The counts of the pages at the top, and of those of each folder."""
    found: dict[str, Prose] = {}
    for file in [*root.glob("*.md"), *root.glob("[bde]*s/**/*.md")]:
        name = (file.relative_to(root).parts[0] + "/") * (file.parent != root) or "top"
        text = _CODE.sub("", file.read_text("utf-8"))
        found[name] = found.get(name, Prose()) + prose_of(text)
    return found


def line(name: str, prose: Prose) -> str:
    relatives = prose.per_100_words(prose.relatives)
    negatives = prose.per_100_words(prose.negatives)
    return f"{name:<12}{prose.words:>7,}{relatives:>11.2f}{negatives:>11.2f}{prose.openings:>10}"


def main() -> int:
    measured = {**rooms(), **pages()}
    total = sum(measured.values(), Prose())
    print(f"{'room':<12}{'words':>7}{'relatives':>11}{'negatives':>11}{'openings':>10}")
    print(*(line(room, prose) for room, prose in measured.items()), sep="\n")
    print(line("all", total))
    above = [room for room, prose in measured.items() if not prose.is_plain]
    if above:
        print(f"Above the limits in tests/prose.py: {', '.join(above)}. Write shorter clauses.")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
