"""The options of every command, read from the parsers of the command line, as Markdown."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from lightning_hetero.cli.options import command_line


def parsers(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Each command with its parser, the program itself first."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from parsers(below, (*words, word))


def page() -> str:
    """A section for each command, with a row for each option that its help shows."""
    return "\n".join(
        line for words, parser in parsers(command_line()) for line in _of(words, parser)
    )


def _of(words: tuple[str, ...], parser: argparse.ArgumentParser) -> list[str]:
    name = " ".join(["lightning-hetero", *words])
    lines = ["", f"## {name}", "", *([parser.description, ""] if parser.description else [])]
    rows = [_row(parser, action) for action in parser._actions if _is_shown(action)]
    return [*lines, "| option | meaning |", "|---|---|", *rows] if rows else lines


def _is_shown(action: argparse.Action) -> bool:
    kinds = argparse._HelpAction | argparse._SubParsersAction
    return action.help is not argparse.SUPPRESS and not isinstance(action, kinds)


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    value = parser._get_formatter()._format_args(action, action.dest.upper())
    names = ", ".join(f"`{option}`" for option in action.option_strings)
    named = f"{names} `{value}`" if names and value else names or f"`{value}`"
    text = parser._get_formatter()._expand_help(action) if action.help else _choices(action)
    return f"| {_cell(named)} | {_cell(text)} |"


def _choices(action: argparse.Action) -> str:
    chosen = ", ".join(map(str, action.choices or ()))
    return f"one of {chosen} (default: {action.default})"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
