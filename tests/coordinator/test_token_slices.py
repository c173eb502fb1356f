"""The coordinator's layers in slices along the tokens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from lightning_hetero import Plan, StagePlan
from lightning_hetero.coordinator.token_slices import TokenSlices
from lightning_hetero.errors import BatchError, ModelError

from ..families import tiny_model
from ..remedies import Act, come_and_follow, follows
from ..storages import StorageCount

NUM_TOKENS = 9
PLAN = Plan([StagePlan(["coordinator"], (0, 1))], 3)


class Layer:
    """A layer of this process, in slices."""

    def __init__(self, family: str = "llama", check: Any = "off") -> None:
        model = tiny_model(family).model
        self.layer = model.layers[0]
        positions = torch.arange(NUM_TOKENS)[None]
        tables = model.rotary_emb(torch.zeros(1), positions)
        self.kwargs = {"position_embeddings": tables, "attention_mask": None}
        self.slices = TokenSlices({0: self.layer}, PLAN, check)
        self.seeds: list[int] = []
        torch.manual_seed(2)
        self.hidden = torch.randn(2, NUM_TOKENS, 16, requires_grad=True)

    def whole(self) -> Tensor:
        return self.layer(self.hidden, **self.kwargs)  # type: ignore[no-any-return]

    def run(self, run: Callable[..., Any] | None = None) -> Any:
        run = self.layer.forward if run is None else run
        return self.slices.run_here(0, run, (self.hidden,), dict(self.kwargs), self.seeds.append)


@pytest.mark.parametrize("check", ["off", "stop"])
def test_a_layer_here_has_the_results_and_gradients_of_the_whole(check: Any) -> None:
    layer = Layer(check=check)
    whole = layer.whole()
    gradient = torch.randn_like(whole)
    inputs = [layer.hidden, *layer.layer.parameters()]
    expected = torch.autograd.grad(whole, inputs, gradient)
    found = layer.run()
    assert layer.seeds == [0, 1, 2]
    torch.testing.assert_close(found, whole)
    gradients = torch.autograd.grad(found, inputs, gradient)
    for mine, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_the_trial_runs_once_for_each_layer() -> None:
    layer, calls = Layer(check="stop"), 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return layer.layer.forward(*args, **kwargs)  # type: ignore[attr-defined]

    layer.run(run)
    first, calls = calls, 0
    layer.run(run)
    # Whole and in two slices, before the three slices of the step.
    assert (first, calls) == (6, 3)


def test_the_trial_refuses_a_layer_that_couples_tokens() -> None:
    layer = Layer(check="stop")

    def run(hidden: Tensor, **kwargs: Any) -> Any:
        mean = hidden.mean(1, keepdim=True)
        return layer.layer.forward(hidden + mean, **kwargs)  # type: ignore[attr-defined]

    with pytest.raises(BatchError, match="Layer 0 .* computes other results for slices"):
        layer.run(run)


def returning(other: Callable[[Tensor], Any]) -> Act:
    def act() -> None:
        layer = Layer()

        def run(*args: Any, **kwargs: Any) -> Any:
            hidden = layer.layer.forward(*args, **kwargs)  # type: ignore[attr-defined]
            return hidden, other(hidden)

        hidden, rest = layer.run(run)
        torch.testing.assert_close(hidden, layer.whole())
        assert rest is None

    return act


def run_again() -> None:
    layer = Layer()
    checkpoint(lambda _: layer.run(), layer.hidden, use_reentrant=False).sum().backward()


def with_recompute(recompute: Any) -> Layer:
    layer = Layer()
    plan = Plan([StagePlan(["coordinator"], (0, 1), recompute)], 3)
    layer.slices = TokenSlices({0: layer.layer}, plan, "off")
    return layer


def calling(*caches: DynamicCache) -> Act:
    """Calls the layer with these caches, one after the other."""

    def act() -> None:
        layer = Layer()
        for each in caches:
            layer.kwargs["past_key_values"] = each
            layer.run()

    return act


def filled() -> DynamicCache:
    found = DynamicCache()
    found.update(torch.ones(2, 1, 3, 8), torch.ones(2, 1, 3, 8), 0)
    return found


def test_a_filled_cache_is_refused() -> None:
    with pytest.raises(ModelError, match="Layer 0 got a key-value cache .* of a prefix"):
        calling(filled())()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        follows(
            "attn_implementation='sdpa'. Use `micro_batching='boundary'`",
            returning(lambda hidden: hidden),
            returning(lambda _: None),
        ),
        follows(
            "Call the model without the cache.",
            calling(*[DynamicCache()] * 2),
            calling(DynamicCache(), DynamicCache()),
        ),
        follows(
            "leave out your own checkpointing, and write `recompute: true` for the layer",
            run_again,
            lambda: with_recompute(True).run().sum().backward(),
        ),
    ],
)
def test_what_is_refused_goes_right_by_its_remedy(
    request: pytest.FixtureRequest, wrong: Act, right: Act
) -> None:
    come_and_follow(request, wrong, right, None)


@pytest.mark.parametrize("recompute", [True, "layers"])
def test_a_layer_that_runs_again_has_the_same_bits(recompute: Any) -> None:
    def step(kind: Any) -> list[Tensor]:
        layer = with_recompute(kind)
        found = layer.run()
        inputs = [layer.hidden, *layer.layer.parameters()]
        return [found, *torch.autograd.grad(found.square().sum(), inputs)]

    expected, found = step(False), step(recompute)
    assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))


def test_a_layer_that_runs_again_keeps_no_graph_and_is_freed() -> None:
    def kept_bytes(recompute: bool) -> int:
        layer = with_recompute(recompute)
        with StorageCount() as count:
            found = layer.run()
        kept, module = count.live_bytes, weakref.ref(layer.layer)
        assert found.requires_grad
        # Without a backward too.
        del layer, found
        gc.collect()
        assert module() is None
        return kept

    assert kept_bytes(True) < 0.5 * kept_bytes(False)
