"""Parameters of tests without the whole product of their axes: each pair of values, or each value.

A fault of several options is nearly always one of two of them together, so rows with all pairs
find what the product would find, with a fraction of the runs.

Where even these take long, `make test` runs a part of them: the marker ``exhaustive`` is on the
others, and only on what goes through code that other tests go through. `tests/tiers.py` lists what
else `make test` leaves out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

# What `pytest.param` returns; the class has no public name.
ParameterSet: Any = type(pytest.param())


def all_pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few rows with a value of each axis, in which each two values of two axes meet at least once.

    The rows are the same at every call.
    """
    rows = meeting(product(*(range(len(axis)) for axis in axes)))
    return [tuple(axis[n] for axis, n in zip(axes, row, strict=True)) for row in rows]


def meeting(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Few of the rows in which each two values of two places meet that meet in any of them.

    Each time the row, the first of equals, that has most of the pairs that are missing.
    """
    rows, found = [*rows], []
    met = {row: {*combinations(enumerate(row), 2)} for row in rows}
    missing = set().union(*met.values())
    while missing:
        best = max(rows, key=lambda row: len(missing & met[row]))
        missing -= met[best]
        found.append(best)
    return found


def each_value(first: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with each value once of the longest axis, and the values of each other axis in turns."""
    axes = (first, *others)
    count = max(map(len, axes))
    return [tuple(axis[number % len(axis)] for axis in axes) for number in range(count)]


def covering(rows: Iterable[tuple[Any, ...]], *places: int) -> list[Any]:
    """Mark as exhaustive all rows but a few in which each value of each axis is.

    Args:
        rows: Of one axis or more.
        places: Those of the axes that count; without any, all do.
    """
    rows = [*rows]
    values = [{(i, row[i]) for i in places or range(len(row))} for row in rows]
    missing, kept = set().union(*values), []
    while missing:
        best = max(range(len(rows)), key=lambda number: len(missing & values[number]))
        missing -= values[best]
        kept.append(rows[best])
    return keeping(kept, rows)


def keeping(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Mark as exhaustive all values but those that are kept, all of which must be there."""
    values = [*values]
    lacking = [value for value in kept if value not in values]
    assert not lacking, lacking
    return [value if value in kept else _exhaustive(value) for value in values]


def repeats(*tests: str) -> pytest.MarkDecorator:
    """Mark a whole test as exhaustive: what it goes through, these tests go through as well.

    Args:
        tests: Tests of the same file, or of others as ``integration/test_families.py::test_name``.
    """
    assert tests
    return pytest.mark.exhaustive(*tests)


def sweeping(kept: Collection[Any], rows: Iterable[Any]) -> list[Any]:
    """Mark all rows but those that are kept, and that may be marked, as a sweep of a whole table.

    The continuous build leaves sweeps out; ``make sweep`` runs them.
    """
    rows = [*rows]
    lacking = [value for value in kept if value not in map(_values_of, rows)]
    assert not lacking, lacking
    return [row if _values_of(row) in kept else _marked(row, pytest.mark.sweep) for row in rows]


def _exhaustive(value: Any) -> Any:
    return _marked(value, pytest.mark.exhaustive)


def _values_of(row: Any) -> Any:
    """The values of a row that may be marked."""
    if isinstance(row, ParameterSet):
        return row.values if len(row.values) > 1 else row.values[0]
    return row


def _marked(row: Any, mark: pytest.MarkDecorator) -> Any:
    if isinstance(row, ParameterSet):
        return pytest.param(*row.values, marks=(*row.marks, mark))
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=mark)
