"""Batches too small for the pipeline are said once, with what they cost and what to set."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner.profile import Profile
from lightning_hetero.replan.watch import most_accumulated
from lightning_hetero.replan.window_warning import SmallBatch, WindowWarning

from ..planner.profiles import device, profile

PLAN = Plan([StagePlan(["a"], (0, 2)), StagePlan(["b"], (2, 4))], micro_batches=8)
TWINS = profile(4, [device("a", 1, 2), device("b", 1, 2)], batch_size=8)
FOUR = Plan([StagePlan([name], (i, i + 1)) for i, name in enumerate("abcd")], micro_batches=8)
FOUR_DEVICES = profile(4, [device(name, 1, 2) for name in "abcd"], batch_size=8)


def trainer(accumulated: int = 8, **others: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=accumulated,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **others,
    )


def said(
    num_samples: int,
    accumulated: int = 8,
    plan: Plan = PLAN,
    known: Profile | None = TWINS,
    cuts_step: bool = True,
    times: int = 1,
) -> list[str]:
    """The warnings about batches of so many samples."""
    of: Any = SimpleNamespace(
        accumulate_grad_batches=accumulated,
        callbacks=[],
        max_epochs=1,
        train_dataloader=None,
    )
    warning = WindowWarning(of, plan, cuts_step, known)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            warning.note_batch(lambda: num_samples)
    return [str(each.message) for each in caught]


@pytest.mark.follows(
    ". With …, so …. Use ….",
)
def test_a_batch_that_is_too_small_is_said_once_with_its_cost_and_the_settings() -> None:
    (sentence,) = said(1, plan=FOUR, known=FOUR_DEVICES, times=3)
    times = SmallBatch(FOUR, 1, 8, cuts_step=True).times_as_long(FOUR_DEVICES)
    assert times == pytest.approx(56 / 36, abs=0.3)
    assert sentence.startswith(
        "A batch of 1 sample gives 1 micro-batch, and the plan counts on 8. With "
        "accumulate_grad_batches=8 only the backwards of a batch run beside the next batch, so a "
        f"step is predicted to take {times:.2f} times as long as with all 8 batches at once. "
    )
    assert sentence.endswith(
        "Use `lightning_hetero.windows(loader, 8)` with accumulate_grad_batches=1, or batches of 8 "
        "samples."
    )
    assert said(8, accumulated=1, plan=FOUR, known=FOUR_DEVICES) == []


def test_the_cost_is_that_of_the_plan_by_its_own_prediction() -> None:
    small = SmallBatch(PLAN, 1, 8, cuts_step=True)
    # A forward through both stages takes four seconds, and a stage works six on each batch.
    assert small.times_as_long(TWINS) == 1
    assert said(1) == []
    apart = SmallBatch(PLAN, 1, 8, cuts_step=False)
    # One after the other: eight times twelve seconds; at once nine times six.
    assert apart.times_as_long(TWINS) == pytest.approx(8 * 12 / (9 * 6))


def test_whole_batches_run_one_after_the_other() -> None:
    (sentence,) = said(1, cuts_step=False)
    assert "a batch begins when the batch before it has passed all stages" in sentence
    assert "is predicted to take 1.78 times as long as with all 8 batches at once" in sentence
    assert sentence.endswith("Use batches of 8 samples with accumulate_grad_batches=1.")


def test_without_measurements_the_numbers_are_said_without_a_cost() -> None:
    (sentence,) = said(2, known=None)
    assert "A batch of 2 samples gives 2 micro-batches, and the plan counts on 8" in sentence
    assert "so stages wait for each other. Use" in sentence


@pytest.mark.parametrize(
    ("num_samples", "accumulated", "plan"),
    [
        (8, 8, PLAN),
        (1, 1, PLAN),
        (1, 8, Plan([StagePlan(["coordinator"], (0, 4))], micro_batches=8)),
    ],
    ids=["enough samples", "no accumulation", "no worker"],
)
def test_nothing_is_warned_of_where_nothing_is_lost(
    num_samples: int, accumulated: int, plan: Plan
) -> None:
    assert said(num_samples, accumulated, plan) == []


def test_fewer_micro_batches_are_said_in_any_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        said(3, accumulated=1)
    assert "A batch of 3 samples gives 3 micro-batches, and the plan counts on 8." in caplog.text


def test_a_schedule_counts_with_its_largest_window() -> None:
    assert most_accumulated(trainer(4)) == 4
    schedule = GradientAccumulationScheduler({0: 2, 3: 16})
    assert most_accumulated(trainer(1, callbacks=[schedule], max_epochs=5)) == 16
    # The run ends before the larger window.
    assert most_accumulated(trainer(1, callbacks=[schedule], max_epochs=3)) == 2
    assert most_accumulated(trainer(1, callbacks=[schedule], max_epochs=-1)) == 16
