"""What code keeps outside of modules: what is seen to change, and what is put back."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lightning_hetero.model.outer_state import OuterContent, OuterState, form_of

HERE = __name__
NUMBER = 1
TABLE: dict[str, Any] = {"scale": 1.0}
ITEMS = [1.0]
LATEST = deque([1])
SEEN = {1}
WATCHED = {"a": 1, "b": 2}
BOX = SimpleNamespace(scale=1.0)
THREAD = threading.local()
TENSOR = torch.zeros(2)


def by_default(scales: list[float] = [1.0]) -> float:  # noqa: B006 - the place
    return scales[0]


def enclosing() -> tuple[Callable[[], int], Callable[[], None]]:
    number = 1

    def read() -> int:
        return number

    def add() -> None:
        nonlocal number
        number += 1

    return read, add


read_number, add_number = enclosing()


class Own(nn.Module):
    """A module of the user's own."""

    scale: ClassVar[float] = 1.0


def set_number() -> None:
    global NUMBER
    NUMBER += 1


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "NUMBER": (set_number, lambda: NUMBER),
    "TABLE": (lambda: TABLE.update(scale=2.0), lambda: TABLE["scale"]),
    "ITEMS": (lambda: ITEMS.append(2.0), lambda: len(ITEMS)),
    "LATEST": (lambda: LATEST.append(2), lambda: len(LATEST)),
    "SEEN": (lambda: SEEN.add(2), lambda: len(SEEN)),
    "BOX": (lambda: setattr(BOX, "scale", 2.0), lambda: BOX.scale),
    "THREAD": (lambda: setattr(THREAD, "scale", 2.0), lambda: hasattr(THREAD, "scale")),
    "by_default": (
        lambda: by_default.__defaults__[0].append(1),
        lambda: len(by_default.__defaults__[0]),
    ),  # type: ignore[index]
    "read_number": (add_number, read_number),
    "Own.scale": (lambda: setattr(Own, "scale", 2.0), lambda: Own.scale),
    "Own.other": (lambda: setattr(Own, "other", 2.0), lambda: hasattr(Own, "other")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_put_back(name: str) -> None:
    change, read = CHANGES[name]
    before, content = read(), OuterContent(OuterState([Own()]))
    assert content.restore() == []
    change()
    assert read() != before
    assert f"{HERE}.{name}" in content.restore()
    assert read() == before
    assert content.restore() == []


def test_what_has_not_changed_is_left_alone() -> None:
    """Another thread may be reading it."""
    content = OuterContent(OuterState([Own()]))
    CHANGES["NUMBER"][0]()
    reading = iter(WATCHED)
    assert next(reading) == "a"
    assert content.restore() == [f"{HERE}.NUMBER"]
    assert next(reading) == "b"  # a dictionary that is filled again ends its iterators


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTER_STATE_ONE", "1")
    content = OuterContent(OuterState([Own()]))
    os.environ["OUTER_STATE_ONE"] = "2"
    os.environ["OUTER_STATE_NEW"] = "3"
    assert content.restore() == ["os.environ['OUTER_STATE_NEW']", "os.environ['OUTER_STATE_ONE']"]
    assert os.environ["OUTER_STATE_ONE"] == "1"
    assert "OUTER_STATE_NEW" not in os.environ


def test_a_tensor_that_is_changed_in_place_is_named() -> None:
    content = OuterContent(OuterState([Own()]))
    TENSOR.add_(1)
    assert content.restore() == [f"{HERE}.TENSOR"]


def test_classes_of_libraries_have_no_state_of_the_user() -> None:
    assert [*OuterState([nn.Linear(1, 1)]).look()] == []


def test_long_containers_count_by_their_length() -> None:
    long = [0] * 1000
    before = form_of(long)
    long[0] = 1
    assert form_of(long) == before
    long.append(1)
    assert form_of(long) != before


def test_what_refers_to_itself_has_a_form() -> None:
    itself: list[Any] = [1]
    itself.append(itself)
    assert form_of(itself) == form_of(itself)
