"""A model with hollow layers, and the place in this process that computes for them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lightning_hetero.model.captured_outputs import CollectingHooks, collect_embedded, collecting
from lightning_hetero.model.hollow import Exchange, HollowLayers
from lightning_hetero.model.layer_call import LayerCall, put_hidden, tensors_of
from lightning_hetero.model.layers import EMBEDDING_LAYER, find_decoder_layers, find_embedding
from lightning_hetero.model.tensors import named_tensors, set_tensor
from lightning_hetero.pipeline.boundary import Surroundings
from lightning_hetero.pipeline.stage import Along, StageCaches

from ..models import VOCABULARY, tiny_llama

AWAY = range(1, 4)


class Elsewhere:
    """Copies of the layers in this process: computes for them, and keeps their tensors."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self.layers = copy.deepcopy(dict(layers))
        self.calls: list[list[LayerCall]] = []
        self.caches = StageCaches()
        self.fetched: list[list[str]] = []

    def exchange(
        self,
        hidden: Tensor,
        calls: list[LayerCall],
        collect: list[str],
        carried: Mapping[str, Tensor],
    ) -> tuple[Tensor, list[tuple[str, Tensor]]]:
        self.calls.append(calls)
        around = Surroundings(torch.is_grad_enabled(), None, calls, collect)
        around = replace(
            around,
            passes=around.passes_behind(self.layers),
            entering=around.name_before(self.layers),
        )
        along = Along(hidden, carried, around)
        with collecting(collect) as collected:
            for call in map(along.fill, calls):
                layer = self.layers[call.layer_index].train(call.training)
                args, kwargs = self.caches.arguments(call, layer, hidden)
                args, kwargs = put_hidden(hidden, args, kwargs, call.place)
                hidden = along.take(tensors_of(layer(*args, **kwargs), layer, call), call)
                if call.layer_index == EMBEDDING_LAYER:
                    collect_embedded(hidden)
        return hidden, [*collected(), *along.leaving()]

    def fetch(self, names: Sequence[str]) -> dict[str, Tensor]:
        tensors = dict(named_tensors(self.layers))
        self.fetched.append(list(names))
        return {name: tensors[name].detach().clone() for name in names}

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        for name, content in tensors.items():
            set_tensor(self.layers, name, content.clone())

    def everything(self) -> dict[str, Tensor]:
        return self.fetch([name for name, _ in named_tensors(self.layers)])


class Hollowed:
    """A model whose layers 1 to 3, or others, are hollow, and where they went."""

    def __init__(
        self,
        model: PreTrainedModel,
        exchange: Exchange | None = None,
        away: range = AWAY,
        kept: Collection[int] = (),
    ) -> None:
        self.model = model
        layers = find_decoder_layers(model)
        chosen = {number: layers[number] for number in away if number != EMBEDDING_LAYER}
        if EMBEDDING_LAYER in away:
            chosen = {EMBEDDING_LAYER: find_embedding(model, layers), **chosen}
        self.collecting = CollectingHooks(model, [layer.name for layer in chosen.values()])
        self.layers = {number: layer.module for number, layer in chosen.items()}
        self.elsewhere = Elsewhere(self.layers)
        self.run = HollowLayers(
            chosen, exchange or self.elsewhere.exchange, self.elsewhere, kept=kept
        )
        self.run.caches.listen(model, [layer.name for layer in chosen.values()])
        self.run.hollow()

    def refill(self) -> None:
        self.run.refill(self.elsewhere.everything())
        self.collecting.remove()
        self.run.caches.remove()

    def is_away(self, name: str) -> bool:
        return any(f"layers.{number}." in name for number in AWAY)


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(2))


SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
}


def gpt2() -> PreTrainedModel:
    config = GPT2Config(n_embd=16, n_layer=5, n_head=2, vocab_size=VOCABULARY)
    return GPT2LMHeadModel(config)


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=3))


def qwen2() -> PreTrainedModel:
    config = Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=3, max_window_layers=2)
    return Qwen2ForCausalLM(config)


FAMILIES = [lambda: tiny_llama(5), gpt2, mistral, qwen2]
FAMILY_NAMES = ["llama", "gpt2", "mistral", "qwen2"]
