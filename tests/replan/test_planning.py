"""Which plan a run gets, what it prints of it, and where it cannot."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import lightning.pytorch as pl
import pytest

from lightning_hetero.errors import PlanError
from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.profile import Measured
from lightning_hetero.planner.solver import solve
from lightning_hetero.replan.planning import PlanChoice, _print_verdict, in_window

from ..planner.profiles import device, profile

HERE = Plan([StagePlan([COORDINATOR], (0, 5))])


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


def test_a_file_is_named_whose_plan_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "five.yaml"
    HERE.to_yaml(path)
    choice = PlanChoice(path, None)
    assert choice.given(5, []) == HERE
    with pytest.raises(PlanError, match=r"five\.yaml' does not fit\. The plan covers 5 layers and"):
        choice.given(6, [])


def test_a_plan_without_a_file_names_none() -> None:
    with pytest.raises(PlanError, match="^The plan covers 5 layers and the model has 6"):
        PlanChoice(HERE, None).given(6, [])


def test_the_strategys_own_plan_counts_the_batches_that_the_trainer_accumulates() -> None:
    trainer = pl.Trainer(
        accelerator="cpu", accumulate_grad_batches=8, logger=False, enable_checkpointing=False
    )
    twins = profile(4, [device("a", 1, 2), device("b", 1, 2)], batch_size=1)
    measured = Measured(twins, Path("profile.yaml"))
    window, apart = (in_window(measured, trainer, cuts_step) for cuts_step in (True, False))
    assert window.path == measured.path
    choice = PlanChoice("auto", None)
    assert choice.solve(window.profile, ["a", "b"], replicas=False).workers == ["a", "b"]
    assert len(choice.solve(apart.profile, ["a", "b"], replicas=False).workers) == 1
