"""Batches whose backwards are left for the time of the next one give the bits of batches that run
one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hetero.pipeline.driver import BatchWork, Limits, MicrobatchStep, StepGradients
from lightning_hetero.pipeline.turns import current_turn

from .driven import (
    Model,
    Pipeline,
    Step,
    Through,
    microbatches,
    no_thread_is_left,
    ordinary_step,
    separate_visits,
    visit_twice,
    visits_by_content,
)

__all__ = ["no_thread_is_left"]


def run_window(
    pipeline: Pipeline, sizes: Sequence[int], limit: int, *, leaves: bool
) -> list[list[Any]]:
    """The results of the batches of a window, whose gradients are in `.grad` at the end.

    Args:
        pipeline: Runs them.
        sizes: The number of micro-batches of each batch.
        limit: The most micro-batches in flight.
        leaves: Whether backwards may be left.
    """
    _run_batches(pipeline, [1], limit, leaves=False)  # shows how gradients add up
    pipeline.chain.actions.clear()
    found = _run_batches(pipeline, sizes, limit, leaves=leaves)
    assert not pipeline.driver.has_left
    return found


def _run_batches(
    pipeline: Pipeline, sizes: Sequence[int], limit: int, *, leaves: bool
) -> list[list[Any]]:
    tokens, driver = iter(microbatches(sum(sizes))), pipeline.driver
    found, first = [], 0
    for number, size in enumerate(sizes):
        work = [
            MicrobatchStep(
                partial(pipeline.training_step, pipeline.model, pipeline.hand_over, next(tokens)),
                partial(float, 0.5**number / size),
            )
            for _ in range(size)
        ]
        batch = BatchWork(work, number + 1, accumulates=number > 0, first=first)
        may_leave = leaves and number < len(sizes) - 1 and driver.gradients.can_be_left
        found.append(driver.run(batch, Limits(limit, pipeline.max_started), may_leave=may_leave))
        if number == 0:
            pipeline.model.zero_grad()
        driver.gradients.publish()
        first += size
    return found


def assert_same_bits(pipeline: Pipeline, sizes: Sequence[int], limit: int) -> None:
    """A window has the bits of its batches one after the other."""
    plain = replace(pipeline)  # with the same weights
    expected = run_window(plain, sizes, limit, leaves=False)
    found = run_window(pipeline, sizes, limit, leaves=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(pipeline.gradients(), plain.gradients(), rtol=0, atol=0)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(0, 10**6),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.3]),
)
def test_a_window_has_the_bits_of_its_batches_one_after_the_other(
    num_stages: int,
    sizes: list[int],
    limit: int,
    timing: int,
    loss_waits: bool,
    tied: bool,
    dropout: float,
) -> None:
    pipeline = Pipeline(num_stages, timing, tied=tied, dropout=dropout)
    pipeline.driver.loss_waits = loss_waits
    assert_same_bits(pipeline, sizes, limit)
    assert max(pipeline.chain.most_in_flight.values()) <= limit


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([visit_twice, visits_by_content, separate_visits]),
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.integers(1, 5),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_so_has_one_whose_micro_batches_visit_the_stages_several_times(
    training_step: Step, sizes: list[int], limit: int, timing: int, loss_waits: bool
) -> None:
    pipeline = Pipeline(2, timing, training_step)
    pipeline.driver.loss_waits = loss_waits
    assert_same_bits(pipeline, sizes, limit)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("timing", range(3))
def test_a_forward_that_runs_again_in_a_later_batch_draws_what_it_drew(
    timing: int, recompute: bool
) -> None:
    pipeline = Pipeline(2, timing, dropout=0.4, recompute=recompute)
    assert_same_bits(pipeline, [1, 1, 2, 1], limit=4)


def test_the_next_batch_begins_while_backwards_are_left() -> None:
    pipeline = Pipeline(num_stages=2)
    run_window(pipeline, [1, 1, 1], limit=3, leaves=True)
    names = [str(action) for action in pipeline.chain.actions]
    assert names.index("1F1") < names.index("1B0")
    assert names.index("1F2") < names.index("1B1")


def test_the_last_loss_may_wait_until_the_next_batch_has_started() -> None:
    started: list[str] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Tensor) -> Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            started.append("loss backward")
            return gradient

    def step(model: Model, through: Through, tokens: Tensor) -> Any:
        started.append("start")
        return Noted.apply(ordinary_step(model, through, tokens))

    pipeline = Pipeline(1, training_step=step)
    pipeline.driver.loss_waits = True
    run_window(pipeline, [1, 1, 1], limit=3, leaves=True)
    backward = "loss backward"
    assert started[2:] == ["start", "start", backward, "start", backward, backward]


def reads_gradient(seen: list[Tensor | None]) -> Step:
    """A `training_step` that looks at the gradients of the batches before."""

    def step(model: Model, through: Through, tokens: Tensor) -> Any:
        turn = current_turn()
        assert turn is not None
        pipelines[0].driver.wait_for_earlier()
        gradient = model.embedding.weight.grad
        seen.append(None if gradient is None else gradient.clone())
        torch.rand(3)  # waiting must not change what is drawn
        return ordinary_step(model, through, tokens)

    pipelines: list[Pipeline] = []
    step.pipelines = pipelines  # type: ignore[attr-defined]
    return step


@pytest.mark.parametrize("timing", range(4))
def test_a_step_that_waits_sees_the_gradients_of_the_batches_before(timing: int) -> None:
    seen: dict[bool, list[Tensor | None]] = {}
    gradients = {}
    for leaves in (False, True):
        seen[leaves] = []
        step = reads_gradient(seen[leaves])
        pipeline = Pipeline(2, timing, step, dropout=0.3)
        step.pipelines.append(pipeline)  # type: ignore[attr-defined]
        run_window(pipeline, [1, 1, 1, 1], limit=3, leaves=leaves)
        gradients[leaves] = pipeline.gradients()
    torch.testing.assert_close(seen[True], seen[False], rtol=0, atol=0)
    torch.testing.assert_close(gradients[True], gradients[False], rtol=0, atol=0)


@pytest.mark.parametrize("timing", range(4))
def test_finish_waits_for_what_is_left(timing: int) -> None:
    pipeline = Pipeline(2, timing)
    plain, tokens = replace(pipeline), microbatches(2)
    for each, leaves in ((plain, False), (pipeline, True)):
        for number in range(2):
            work = [
                MicrobatchStep(
                    partial(each.training_step, each.model, each.hand_over, tokens[number]),
                    lambda: 1.0,
                )
            ]
            batch = BatchWork(work, number + 1, accumulates=number > 0, first=number)
            each.driver.run(batch, Limits(4), may_leave=leaves)
            each.driver.gradients.publish()
        if leaves:
            assert each.driver.has_left
            with torch.inference_mode():
                each.driver.finish()
        assert not each.driver.has_left
    torch.testing.assert_close(pipeline.gradients(), plain.gradients(), rtol=0, atol=0)
    for gradient in pipeline.gradients().values():
        assert gradient is not None
        assert not gradient.is_inference()


def test_an_error_in_a_late_backward_names_its_batch() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor) -> Tensor:
            return hidden.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ValueError("no slope")

    def step(model: Model, through: Through, tokens: Tensor) -> Any:
        return model.loss(through(Failing.apply(model.embed(tokens))))

    pipeline = Pipeline(1, training_step=step)
    tokens = microbatches(2)
    for number in range(2):
        run = partial(step, pipeline.model, pipeline.hand_over, tokens[number])
        work = [MicrobatchStep(run, lambda: 1.0)]
        batch = BatchWork(work, number + 1, number > 0, number, f"batch {number}")
        if number == 0:
            pipeline.driver.run(batch, Limits(4), may_leave=True)
            pipeline.driver.gradients.publish()
        else:
            with pytest.raises(ValueError, match=r"no slope \(in a backward of batch 0\)"):
                pipeline.driver.run(batch, Limits(4))
    assert not pipeline.driver.has_left


def test_after_drop_the_next_batch_begins_a_step_of_its_own() -> None:
    pipeline = Pipeline(1)
    run = partial(pipeline.training_step, pipeline.model, pipeline.hand_over, microbatches(1)[0])
    work = [MicrobatchStep(run, lambda: 1.0)]
    pipeline.driver.run(BatchWork(work, 1, accumulates=False), Limits(4), may_leave=True)
    assert pipeline.driver.has_left
    pipeline.chain.abort_step()
    pipeline.driver.drop()
    assert not pipeline.driver.has_left
    pipeline.driver.run(BatchWork(work, 2, accumulates=False), Limits(4))
    assert pipeline.chain.step == 2


def test_a_gradient_that_a_loss_and_what_comes_back_add_to_cannot_be_left() -> None:
    def step(model: Model, through: Through, tokens: Tensor) -> Any:
        return model.loss(through(model.embed(tokens))) + model.embedding.weight.square().mean()

    pipeline = Pipeline(1, training_step=step)
    assert_same_bits(pipeline, [1, 1, 1], limit=3)
    assert not pipeline.driver.gradients.can_be_left


def test_a_gradient_of_a_parameter_with_a_hook_cannot_be_left() -> None:
    owner = nn.Parameter(torch.zeros(3))
    owner.register_hook(lambda gradient: 2 * gradient)
    gradients = StepGradients([owner], [])
    gradients.begin(accumulate=False)
    assert not gradients.can_be_left
