"""The page of errors: every sentence that the code can say, by class, each with an anchor."""

from __future__ import annotations

import html
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .sentences import GIVEN, Call, package

_MOST_WORDS = 9


@dataclass(frozen=True)
class Entry:
    """A sentence with its anchor on the page.

    Args:
        kind: The name of the exception's class.
        text: The sentence, with ``…`` for what is filled in.
        anchor: The name of its place on the page.
    """

    kind: str
    text: str
    anchor: str


def entries(calls: Sequence[Call]) -> list[Entry]:
    """Every sentence once for each class, in the order of classes and sentences."""
    pairs = {(call.kind, " ".join(text.split())) for call in calls for text in call.texts}
    taken: defaultdict[str, int] = defaultdict(int)
    made = []
    for kind, text in sorted(pairs):
        words = re.findall(r"[a-z0-9]+", f"{kind} {text}".lower())[: _MOST_WORDS + 1]
        anchor = "-".join(words)
        taken[anchor] += 1
        anchor += f"-again-{taken[anchor]}" if taken[anchor] > 1 else ""
        made.append(Entry(kind, text, anchor))
    return made


def page() -> str:
    """All sentences of the package as Markdown."""
    return page_of(entries([*package().calls()]))


def page_of(found: Sequence[Entry]) -> str:
    """Sentences as Markdown, with a section for each class."""
    by_kind: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in found:
        by_kind[entry.kind].append(entry)
    lines = []
    for kind in sorted(by_kind, key=lambda kind: (kind == GIVEN, kind)):
        lines += ["", f"## {'Several classes' if kind == GIVEN else kind}", ""]
        lines += [f"- [#](#{e.anchor}){{ #{e.anchor} }} {_shown(e.text)}" for e in by_kind[kind]]
    return "\n".join(lines)


def _shown(text: str) -> str:
    """The text as Markdown shows it letter by letter."""
    return re.sub(r"([\\`*_{}\[\]#|~^=])", r"\\\1", html.escape(text, quote=False))
