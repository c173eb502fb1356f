"""Instruction pairs about the standard library: every answer stands in its documentation."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .documentation import Documented

SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
MIN_SENTENCE_WORDS = 3
MAX_SENTENCE_CHARACTERS = 200
MAX_SIGNATURE_CHARACTERS = 160

DESCRIBE = {
    "module": "What is this module of the Python standard library for?",
    "class": "What does this Python class represent?",
    "function": "Describe what this Python function does.",
    "method": "Describe what this Python method does.",
}

Row = dict[str, str]


def write_instructions(things: Iterable[Documented], path: Path) -> None:
    """Write one pair for each public thing, in Alpaca's format, as a line of a JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(pair, ensure_ascii=False) for pair in make_pairs(things)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_pairs(things: Iterable[Documented]) -> list[Row]:
    """Return one pair for each public thing, so that no pair gives away the answer of another.

    Of things that are described in the same words, only the first is asked about.
    """
    rows: dict[str, Row] = {}
    for thing in sorted(things, key=lambda thing: thing.name):
        sentence = first_sentence(thing.opening)
        if sentence and thing.is_public and len(thing.written) <= MAX_SIGNATURE_CHARACTERS:
            rows.setdefault(sentence, _choose(list(rows_about(thing, sentence)), thing.name))
    return list(rows.values())


def first_sentence(paragraph: str) -> str:
    """Return the first sentence; none if it says too little or too much."""
    sentence = SENTENCE_END.split(paragraph)[0]
    long_enough = len(sentence.split()) >= MIN_SENTENCE_WORDS
    short_enough = len(sentence) <= MAX_SENTENCE_CHARACTERS
    return sentence if long_enough and short_enough and ">>>" not in sentence else ""


def _choose(rows: Sequence[Row], name: str) -> Row:
    """Choose by the name's checksum: evenly, and the same in every run."""
    return rows[zlib.crc32(name.encode()) // 2 % len(rows)]


def rows_about(thing: Documented, sentence: str) -> Iterator[Row]:
    """Yield every question that the documentation of a thing answers."""
    yield _row(DESCRIBE[thing.kind], thing.written, sentence)
    yield _row(
        f"Name the {thing.kind} of the Python standard library that is described here.",
        sentence,
        thing.name,
    )
    if thing.required or thing.optional:
        yield _row(
            f"Which parameters does this Python {thing.kind} take?",
            thing.written,
            _parameters_sentence(thing),
        )
    if thing.bases:
        yield _row(
            "Which classes does this Python class inherit from?",
            thing.written,
            f"It inherits from {_listed(thing.bases)}.",
        )


def _row(instruction: str, given: str, output: str) -> Row:
    return {"instruction": instruction, "input": given, "output": output}


def _parameters_sentence(thing: Documented) -> str:
    required, optional = _listed(thing.required), _listed(thing.optional)
    if required and optional:
        return f"It takes {required} and, optionally, {optional}."
    return f"It takes {required}." if required else f"It takes, optionally, {optional}."


def _listed(names: Sequence[str]) -> str:
    """Return names as a sentence lists them: a, b and c."""
    *others, last = names or ("",)
    return f"{', '.join(others)} and {last}" if others else last
