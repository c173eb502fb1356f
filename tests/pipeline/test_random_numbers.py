"""Random numbers of a step depend on their place in it alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hetero.errors import ModelError
from lightning_hetero.pipeline.random_numbers import BatchDraws, Draws, MicrobatchDraws, seed_action

SEED = 3
places = st.tuples(st.integers(0, 10**6), st.integers(0, 64), st.integers(0, 64), st.integers(0, 4))


@pytest.fixture(autouse=True, scope="module")
def own_random_state() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def draw(seed: int, *place: int) -> Tensor:
    seed_action(seed, *place)
    return torch.rand(4)


@given(st.integers(0, 2**63 - 1), places, places)
def test_a_place_draws_the_same_whatever_was_drawn_before(
    seed: int, place: tuple[int, ...], other: tuple[int, ...]
) -> None:
    first = draw(seed, *place)
    draw(seed, *other)
    assert torch.equal(draw(seed, *place), first)


@given(st.integers(0, 2**63 - 1), places, places)
def test_different_places_draw_differently(
    seed: int, place: tuple[int, ...], other: tuple[int, ...]
) -> None:
    same = torch.equal(draw(seed, *place), draw(seed, *other))
    assert same == (place == other)


def test_the_order_of_a_places_numbers_counts() -> None:
    assert not torch.equal(draw(0, 1, 2), draw(0, 2, 1))


def test_another_seed_draws_differently() -> None:
    assert not torch.equal(draw(0, 1, 2), draw(1, 1, 2))


# The coordinator's own layers.


class Noisy(nn.Module):
    """A layer that drops, and tells what it drew; it may be called through checkpointing."""

    def __init__(self, draws: Draws, number: int = 0) -> None:
        super().__init__()
        self.draws = draws
        self.number = number
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, hidden: Tensor) -> Tensor:
        with self.draws.of_layer(self.number, ((hidden,), {})):
            return torch.tanh(hidden * self.weight * torch.rand(8)) + torch.rand(8)


def of_step(draws: Draws, microbatch: MicrobatchDraws, run: Callable[[], Any]) -> Any:
    with draws.of(microbatch):
        microbatch.go_on()
        return run()


def hidden_states() -> Tensor:
    return torch.linspace(-1, 1, 8, requires_grad=True)


NUM_LAYERS = 4
NUM_VISITS = 2


def disturb(draws: Draws) -> None:
    """What else runs in this process while a micro-batch is away."""
    torch.rand(2)
    of_step(draws, draws.microbatch(5, 1), lambda: Noisy(draws)(torch.ones(8)))
    torch.rand(3)


def code(draws: Draws, away: range, found: list[Tensor]) -> Iterator[int]:
    """Draws around each layer; yields the number of the last one of each hand-over."""
    for _ in range(NUM_VISITS):
        for number in range(NUM_LAYERS):
            found.append(torch.rand(2))
            if number not in away:
                Noisy(draws, number)(torch.ones(8))
            elif number != away[-1]:
                draws.pass_by(number)
            else:
                yield number
        found.append(torch.rand(2))


def code_draws(away: range) -> list[Tensor]:
    draws, found = Draws(SEED), list[Tensor]()
    microbatch, running = draws.microbatch(5, 0), code(draws, away, found)
    while (last := of_step(draws, microbatch, lambda: next(running, None))) is not None:
        microbatch.note_hand_over(last)
        disturb(draws)
    return found


@given(st.integers(0, NUM_LAYERS), st.integers(0, NUM_LAYERS))
def test_code_between_layers_draws_the_same_wherever_the_layers_are(one: int, other: int) -> None:
    found, expected = code_draws(range(*sorted((one, other)))), code_draws(range(0))
    assert len({tuple(each.tolist()) for each in expected}) == NUM_VISITS * (NUM_LAYERS + 1)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_a_layer_draws_what_a_worker_would() -> None:
    draws = Draws(SEED)
    layer, microbatch = Noisy(draws, number=7), draws.microbatch(5, 2)
    found = [of_step(draws, microbatch, lambda: layer(torch.zeros(8))) for _ in range(2)]
    for visit, result in enumerate(found):
        seed_action(SEED, 5, 7, 2, visit)
        torch.rand(8)
        assert torch.equal(result, torch.rand(8))


def test_a_micro_batch_saves_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """To save one takes ten times as long as to seed it."""
    draws = Draws(SEED)
    layer, microbatch = Noisy(draws), draws.microbatch(5, 2)
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.delattr(torch, name)
    of_step(draws, microbatch, lambda: layer(torch.zeros(8)))
    with pytest.raises(AttributeError, match="rng_state"), draws.of(draws.whole_batch(5)):
        layer(torch.zeros(8))


def test_the_code_of_a_whole_batch_draws_on_whatever_layers_draw() -> None:
    def drawn(num_calls: int) -> Tensor:
        draws = Draws(SEED)
        layer = Noisy(draws)
        torch.manual_seed(4)
        with draws.of(draws.whole_batch(5)):
            for _ in range(num_calls):
                layer(torch.zeros(8))
            draws.pass_by(1)
            return torch.rand(4)

    assert torch.equal(drawn(2), drawn(0))


def fail(draws: Draws, batch: BatchDraws) -> Tensor:
    """What the code draws behind an error in a layer."""
    torch.manual_seed(4)
    with draws.of(batch):
        with suppress(ZeroDivisionError), draws.of_layer(0, ()):
            torch.rand(3)
            raise ZeroDivisionError
        return torch.rand(4)


def test_an_error_in_a_layer_changes_nothing_behind_it() -> None:
    draws = Draws(SEED)
    found = fail(draws, draws.whole_batch(1))
    torch.manual_seed(4)
    assert torch.equal(found, torch.rand(4))
    found = fail(draws, draws.microbatch(1, 2))
    seed_action(SEED, 1, 0, 2, 0, "behind")
    assert torch.equal(found, torch.rand(4))


@pytest.mark.parametrize("has_begun", [False, True])
def test_outside_of_a_step_a_layer_draws_as_any_code_does(has_begun: bool) -> None:
    draws = Draws(SEED)
    layer = Noisy(draws)
    if has_begun:
        of_step(draws, draws.microbatch(1, 0), lambda: layer(torch.ones(8)))
    torch.manual_seed(1)
    found = layer(torch.zeros(8))
    torch.manual_seed(1)
    torch.rand(8)
    assert torch.equal(found, torch.rand(8))


def test_a_copy_of_the_module_has_no_part_in_the_step() -> None:
    draws = Draws(SEED)
    layer, microbatch = Noisy(draws), draws.microbatch(1, 0)
    with draws.of(microbatch):
        layer(torch.ones(8))
        twin = copy.deepcopy(layer)
        torch.manual_seed(1)
        found = twin(torch.zeros(8))
        torch.manual_seed(1)
        torch.rand(8)
        assert torch.equal(found, torch.rand(8))
    assert microbatch.num_calls(0) == 1
    assert twin.draws.seed == SEED


# A layer that the user's own checkpointing runs again in the backward.


def gradients(
    way: str, around: Any = nullcontext, twice: bool = False, detours: bool = False
) -> list[Tensor]:
    """The gradients of a layer's weight and input, after calls in a way of checkpointing."""
    draws = Draws(SEED)
    layer, microbatch = Noisy(draws), draws.microbatch(1, 0)
    hidden = hidden_states()

    def call(given: Tensor) -> Tensor:
        if way == "plain":
            return layer(given)  # type: ignore[no-any-return]
        options = {"preserve_rng_state": way != "nothing preserved"}
        found: Tensor = checkpoint(layer, given, use_reentrant=way == "reentrant", **options)
        return found

    with draws.of(microbatch), around():
        loss = call(hidden * 2).square().sum()
        if twice:
            loss = loss + call(hidden * 2).square().sum()
    if detours:
        of_step(draws, draws.microbatch(1, 1), lambda: layer(torch.ones(8)))
        torch.rand(3)
    with draws.of(microbatch):
        loss.backward()
    assert layer.weight.grad is not None
    assert hidden.grad is not None
    return [layer.weight.grad, hidden.grad]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "nothing preserved"])
def test_a_layer_that_runs_again_draws_what_it_drew(way: str, twice: bool) -> None:
    found = gradients(way, twice=twice, detours=True)
    assert all(map(torch.equal, found, gradients("plain", twice=twice)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_code_around_layers_that_runs_again_draws_what_it_drew(use_reentrant: bool) -> None:
    def gradient(call: Callable[..., Tensor]) -> Tensor | None:
        draws, hidden = Draws(SEED), hidden_states()
        layers, microbatch = [Noisy(draws, number) for number in range(2)], draws.microbatch(1, 0)

        def body(given: Tensor) -> Tensor:
            for layer in layers:
                given = torch.tanh(layer(given * torch.rand(8)) * torch.rand(8))
            return given

        loss = of_step(draws, microbatch, lambda: call(body, hidden).square().sum())
        disturb(draws)
        with draws.of(microbatch):
            loss.backward()
        return hidden.grad

    found = gradient(partial(checkpoint, use_reentrant=use_reentrant))
    expected = gradient(lambda body, hidden: body(hidden))
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


class Copying(torch.autograd.graph.saved_tensors_hooks):
    """Keeps copies of saved tensors, as checkpointing with offloading does."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor.clone(), lambda tensor: tensor.clone())


def test_a_layer_whose_input_was_kept_elsewhere_draws_what_it_drew() -> None:
    found = gradients("not reentrant", Copying)
    assert all(map(torch.equal, found, gradients("plain")))


def test_in_the_backward_of_a_whole_batch_a_copied_input_is_known() -> None:
    draws = Draws(SEED)
    layer, hidden = Noisy(draws), hidden_states()
    with draws.of(draws.microbatch(1, 0)), Copying():
        loss = checkpoint(layer, hidden * 2, use_reentrant=False).square().sum()
    with draws.of_latest():
        loss.backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, gradients("plain")[1])


def test_of_several_calls_with_inputs_that_were_kept_elsewhere_none_is_guessed() -> None:
    with pytest.raises(ModelError, match=r"layer 0 runs again .* of its 2 calls .*recompute: true"):
        gradients("not reentrant", Copying, twice=True)


@pytest.mark.follows(
    "otherwise switch gradient checkpointing off for the coordinator's layers, and write "
    "`recompute: true` into the plan",
)
def test_of_several_calls_with_one_input_none_is_guessed() -> None:
    draws = Draws(SEED)
    layer, microbatch, hidden = Noisy(draws), draws.microbatch(1, 0), hidden_states()
    with draws.of(microbatch):
        loss = sum(checkpoint(layer, hidden, use_reentrant=False).sum() for _ in range(2))
        with pytest.raises(ModelError, match="of its 2 calls"):
            loss.backward()
        torch.stack([layer(hidden).sum() for _ in range(2)]).sum().backward()


def test_a_backward_behind_the_step_finds_the_latest_call() -> None:
    """Under manual optimization anything may call `backward` at any time."""
    draws = Draws(SEED)
    layer, hidden = Noisy(draws), hidden_states()
    with draws.of(draws.microbatch(1, 0)):
        kept = checkpoint(layer, hidden * 2, use_reentrant=False, preserve_rng_state=False)
        loss = kept.square().sum()
    outside = checkpoint(layer, hidden * 3, use_reentrant=False).square().sum()
    before = torch.get_rng_state()
    loss.backward()
    assert hidden.grad is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(hidden.grad, gradients("plain")[1])
    # That one drew from the stream around it, and does so again.
    outside.backward()
