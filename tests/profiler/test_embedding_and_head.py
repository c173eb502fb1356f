"""Whether the embedding may leave: its class and place, and its use by the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.model.layer_call import expected_result
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.profiler import embedding_and_head
from lightning_hetero.profiler.embedding_and_head import embedding_to_leave

from ..models import TinyModule
from .dry_runs import OfFamily, running


def may_leave(module: TinyModule) -> bool:
    """What the profiler finds for a module in a Trainer."""
    layers = find_decoder_layers(module)
    embedding = embedding_to_leave(module, layers)
    if embedding is None:
        return False
    with running(module) as (runner, batch):
        return runner.only_layers_read(embedding, batch)


class Reading(TinyModule):
    """Uses the embedding's output in the loss too."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        given: list[Tensor] = []
        embedding = self.model.get_input_embeddings()
        embedding.register_forward_hook(lambda _module, _args, output: given.append(output))
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + given[0].square().mean()


class Twice(TinyModule):
    """Calls the embedding by itself too."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.model.get_input_embeddings()(batch["input_ids"])
        return loss


class Scaled(TinyModule):
    """Changes the embedding's output in place before the layers."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.model.get_input_embeddings()(batch["input_ids"])
        with torch.no_grad():
            hidden.mul_(2)
        loss: Tensor = self.model(inputs_embeds=hidden, labels=batch["labels"]).loss
        return loss


class Penalized(TinyModule):
    """Reads the weight by itself, frozen or not."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.model.get_input_embeddings().requires_grad_(not is_frozen)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + 0.1 * self.model.get_input_embeddings().weight.norm()


class BesideOthers(TinyModule):
    """Trains something else before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.zeros(1))
        del self._modules["model"]
        self.model = TinyModule().model


def tied() -> TinyModule:
    return TinyModule(tie_word_embeddings=True)


def with_a_hook() -> TinyModule:
    module = TinyModule()
    module.model.enable_input_require_grads()
    return module


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (TinyModule, True),
        (lambda: OfFamily("gemma2", tie_word_embeddings=False), True),
        (lambda: OfFamily("gpt2", tie_word_embeddings=False), False),
        (tied, False),
        (with_a_hook, False),
        (BesideOthers, False),
        (Reading, False),
        (Twice, False),
        (Scaled, False),
        (lambda: Penalized(is_frozen=False), False),
        (lambda: Penalized(is_frozen=True), False),
    ],
)
def test_an_embedding_leaves_that_only_the_first_layer_reads(
    build: Callable[[], TinyModule], expected: bool
) -> None:
    assert may_leave(build()) is expected


def test_looking_leaves_no_hook_and_no_gradient() -> None:
    module = TinyModule()
    embedding = module.model.get_input_embeddings().requires_grad_(False)
    assert may_leave(module)
    assert not embedding._forward_hooks
    assert not embedding.weight.requires_grad
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.fixture
def layers_tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers whose form of result was searched for; each search takes half a second."""
    tried = []

    def slow(layer: Any, call: Any, *rest: Any) -> Any:
        tried.append(call.layer_index)
        time.sleep(0.5)
        return expected_result(layer, call, *rest)

    monkeypatch.setattr(embedding_and_head, "expected_result", slow)
    return tried


def test_forms_of_results_are_found_once_and_not_timed(layers_tried: list[int]) -> None:
    """A training finds them in its first micro-batch; they took 40 times as long as the calls."""
    with running(TinyModule()) as (runner, batch):
        seconds = runner.calling_seconds(batch, num_runs=5)
    assert layers_tried == [*range(5)]
    assert 0 < seconds < 0.5


def test_times_of_the_ends_have_no_search_for_forms(layers_tried: list[int]) -> None:
    """The search for the first layer's form was in the embedding's time: 6.5 ms in place of 0.5."""
    with running(TinyModule()) as (runner, batch):
        found = runner.measure(batch, patience_seconds=0.0)
    assert layers_tried == [*range(5)]
    for part, measured in found.items():
        assert 0 < measured.forward_seconds < 0.5, part
