"""Rows of parameters have all pairs of values, or all values, and are few."""

from __future__ import annotations

from itertools import combinations, product

from .pairwise import all_pairs, each_value

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
