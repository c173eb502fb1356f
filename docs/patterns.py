"""Prints the table of `patterns.md`: ``python docs/patterns.py``.

Every pattern trains a few steps with plain Lightning and over two workers on this machine. Needs
about two minutes and two cores.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import worker_process
from tests.patterns import PATTERNS, Outcome, Pattern, run

ROOT = Path(__file__).parents[1]
HEAD = """\
| pattern | set | plain Lightning | here | weights apart |
|---|---|---|---|---|"""
# Workers tell of each run.
QUIET = "import os, sys; sys.stdout = open(os.devnull, 'w')"
# What a plan says, or what a test needs to find the layers.
NOT_SHOWN = {"here", "layers"}


def rows(pattern: Pattern, workers: Sequence[str]) -> Iterator[str]:
    """The lines of one pattern: as it is, and with its remedy."""
    plain = run(pattern)
    title = f"**{pattern.name}**: {pattern.says}"
    yield row(title, pattern, {}, plain, tried(pattern, {}, pattern.said, workers))
    if pattern.remedy is not None:
        remedied = tried(pattern, pattern.remedy, pattern.said_with_remedy, workers)
        yield row("", pattern, pattern.remedy, plain, remedied)


def tried(
    pattern: Pattern, more: Mapping[str, Any], said: str | None, workers: Sequence[str]
) -> tuple[Outcome | None, str]:
    """What a run over workers has left, if anything, and the sentence that was to be said."""
    heard = Heard()
    logging.getLogger("lightning.pytorch").addHandler(heard)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            outcome = run(pattern, pattern.strategy(workers, more))
        except Exception as error:
            if pattern.refused is None or more:
                raise
            return None, sentence(str(error), pattern.refused)
    logging.getLogger("lightning.pytorch").removeHandler(heard)
    if said is None:
        return outcome, ""
    texts = [*(str(each.message) for each in warned), *heard.texts]
    return outcome, sentence(next(text for text in texts if re.search(said, text)), said)


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def sentence(text: str, pattern: str) -> str:
    """The sentence of a text in which a pattern is found, without the worker's address."""
    text = re.sub(r"^stage \d+ on \S+ failed in step \d+: \w+: ", "", text.split("\n")[0])
    parts = re.split(r"(?<=\.) (?=[A-Z`])", text)
    found = next((part for part in parts if re.search(pattern, part)), text)
    match = re.search(pattern, found)
    end = found.find("; ", 0 if match is None else match.end())
    return found if end < 0 else f"{found[:end]} …"


def row(
    title: str,
    pattern: Pattern,
    more: Mapping[str, Any],
    plain: Outcome,
    found: tuple[Outcome | None, str],
) -> str:
    """One line of the table."""
    outcome, said = found
    apart = "" if outcome is None else f"{outcome.apart(plain):.0e}"
    here = "refused" if outcome is None else f"{outcome.losses[-1]:.6f}"
    here = f"{here}: {said}" if said else here
    cells = [title, settings(pattern, more), f"{plain.losses[-1]:.6f}", here, apart]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def settings(pattern: Pattern, more: Mapping[str, Any]) -> str:
    """What is set, as code."""
    chosen = {**pattern.settings, **more}
    texts = [
        f"`{name}={'lambda batch: …' if callable(value) else repr(value)}`"
        for name, value in chosen.items()
        if name not in NOT_SHOWN
    ]
    if chosen.get("here"):
        last = chosen["here"] - 1
        layers = f"layers 0 to {last}" if last else "layer 0"
        texts.append(f"{layers} with the coordinator")
    return ", ".join(texts)


def main() -> None:
    torch.set_num_threads(1)
    # Workers inherit it.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).handlers.clear()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker_process("--allow", "tests", before=QUIET)).address
            for _ in range(2)
        ]
        print(HEAD)
        for pattern in PATTERNS:
            for line in rows(pattern, workers):
                print(line, flush=True)


if __name__ == "__main__":
    main()
