"""What a run prints of its plan, and where it cannot."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

import pytest

from lightning_hetero.planner.solver import solve
from lightning_hetero.strategy.deploy import _print_verdict

from ..planner.profiles import device, profile


def full() -> TextIO:
    return open("/dev/full", "w", encoding="utf-8")


def closed() -> TextIO:
    with open(os.devnull, "w", encoding="utf-8") as file:
        return file


def broken_pipe() -> TextIO:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", encoding="utf-8")


@pytest.mark.parametrize("output", [full, closed, broken_pipe], ids=lambda each: each.__name__)
def test_a_plan_that_cannot_be_printed_ends_no_run(
    output: Callable[[], TextIO], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    solution, file = solve(profile(2, [device("a", 1, 2)], batch_size=4)), output()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        _print_verdict(solution)
    with suppress(OSError):
        file.close()
    assert "The plan cannot be printed" in caplog.text
