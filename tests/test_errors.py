"""The tree drawn at the top of errors.py is the tree of the classes."""

from __future__ import annotations

import inspect

import pytest

from lightning_hetero import errors

INDENT = 3


def drawn_parents() -> dict[str, str | None]:
    """Each name of the drawing with the name it hangs from."""
    parents: dict[str, str | None] = {}
    branch: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        bare = line.lstrip("│├└─ ")
        if not bare or not bare.split()[0].endswith(
            ("Error", "Failed", "Lost", "Traceback", "Undone", "Unreachable")
        ):
            continue
        depth = (len(line) - len(bare)) // INDENT
        name = bare.split()[0]
        branch = [*branch[:depth], name]
        parents[name] = branch[-2] if depth else None
    return parents


def real_parents() -> dict[str, str | None]:
    """Each exception class of the module with its base in the module."""
    classes = dict(inspect.getmembers(errors, inspect.isclass))
    return {
        name: next((base.__name__ for base in kind.__bases__ if base.__name__ in classes), None)
        for name, kind in classes.items()
    }


def test_the_drawn_tree_is_the_class_tree() -> None:
    assert drawn_parents() == real_parents()


def test_the_drawing_has_one_root_and_every_level() -> None:
    parents = drawn_parents()
    assert [name for name, parent in parents.items() if parent is None] == ["HeteroError"]
    assert parents["LocalProtocolError"] == "ProtocolError"
    assert parents["StageFailed"] == "WorkerError"


@pytest.mark.parametrize("name", sorted(real_parents()))
def test_one_except_clause_catches_every_exception_of_the_package(name: str) -> None:
    with pytest.raises(errors.HeteroError, match="the reason"):
        raise getattr(errors, name)("the reason")


def test_a_bad_plan_is_a_bad_value() -> None:
    assert issubclass(errors.PlanError, ValueError)


def test_a_command_shows_the_traceback_of_a_workers_code_before_its_sentence() -> None:
    failed = errors.StageFailed.with_traceback_there("stage 1 failed", "Traceback: line 7")
    above = errors.ProfileError("It cannot be measured.")
    above.__cause__ = failed
    for error in (failed, above):
        assert errors.traceback_there(error).split() == ["Traceback:", "line", "7"]
    assert errors.traceback_there(errors.PlanError("no")) == ""
