"""Rows of parameters have all pairs of values, or all values, and are few."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from .pairwise import all_pairs, covering, each_value, keeping

AXES = ["abc", "de", "fgh", "ij"]


def test_each_two_values_of_two_axes_meet() -> None:
    rows = all_pairs(*AXES)
    for i, j in combinations(range(len(AXES)), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(AXES[i], AXES[j]))


def test_the_rows_are_few_and_always_the_same() -> None:
    rows = all_pairs(*AXES)
    assert len(rows) <= 10 < len([*product(*AXES)])
    assert all_pairs(*AXES) == rows == [*dict.fromkeys(rows)]


def test_two_axes_have_their_product() -> None:
    assert sorted(all_pairs("abc", "de")) == sorted(product("abc", "de"))


def test_each_value_comes_once_or_in_turns() -> None:
    assert each_value("abc", "de", "fgh") == [("a", "d", "f"), ("b", "e", "g"), ("c", "d", "h")]
    assert each_value("de", "abc") == [("d", "a"), ("e", "b"), ("d", "c")]


def kept_of(rows: list[Any]) -> list[Any]:
    """What `make test` runs."""
    return [row for row in rows if not isinstance(row, type(pytest.param()))]


def test_rows_that_cover_have_each_value_of_each_axis() -> None:
    rows = [*product(*AXES)]
    kept = kept_of(covering(rows))
    assert len(kept) == 3
    assert all({row[i] for row in kept} == {*axis} for i, axis in enumerate(AXES))


def test_the_other_rows_are_there_and_marked() -> None:
    found = covering(product("abc", "de"), 0)
    assert len(found) == 6
    assert kept_of(found) == [("a", "d"), ("b", "d"), ("c", "d")]
    others = [row for row in found if row not in kept_of(found)]
    assert [row.values for row in others] == [("a", "e"), ("b", "e"), ("c", "e")]
    assert all([mark.name for mark in row.marks] == ["exhaustive"] for row in others)


def test_what_is_kept_must_be_there() -> None:
    assert kept_of(keeping("ac", "abc")) == ["a", "c"]
    with pytest.raises(AssertionError, match="d"):
        keeping("ad", "abc")
