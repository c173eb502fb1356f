"""Rows of parameters have all pairs of values, or all values, and are few. A whole test repeats
only tests that are there and repeat none, and what is listed for the second tier is there."""

from __future__ import annotations

import ast
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from .pairwise import all_pairs, covering, each_value, keeping
from .tiers import SECOND_TIER

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


def left_out(path: Path) -> dict[str, list[str]]:
    """The tests of a file, each with the tests that it repeats."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            calls = [each for each in node.decorator_list if isinstance(each, ast.Call)]
            named = [each.args for each in calls if getattr(each.func, "id", "") == "repeats"]
            found[node.name] = [ast.literal_eval(name) for names in named for name in names]
    return found


def test_what_a_test_repeats_is_a_test_that_is_not_left_out() -> None:
    root = Path(__file__).parent
    files = {path.relative_to(root).as_posix(): left_out(path) for path in root.rglob("test_*.py")}
    named = 0
    for path, tests in files.items():
        for test, repeated in tests.items():
            for each in repeated:
                other, _, name = each.rpartition("::")
                assert files[other or path].get(name) == [], f"{path}::{test} names {each}"
                named += 1
    assert named > 0


@pytest.mark.parametrize("path", sorted(SECOND_TIER))
def test_what_is_of_the_second_tier_is_there(path: str) -> None:
    file, _, test = path.partition("::")
    source = (Path(__file__).parent / file).read_text("utf-8")
    assert not test or f"def {test}(" in source
