"""The driver gives the results of sequential micro-batches, under any timing."""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hetero.model.captured_outputs import CollectingHooks
from lightning_hetero.model.hollow import HollowLayers
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.pipeline.boundary import Activation, Gradients
from lightning_hetero.pipeline.driver import (
    BatchWork,
    Driver,
    Limits,
    MicrobatchStep,
    StepGradients,
)
from lightning_hetero.pipeline.handover import Request, Returned, surroundings_here
from lightning_hetero.pipeline.random_numbers import Draws
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.turns import current_turn

from ..families import tiny_model
from .chain import Chain, cut_into_stages, threads
from .driven import (
    NUM_LAYERS,
    Layers,
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


def sequential(plain: Pipeline, inputs: list[Tensor], factors: list[float]) -> list[Tensor]:
    """The losses micro-batch by micro-batch, without driver and stages; it keeps the gradients."""

    def body(hidden: Tensor) -> Tensor:
        for number in range(NUM_LAYERS):
            hidden = plain.layers[number](hidden)
        return hidden

    losses = []
    for tokens, factor in zip(inputs, factors, strict=True):
        loss = plain.training_step(plain.model, body, tokens)
        if factor > 0:
            loss.backward(torch.full_like(loss, factor))
        losses.append(loss)
    return losses


def assert_equals_sequential(
    pipeline: Pipeline, count: int, limit: int, factors: list[float] | None = None, **near: float
) -> None:
    """One step of the pipeline gives what its twin gives without driver and stages."""
    plain = pipeline.twin()
    inputs, factors = microbatches(count), factors or [1 / count] * count
    found = pipeline.run(inputs, limit, factors)
    expected = sequential(plain, inputs, factors)
    tolerance = near or {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
    torch.testing.assert_close(pipeline.gradients(), plain.gradients(), **tolerance)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize(
    ("count", "limit"), [(1, 1), (2, 1), (3, 2), (5, 1), (5, 2), (5, 3), (5, 5), (4, 8)]
)
def test_losses_and_gradients_are_bit_equal_to_sequential_microbatches(
    num_stages: int, count: int, limit: int
) -> None:
    assert_equals_sequential(Pipeline(num_stages), count, limit)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_timing_changes_neither_losses_nor_gradients_nor_the_bound(
    num_stages: int, count: int, limit: int, timing: int
) -> None:
    pipeline = Pipeline(num_stages, timing)
    assert_equals_sequential(pipeline, count, limit)
    assert max(pipeline.chain.most_in_flight.values()) <= limit


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 10**6),
)
def test_neither_does_it_matter_which_process_has_which_stages(
    processes: list[int], count: int, limit: int, timing: int
) -> None:
    pipeline = Pipeline(len(processes), timing, processes=tuple(processes))
    assert_equals_sequential(pipeline, count, limit)
    assert max(pipeline.chain.most_in_flight.values()) <= limit


@pytest.mark.parametrize("timing", range(5))
def test_tied_parameters_sums_are_bit_equal(timing: int) -> None:
    assert_equals_sequential(Pipeline(timing=timing, tied=True), count=5, limit=3)


@pytest.mark.parametrize("timing", range(5))
@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_layers_give_the_same(timing: int, recompute: bool) -> None:
    assert_equals_sequential(Pipeline(3, timing, recompute=recompute), count=4, limit=3)


@pytest.mark.parametrize("timing", range(5))
@pytest.mark.parametrize("limit", [1, 2, 4])
def test_neither_a_stage_nor_the_coordinator_holds_more_than_the_bound(
    limit: int, timing: int
) -> None:
    started: list[int] = []
    ended: list[int] = []

    def step(model: Model, through: Through, tokens: Tensor) -> Tensor:
        started.append(1)
        assert len(started) - len(ended) <= limit
        return model(tokens, through)

    pipeline = Pipeline(3, timing, step)
    receive, take_arrived = pipeline.chain.receive, pipeline.chain.take_arrived

    def counted(returned: Returned) -> Returned:
        ended.extend([1] * isinstance(returned.content, Gradients))
        return returned

    pipeline.chain.receive = lambda: counted(receive())  # type: ignore[method-assign]
    pipeline.chain.take_arrived = lambda: [counted(one) for one in take_arrived()]  # type: ignore[method-assign]
    pipeline.run(microbatches(7), limit)
    assert len(ended) == 7
    assert all(0 < held <= limit for held in pipeline.chain.most_in_flight.values())


@pytest.mark.parametrize("timing", range(5))
def test_more_may_have_begun_than_are_in_flight_on_a_stage(timing: int) -> None:
    pipeline = Pipeline(2, timing, max_started=4)
    pipeline.driver.starts_first = True
    send, begun = pipeline.chain.send_forward, []

    def counted(key: Key, *request: Any) -> None:
        begun.append(key.microbatch)
        if len(begun) == 4:
            assert not any(action.kind == "B" for action in pipeline.chain.actions)
        send(key, *request)

    pipeline.chain.send_forward = counted  # type: ignore[method-assign]
    assert_equals_sequential(pipeline, count=7, limit=2)
    assert begun == [*range(7)]
    assert all(0 < held <= 2 for held in pipeline.chain.most_in_flight.values())


def test_one_forward_one_backward_follows_from_the_rule() -> None:
    pipeline = Pipeline(num_stages=1)
    pipeline.run(microbatches(5), limit=2)
    names = [str(action) for action in pipeline.chain.actions]
    assert names == ["1F0", "1F1", "1B0", "1F2", "1B1", "1F3", "1B2", "1F4", "1B3", "1B4"]


class QuickChain(Chain):
    """Everything has happened before the coordinator looks."""

    def take_arrived(self) -> list[Returned]:
        while self._possible_events():
            self._let_something_happen()
        return super().take_arrived()


def test_a_loss_whose_activation_is_there_goes_before_a_new_forward() -> None:
    pipeline = Pipeline(num_stages=1)
    pipeline.chain.__class__ = QuickChain
    pipeline.run(microbatches(3), limit=3)
    names = [str(action) for action in pipeline.chain.actions]
    assert names == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]


@pytest.mark.parametrize(
    ("count", "limit", "expected"),
    [
        (4, 3, "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3"),
        (4, 9, "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3"),
        (2, 9, "1F0 1F1 1B0 1B1"),
        (2, 1, "1F0 1B0 1F1 1B1"),
    ],
)
def test_in_a_compared_batch_most_start_before_one_goes_on_and_the_last_one_later(
    count: int, limit: int, expected: str
) -> None:
    pipeline = Pipeline(num_stages=1)
    pipeline.chain.__class__ = QuickChain
    pipeline.run(microbatches(count), limit, is_compared=True)
    assert [str(action) for action in pipeline.chain.actions] == expected.split()


@pytest.mark.parametrize("limit", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize(
    "training_step", [ordinary_step, visit_twice, visits_by_content, separate_visits]
)
def test_a_compared_batch_ends_and_adds_up_as_any_other(
    training_step: Step, count: int, limit: int
) -> None:
    """The gradients of several visits may wait for the last loss."""
    pipelines = [Pipeline(2, timing, training_step) for timing in range(2)]
    found = [
        each.run(microbatches(count), limit, is_compared=is_compared)
        for each, is_compared in zip(pipelines, [True, False], strict=True)
    ]
    torch.testing.assert_close(*found, rtol=0, atol=0)
    torch.testing.assert_close(*(each.gradients() for each in pipelines), rtol=0, atol=0)


def test_a_second_step_starts_from_its_own_gradients() -> None:
    pipeline = Pipeline()
    pipeline.run(microbatches(3), limit=2)
    first = pipeline.gradients()
    pipeline.run(microbatches(3), limit=2)
    torch.testing.assert_close(pipeline.gradients(), first, rtol=0, atol=0)


def test_the_threads_of_a_step_run_the_next_one() -> None:
    """Some libraries keep plans for each thread, which a new one would make anew."""
    ran: list[threading.Thread] = []

    def step(model: Model, through: Through, tokens: Tensor) -> Any:
        ran.append(threading.current_thread())
        return ordinary_step(model, through, tokens)

    pipeline = Pipeline(training_step=step)
    for _ in range(2):
        pipeline.run(microbatches(5), limit=3)
    assert len({*ran[:5]}) > 1
    assert {*ran[5:]} == {*ran[:5]}


def test_an_accumulating_step_adds_its_gradients_in_order() -> None:
    pipeline = Pipeline(timing=1)
    plain = pipeline.twin()
    inputs = microbatches(4)
    pipeline.run(inputs[:2], 2, [0.25] * 2)
    pipeline.run(inputs[2:], 2, [0.25] * 2, accumulate=True)
    sequential(plain, inputs, [0.25] * 4)
    torch.testing.assert_close(pipeline.gradients(), plain.gradients(), rtol=0, atol=0)


def nan_at_the_second(model: Model, through: Through, tokens: Tensor) -> Tensor:
    loss = model(tokens, through)
    return loss * torch.nan if torch.equal(tokens, microbatches(2)[1]) else loss


@pytest.mark.parametrize("timing", range(4))
def test_a_nan_loss_of_weight_zero_contributes_nothing(timing: int) -> None:
    pipeline = Pipeline(2, timing, nan_at_the_second)
    assert_equals_sequential(pipeline, count=4, limit=2, factors=[0.5, 0.0, 0.25, 0.25])
    gradients = pipeline.gradients().values()
    assert all(g is not None and bool(g.isfinite().all()) for g in gradients)


def test_a_microbatch_that_returns_no_loss_contributes_nothing() -> None:
    def step(model: Model, through: Through, tokens: Tensor) -> Tensor | None:
        loss = model(tokens, through)
        return None if torch.equal(tokens, microbatches(2)[1]) else loss

    pipeline, without = Pipeline(training_step=step), Pipeline()
    found = pipeline.run(microbatches(3), 2, [0.5, 0.25, 0.25])
    assert [loss is None for loss in found] == [False, True, False]
    first, _, third = microbatches(3)
    without.run([first, third], 2, [0.5, 0.25])
    torch.testing.assert_close(pipeline.gradients(), without.gradients(), rtol=0, atol=0)


@pytest.mark.parametrize("timing", range(5))
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_model_may_visit_the_stages_twice(limit: int, timing: int) -> None:
    pipeline = Pipeline(2, timing, visit_twice)
    assert_equals_sequential(pipeline, 3, limit, rtol=1e-5, atol=1e-6)
    assert max(pipeline.chain.most_in_flight.values()) <= limit


@pytest.mark.parametrize("training_step", [visit_twice, visits_by_content])
@pytest.mark.parametrize(("limit", "max_started"), [(1, 1), (2, 2), (3, 4), (6, 6)])
def test_several_visits_have_the_same_bits_under_every_timing(
    training_step: Step, limit: int, max_started: int
) -> None:
    found = []
    for timing in [None, *range(12)]:
        pipeline = Pipeline(2, timing, training_step, max_started=max_started)
        pipeline.run(microbatches(5), limit)
        found.append(pipeline.gradients())
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=0, atol=0)


def visit_without_gradient(model: Model, through: Through, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        target = through(model.embed(tokens.flip(1)))
    return model(tokens, through) + model.loss(target)


@pytest.mark.parametrize("timing", range(4))
@pytest.mark.parametrize("training_step", [separate_visits, visit_without_gradient])
def test_a_visit_that_the_loss_does_not_learn_from_teaches_nothing(
    training_step: Step, timing: int
) -> None:
    pipeline = Pipeline(2, timing, training_step)
    assert_equals_sequential(pipeline, 3, 2, rtol=1e-5, atol=1e-6)
    assert max(pipeline.chain.most_in_flight.values()) <= 2


def test_a_frozen_embedding_leaves_the_stages_learning() -> None:
    pipeline = Pipeline()
    pipeline.model.embedding.requires_grad_(False)
    assert_equals_sequential(pipeline, count=3, limit=2)
    assert pipeline.gradients()["0.linear.weight"] is not None


def test_frozen_layers_pass_the_gradient_to_the_embedding() -> None:
    pipeline = Pipeline()
    for layer in pipeline.layers.values():
        layer.requires_grad_(False)
    assert_equals_sequential(pipeline, count=3, limit=2)


def test_a_training_step_without_the_model_runs_too() -> None:
    pipeline = Pipeline(training_step=lambda model, _, tokens: model.loss(model.embed(tokens)))
    assert_equals_sequential(pipeline, count=3, limit=2)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("timing", [None, 0, 1, 2])
def test_a_replayed_step_draws_the_same_dropout_masks(timing: int | None, num_stages: int) -> None:
    expected = Pipeline(dropout=0.5)
    losses = expected.run(microbatches(3), limit=1)
    replayed = Pipeline(num_stages, timing, dropout=0.5, recompute=True)
    torch.rand(5)
    torch.testing.assert_close(replayed.run(microbatches(3), limit=3), losses, rtol=0, atol=0)
    torch.testing.assert_close(replayed.gradients(), expected.gradients(), rtol=0, atol=0)


def without_dropout(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0


@pytest.mark.parametrize("place", ["coordinator", "stages"])
def test_every_step_and_microbatch_draws_its_own_dropout_mask(place: str) -> None:
    pipeline = Pipeline(dropout=0.5)
    layers = nn.ModuleList(pipeline.layers.values())
    without_dropout(pipeline.model if place == "stages" else layers)
    same = [microbatches(1)[0]] * 3
    losses = [*pipeline.run(same, 2), *pipeline.run(same, 2)]
    assert len({float(loss.detach()) for loss in losses}) == 6


@pytest.mark.parametrize("fails", [False, True])
def test_the_global_random_state_is_as_it_was_after_a_step(fails: bool) -> None:
    def step(model: Model, through: Through, tokens: Tensor) -> Tensor:
        loss = model(tokens, through)
        if fails:
            raise ZeroDivisionError
        return loss

    pipeline = Pipeline(training_step=step, dropout=0.5)
    torch.manual_seed(77)
    before = torch.get_rng_state()
    try:
        pipeline.run(microbatches(3), limit=2)
    except ZeroDivisionError:
        assert fails
    assert torch.equal(torch.get_rng_state(), before)


class UserError(Exception):
    """Raised by a training_step."""


@dataclass
class FailingStep:
    """A training_step that raises in one micro-batch, before or behind the hand-over."""

    failing: int
    is_before: bool
    unwound: list[str] = field(default_factory=list)

    def __call__(self, model: Model, through: Through, tokens: Tensor) -> Tensor:
        is_failing = torch.equal(tokens, microbatches(self.failing + 1)[-1])
        try:
            if is_failing and self.is_before:
                raise_deep_inside()
            loss = model(tokens, through)
            if is_failing:
                raise_deep_inside()
            return loss
        finally:
            self.unwound.append(threading.current_thread().name)


def raise_deep_inside() -> None:
    raise UserError("mine")


@pytest.mark.parametrize("timing", [None, 0, 1])
@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 3])
def test_an_exception_arrives_with_the_users_traceback_and_unwinds_all(
    failing: int, is_before: bool, timing: int | None
) -> None:
    step = FailingStep(failing, is_before)
    pipeline = Pipeline(2, timing, step)
    with pytest.raises(UserError, match="mine") as caught:
        pipeline.run(microbatches(5), limit=3)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-2:] == ["__call__", "raise_deep_inside"]
    assert f"micro-batch {failing}" in step.unwound
    assert len(step.unwound) == len(set(step.unwound))


@pytest.mark.parametrize("timing", [None, 0, 1, 2])
@pytest.mark.parametrize("is_before", [False, True])
def test_the_step_after_an_exception_is_as_if_nothing_had_been(
    is_before: bool, timing: int | None
) -> None:
    pipeline = Pipeline(3, timing, FailingStep(2, is_before))
    with pytest.raises(UserError):
        pipeline.run(microbatches(5), limit=3)
    pipeline.training_step = ordinary_step
    assert_equals_sequential(pipeline, count=4, limit=2)


def test_the_stages_drop_what_they_gathered_in_a_step_that_failed() -> None:
    pipeline = Pipeline(training_step=FailingStep(4, is_before=False))
    plain = pipeline.twin()
    with pytest.raises(UserError):
        pipeline.run(microbatches(5), limit=2)
    pipeline.training_step = plain.training_step = ordinary_step
    pipeline.run(microbatches(2), 2, [0.5, 0.5], accumulate=True)
    sequential(plain, microbatches(2), [0.5, 0.5])
    found, expected = pipeline.gradients(), plain.gradients()
    torch.testing.assert_close(found["0.linear.weight"], expected["0.linear.weight"])


def test_gradients_from_before_are_back_after_an_exception() -> None:
    pipeline = Pipeline()
    pipeline.run(microbatches(2), limit=2)
    before = pipeline.gradients()
    pipeline.training_step = FailingStep(1, is_before=False)
    with pytest.raises(UserError):
        pipeline.run(microbatches(3), limit=2)
    here = [name for name, _ in pipeline.model.named_parameters()]
    found = pipeline.gradients()
    torch.testing.assert_close([found[n] for n in here], [before[n] for n in here])


def test_a_failing_stage_unwinds_every_microbatch() -> None:
    step = FailingStep(failing=9, is_before=False)
    pipeline = Pipeline(training_step=step)

    def fail() -> Returned:
        raise ConnectionError("stage 1 is gone")

    pipeline.chain.receive = fail  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="gone"):
        pipeline.run(microbatches(4), limit=3)
    assert sorted(step.unwound) == ["micro-batch 0", "micro-batch 1", "micro-batch 2"]


def test_results_come_in_the_order_of_the_microbatches() -> None:
    def step(model: Model, through: Through, tokens: Tensor) -> dict[str, Any]:
        return {"loss": model(tokens, through), "tokens": tokens}

    pipeline = Pipeline(3, timing=4, training_step=step)
    pipeline.driver.loss_of = lambda result: result["loss"]
    found = pipeline.run(microbatches(5), limit=3)
    torch.testing.assert_close([result["tokens"] for result in found], microbatches(5))


@dataclass
class ExpertsPipeline:
    """A tiny Mixtral whose layers are behind a chain; its loss has the router's in it."""

    num_stages: int = 2
    timing: int | None = None
    recompute: bool = False
    model: Any = field(init=False)
    layers: Layers = field(init=False)
    driver: Driver = field(init=False)

    def __post_init__(self) -> None:
        self.model = tiny_model("mixtral", router_aux_loss_coef=0.5)
        chosen = dict(enumerate(find_decoder_layers(self.model)))
        CollectingHooks(self.model, [layer.name for layer in chosen.values()])
        # The chain computes with copies, since the layers themselves become hollow.
        self.layers = {n: copy.deepcopy(layer.module) for n, layer in chosen.items()}
        stages = cut_into_stages(self.layers, self.num_stages, self.recompute)
        chain = Chain(stages, self.timing)
        HollowLayers(chosen, self.exchange, None).hollow()  # type: ignore[arg-type]
        local = [p for p in self.model.parameters() if not p.is_meta]
        gradients = StepGradients(local, [])
        self.driver = Driver(chain, gradients, lambda loss: loss, Draws(1), threads)

    def exchange(self, hidden: Tensor, calls: Any, collect: Any, carried: Any) -> Any:
        turn = current_turn()
        assert turn is not None
        request = Request(hidden, surroundings_here(hidden, calls, collect, carried))
        returned: Activation = turn.hand_over(request)
        return returned.hidden, returned.collected

    def run(self, losses: Sequence[Callable[[Any], Any]]) -> list[Any]:
        work = [
            MicrobatchStep(partial(loss, self.model), lambda: 1 / len(losses)) for loss in losses
        ]
        results = self.driver.run(BatchWork(work, 1, accumulates=False), Limits(2))
        self.driver.gradients.publish()
        return results

    def gradients(self) -> dict[str, Tensor | None]:
        named = {n: p.grad for n, p in self.model.named_parameters() if not p.is_meta}
        for number, layer in self.layers.items():
            prefix = f"model.layers.{number}."
            named.update({prefix + name: p.grad for name, p in layer.named_parameters()})
        return named


def loss_with_routers(tokens: Tensor, model: Any) -> Tensor:
    loss: Tensor = model(tokens, labels=tokens).loss
    return loss


def routers_loss(tokens: Tensor, model: Any) -> Tensor:
    loss: Tensor = model(tokens, labels=tokens).aux_loss
    return loss


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("num_stages", "timing"), [(1, None), (2, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize("loss_of", [loss_with_routers, routers_loss])
def test_microbatches_learn_from_what_the_stages_collect(
    loss_of: Callable[[Tensor, Any], Tensor], num_stages: int, timing: int | None, recompute: bool
) -> None:
    steps = [partial(loss_of, tokens) for tokens in microbatches(3)]
    pipeline = ExpertsPipeline(num_stages, timing, recompute)
    plain = tiny_model("mixtral", router_aux_loss_coef=0.5)
    found, expected = pipeline.run(steps), [step(plain) for step in steps]
    for loss in expected:
        (loss / len(steps)).backward()
    torch.testing.assert_close(found, [loss.detach() for loss in expected])
    gradients = pipeline.gradients()
    for name, parameter in plain.named_parameters():
        # A layer that runs again has gradients of zero where it would have none.
        zero = torch.zeros_like(parameter)
        mine, its = (zero if g is None else g for g in (gradients[name], parameter.grad))
        torch.testing.assert_close(mine, its, msg=lambda text, name=name: f"{name}: {text}")


@dataclass
class Replica:
    """A copy of the layers in this process. Implements `HostedLayers`."""

    layers: Layers
    staying: frozenset[int]
    around: tuple[Callable[[Tensor, bool], Tensor], Callable[[], None]] | None = None
    num_tokens: int = 0
    bias: Tensor | None = None

    def stays(self, microbatch: int) -> bool:
        return microbatch in self.staying

    never_leaves = stays

    def sending_early(self) -> AbstractContextManager[None]:
        return nullcontext()

    def note_tokens(self, hidden: Tensor) -> None:
        self.num_tokens += hidden.shape[:-1].numel()

    @contextmanager
    def running(
        self, enter: Callable[[Tensor, bool], Tensor], leave: Callable[[], None]
    ) -> Iterator[None]:
        assert self.around is None
        self.around = enter, leave
        try:
            yield
        finally:
            self.around = None

    def through(self, away: Through, hidden: Tensor) -> Tensor:
        if self.around is None:
            return away(hidden)
        enter, leave = self.around
        # Other micro-batches run while this one stops.
        bias, self.bias = self.bias, None
        hidden = enter(hidden, bias is not None)
        if bias is not None:
            hidden = hidden + bias
        for layer in self.layers.values():
            hidden = layer(hidden)
        leave()
        return hidden


def run_with_replica(
    pipeline: Pipeline, staying: Collection[int], count: int, limit: int
) -> dict[str, Tensor | None]:
    """Train one step; returns the gradients of all processes."""
    pipeline.driver.hosted = replica = Replica(copy.deepcopy(pipeline.layers), frozenset(staying))
    here = [parameter for layer in replica.layers.values() for parameter in layer.parameters()]
    local = [*pipeline.model.parameters(), *here]
    shared = [pipeline.model.embedding.weight] if pipeline.tied else []
    pipeline.driver.gradients = StepGradients(local, shared)
    step, through = pipeline.training_step, partial(replica.through, pipeline.hand_over)
    pipeline.training_step = lambda model, _, tokens: step(model, through, tokens)
    pipeline.run(microbatches(count), limit)
    pipeline.training_step = step
    return pipeline.gradients() | own_gradients(replica.layers)


def own_gradients(layers: Layers) -> dict[str, Tensor | None]:
    named = (
        (f"here {n}.{name}", p) for n, each in layers.items() for name, p in each.named_parameters()
    )
    return {name: parameter.grad for name, parameter in named}


def expected_with_replica(
    pipeline: Pipeline, staying: Collection[int], count: int
) -> dict[str, Tensor | None]:
    """The sums of each process are those of its micro-batches, and what is before the layers and
    behind them adds up all, in their order."""
    plain, here = pipeline.twin(), copy.deepcopy(pipeline.layers)
    there = plain.layers
    for index, tokens in enumerate(microbatches(count)):
        plain.layers = here if index in staying else there
        sequential(plain, [tokens], [1 / count])
    plain.layers = there
    return plain.gradients() | own_gradients(here)


def twice(model: Model, through: Through, tokens: Tensor) -> Tensor:
    return model.loss(through(through(model.embed(tokens)) * 0.5))


@settings(max_examples=40)
@given(
    st.sets(st.integers(0, 7)), st.integers(1, 8), st.integers(1, 6), st.integers(0, 10**6),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_a_replica_here_adds_up_its_own_micro_batches(
    staying: set[int], count: int, limit: int, timing: int, tied: bool, starts_first: bool
) -> None:
    pipeline = Pipeline(2, timing, tied=tied)
    pipeline.driver.starts_first = starts_first
    expected = expected_with_replica(pipeline, staying, count)
    found = run_with_replica(pipeline, staying, count, limit)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    replica, sizes = pipeline.driver.hosted, [each.numel() for each in microbatches(count)]
    assert isinstance(replica, Replica)
    assert replica.num_tokens == sum(sizes[index] for index in staying if index < count)


@settings(max_examples=40)
@given(st.sets(st.integers(0, 7)), st.integers(1, 8), st.integers(1, 6), st.integers(0, 10**6))
def test_with_several_visits_too_timing_changes_nothing(
    staying: set[int], count: int, limit: int, timing: int
) -> None:
    """In all of these a step ends: no micro-batch waits for the loss of one that cannot start."""
    found = run_with_replica(Pipeline(2, timing, twice), staying, count, limit)
    at_once = Pipeline(2, None, twice)
    expected = expected_with_replica(at_once, staying, count)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    exactly = run_with_replica(at_once, staying, count, limit)
    torch.testing.assert_close(found, exactly, rtol=0, atol=0)


@settings(max_examples=40)
@given(
    st.sets(st.integers(0, 7)), st.integers(1, 8), st.integers(1, 6), st.integers(0, 10**6),
    st.integers(1, 2),
)  # fmt: skip
def test_code_of_the_user_runs_in_the_order_of_the_micro_batches(
    staying: set[int], count: int, limit: int, timing: int, num_visits: int
) -> None:
    """Before the layers and behind each visit, wherever these are and whatever comes first."""
    ran: list[list[int]] = [[] for _ in range(num_visits + 1)]
    inputs = microbatches(count)

    def step(model: Model, through: Through, tokens: Tensor) -> Tensor:
        [number] = [i for i, each in enumerate(inputs) if each.equal(tokens)]
        hidden = model.embed(tokens)
        ran[0].append(number)
        for behind in ran[1:]:
            hidden = through(hidden) * 0.5
            behind.append(number)
        return model.loss(hidden)

    run_with_replica(Pipeline(2, timing, step), staying, count, limit)
    assert ran == [[*range(count)]] * (num_visits + 1)


@settings(max_examples=40)
@given(st.sets(st.integers(0, 7)), st.integers(4, 8), st.integers(0, 10**6))
def test_what_a_loss_uses_from_before_the_layers_is_added_in_one_order(
    staying: set[int], count: int, timing: int
) -> None:
    """Such as a head behind each layer: losses and gradients that come back both add to it."""

    def step(model: Model, through: Through, tokens: Tensor) -> Tensor:
        hidden = model.embed(tokens)
        return model.loss(through(hidden)) + 0.3 * model.loss(hidden)

    found = run_with_replica(Pipeline(2, timing, step), staying, count, 4)
    at_once = run_with_replica(Pipeline(2, None, step), staying, count, 4)
    torch.testing.assert_close(found, at_once, rtol=0, atol=0)


@settings(max_examples=40)
@given(st.sets(st.integers(0, 7), min_size=1), st.integers(4, 8), st.integers(0, 10**6))
def test_what_goes_into_layers_here_beside_the_hidden_states_is_added_in_order(
    staying: set[int], count: int, timing: int
) -> None:
    """Such as a position bias: its gradient comes with the loss, around the cut."""

    def step(model: Model, through: Through, tokens: Tensor) -> Tensor:
        assert isinstance(through, partial)
        replica = through.func.__self__
        hidden = model.embed(tokens)
        if replica.around is not None:
            replica.bias = 0.3 * model.embedding(tokens.flip(1))
        return model.loss(through(hidden))

    found = run_with_replica(Pipeline(2, timing, step), staying, count, 4)
    at_once = run_with_replica(Pipeline(2, None, step), staying, count, 4)
    torch.testing.assert_close(found, at_once, rtol=0, atol=0)


def test_layers_here_run_when_the_stages_have_their_micro_batches() -> None:
    ran: list[str] = []

    class Layer(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            ran.append("layers here")
            return hidden

    def step(model: Model, through: Through, tokens: Tensor) -> Tensor:
        ran.append("start")
        return model(tokens, through)

    pipeline = Pipeline(num_stages=1, training_step=step)
    replica = Replica({0: Layer()}, frozenset({0, 2, 4}))  # type: ignore[dict-item]
    pipeline.driver.hosted = replica
    away = pipeline.hand_over
    pipeline.training_step = lambda model, _, tokens: step(
        model, partial(replica.through, away), tokens
    )
    pipeline.run(microbatches(6), limit=4)
    assert ran[:5] == ["start"] * 4 + ["layers here"]
