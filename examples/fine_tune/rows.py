"""Rows: what a JSONL, CSV or Parquet file holds, or a data set of the Hub."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .hub import plain_hub_errors

KINDS = (".jsonl", ".json", ".csv", ".parquet")

Row = dict[str, Any]


class DataError(Exception):
    """The data cannot be used as they are; the message says which, why, and what to do."""


def read_rows(source: str, split: str = "train") -> list[tuple[str, Row]]:
    """Read a file, or else a data set of the Hub.

    Args:
        source: A path that ends as `KINDS` do, or a data set's name on the Hub.
        split: The part of the data set; files have none.

    Returns:
        Each row, with the words that say where it stands.

    Raises:
        DataError: If the source cannot be found or read, or has no rows.
    """
    path = Path(source)
    if path.suffix.lower() not in KINDS:
        if path.exists():
            raise DataError(
                f"{source} is no data that can be read; its name must end with {', '.join(KINDS)}."
            )
        rows = list(_from_hub(source, split))
    elif not path.is_file():
        raise DataError(f"There is no file {source}; give the path of your data as `data.path`.")
    else:
        rows = list(_from_file(path))
    if not rows:
        raise DataError(f"{source} is empty: it has no row to train on.")
    return rows


def _from_file(path: Path) -> Iterator[tuple[str, Row]]:
    readers = {".jsonl": _lines, ".json": _list, ".csv": _table, ".parquet": _columns}
    try:
        yield from readers[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}. Save it as UTF-8."
        ) from error


def _lines(path: Path) -> Iterator[tuple[str, Row]]:
    # A byte order mark, which some editors write, is no JSON.
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            if line.strip():
                yield where, _checked(where, _parse(where, line))


def _list(path: Path) -> Iterator[tuple[str, Row]]:
    content = _parse(str(path), path.read_text(encoding="utf-8-sig"))
    if not isinstance(content, list):
        raise DataError(
            f"{path} must hold a list of objects, not {_shown(content)}. If each line is an object "
            "of its own, let the name end with .jsonl."
        )
    for number, row in enumerate(content, start=1):
        where = f"{path}, entry {number}"
        yield where, _checked(where, row)


def _parse(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}. It begins with {_shown(text)}.") from error


def _checked(where: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where} must be an object with named fields, not {_shown(row)}.")
    return row


def _table(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise DataError(
                    f"{where} has another number of fields than the first line, which names "
                    f"{', '.join(reader.fieldnames or [])}. Put fields with commas in quotes."
                )
            yield where, row


def _columns(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        # Lazy: only this format and the Hub need it.
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise DataError(
            f"Reading {path} needs the package pyarrow: pip install 'lightning-hetero[fine-tune]'."
        ) from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise DataError(f"{path} is not a Parquet file: {error}.") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def _from_hub(name: str, split: str) -> Iterator[tuple[str, Row]]:
    try:
        # Lazy: files are read without it.
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"There is no file {name}, and reading a data set of that name from the Hub needs the "
            "package datasets: pip install 'lightning-hetero[fine-tune]'."
        ) from error
    with plain_hub_errors("data set", name):
        rows = load_dataset(name, split=split)
    for number, row in enumerate(rows, start=1):
        yield f"{name}, split {split}, row {number}", row


def _shown(value: Any) -> str:
    """A value of the wrong shape, short enough for a message."""
    text = value.strip() if isinstance(value, str) else json.dumps(value, default=str)
    return repr(text if len(text) <= 60 else f"{text[:60]}…")
