"""`lightning-hetero replay`: what each worker of a run was after each event, from its record."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from ..coordinator.roster import NEXT, RosterState, Row, replay
from ..errors import HeteroError
from ..events import Noted, read_events

# What the first line of a worker has already.
_KNOWN = ("name", "number")


def run(options: argparse.Namespace) -> None:
    for line in lines_of(options.record):
        print(line)


def lines_of(path: Path) -> Iterator[str]:
    """A line for each event of a record, and below it what that changed.

    Raises:
        HeteroError: If the file is no record of a run, or has no event of a worker.
    """
    try:
        events = read_events(path)
    except (OSError, ValueError) as error:
        raise HeteroError(
            f"{str(path)!r} is no record of a run: {error}; name the file `events.jsonl` beside "
            "the run's logs."
        ) from error
    before, start_seconds = RosterState(), None
    for event, state in replay(events):
        start_seconds = event.moment_seconds if start_seconds is None else start_seconds
        yield f"{event.moment_seconds - start_seconds:10.3f} s  {_words(event)}"
        yield from _changes(before.rows, state.rows)
        if state.next is not None and state.next is not before.next:
            yield f"{'':14}next: {NEXT[state.next]}"
        before = state
    if start_seconds is None:
        raise HeteroError(f"{str(path)!r} has no event of a worker.")


def _words(event: Noted) -> str:
    whom = event.name or "all"
    facts = [f"number {event.number}"] * (event.number > 0)
    facts += [f"named {', '.join(event.names)}"] * bool(event.names)
    facts += [event.text] * bool(event.text)
    return f"{whom}: {event.what}{' (' + '; '.join(facts) + ')' if facts else ''}"


def _changes(before: Mapping[str, Row], rows: Mapping[str, Row]) -> Iterator[str]:
    """A line for each worker that is another now."""
    for name in before.keys() - rows.keys():
        yield f"{'':14}{name} is free again"
    for name, row in rows.items():
        old = before.get(name, Row(name, row.number, name))
        changed = [
            f"{each.name} {_text(getattr(old, each.name))} -> {_text(getattr(row, each.name))}"
            for each in fields(Row)
            if each.name not in _KNOWN and getattr(old, each.name) != getattr(row, each.name)
        ]
        if changed:
            yield f"{'':14}{name}: {', '.join(changed)}"


def _text(value: object) -> str:
    if isinstance(value, (tuple, frozenset)):
        return "{" + ", ".join(map(str, sorted(value))) + "}"
    return str(getattr(value, "value", value)) or "''"
