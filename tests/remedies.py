"""The remedies that errors and warnings of the package name, and the tests that follow them.

A test follows a remedy if it comes to the sentence, does what the sentence says, and then the run
goes right. It is marked with words of the sentence:

    @pytest.mark.follows("give `checkpoint` `use_reentrant=False`")

The words must be in a sentence as `docs.generate.sentences` reads it, with ``…`` for what is filled
in. A sentence is followed if such words are in it, and if every remedy in it that is code (an
option, a flag, a command, a call) is within some of them.

A sentence names a remedy if a part of it begins with a verb as in an order, or if it has code that
is a remedy. The others have none; `test_errors_page.py` has examples of both.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from docs.generate.sentences import FILLED_IN, Package, last_name
from lightning_hetero.pipeline.tolerance import GO_ON

TESTS = Path(__file__).parent

_VERBS = (
    "accumulate|add|allow|ask|assign|begin|build|call|change|check|choose|clip|"
    "clone|close|compare|compile|compute|connect|continue|convert|copy|correct|cut|"
    "decide|define|delete|detach|dial|do|download|drop|end|exclude|fetch|fill|"
    "follow|free|freeze|generate|get|give|go|import|install|keep|leave|let|load|"
    "log|look|lower|make|measure|merge|move|name|open|override|pass|pin|pull|put|"
    "raise|read|register|remove|rename|repair|repeat|replace|restart|return|run|"
    "save|say|see|select|send|set|start|stop|switch|take|train|try|turn|unfreeze|"
    "unwrap|update|use|wait|watch|wrap|write"
)
_ORDER = re.compile(
    rf"(?:^|[.;:?] |{FILLED_IN} |, (?:or |and )?|` or )(?:{_VERBS})\b", re.IGNORECASE
)
_QUOTED = re.compile(r"`([^`]*)`")
_COMMAND = r"lightning-hetero (?!on\b)[a-z]+|pip install"
_IN_QUOTES = re.compile(rf"[=(]|--|{_COMMAND}")
_WITHOUT_QUOTES = re.compile(rf"(?<![\w-])--[a-z-]+|{_COMMAND}")


@dataclass(frozen=True)
class Remedy:
    """A sentence that names a remedy.

    Args:
        file: The file of the package that says it.
        text: The sentence, with ``…`` for what is filled in.
    """

    file: str
    text: str

    @property
    def own_text(self) -> str:
        """The text without the way to go on all the same, which checks have in common."""
        return self.text.removesuffix(GO_ON).strip()

    @property
    def code(self) -> list[str]:
        """The options, flags, commands and calls that it names, from its first order on."""
        text = self.own_text
        order = _ORDER.search(text)
        start = order.start() if order else 0
        quoted = [m for m in _QUOTED.finditer(text) if m.start() >= start]
        rest = _QUOTED.sub("``", text)[len(_QUOTED.sub("``", text[:start])) :]
        return [m[0] for m in quoted if _IN_QUOTES.search(m[1])] + _WITHOUT_QUOTES.findall(rest)

    def is_followed(self, marks: Iterable[str]) -> bool:
        """Whether marks cover its remedies."""
        found = [words for words in marks if words in self.text]
        return bool(found) and all(any(code in words for words in found) for code in self.code)


def names_a_remedy(text: str) -> bool:
    """Whether a sentence says what to do."""
    return bool(_ORDER.search(text) or Remedy("", text).code)


def remedies(package: Package) -> list[Remedy]:
    """Every sentence of the package that says what to do, once for each file."""
    found = {
        Remedy(call.place.rpartition(":")[0], " ".join(text.split()))
        for call in chain(package.calls(), package.warnings())
        for text in call.texts
        if names_a_remedy(text) and " ".join(text.split()) != f"{FILLED_IN} {GO_ON}"
    }
    return sorted(found, key=lambda remedy: (remedy.file, remedy.text))


Act = Callable[..., object]


def follows(words: str, wrong: Act, right: Act, *more: str) -> Any:
    """A marked case of a test: what is refused with these words, and what they say to do.

    Args:
        words: Of the sentence.
        wrong: Comes to the sentence.
        right: Does what the sentence says.
        more: Other words of the same sentence.
    """
    return pytest.param(wrong, right, marks=pytest.mark.follows(words, *more), id=words[:50])


def come_and_follow(case: pytest.FixtureRequest, wrong: Act, right: Act, given: object) -> None:
    """Come to the sentence of a marked case, and do what it says.

    Args:
        case: Has the mark.
        wrong: Comes to the sentence.
        right: Does what the sentence says.
        given: Is passed to each of the two that takes an argument.
    """
    with pytest.raises((Exception, SystemExit)) as refused:  # noqa: PT011 - the words count
        _call(wrong, given)
    said = "\n".join([str(refused.value), *getattr(refused.value, "__notes__", [])])
    for words in case.node.get_closest_marker("follows").args:
        assert re.search(pattern_of(words), said), said
    _call(right, given)


def _call(act: Act, given: object) -> None:
    act(*[given] * len(inspect.signature(act).parameters))


def pattern_of(words: str) -> str:
    """A regular expression for a sentence with these words."""
    return ".*".join(map(re.escape, words.split(FILLED_IN)))


def marks() -> Iterator[tuple[str, str]]:
    """The words of every mark ``follows`` in the tests, each with the file of its test."""
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text("utf-8")
        if "follows(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and last_name(node.func) == "follows":
                for words in node.args:
                    if isinstance(words, ast.Constant):
                        yield str(words.value), path.relative_to(TESTS).as_posix()
