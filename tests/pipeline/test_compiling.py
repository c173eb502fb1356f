"""Compiled stages compute the same results, also in recomputed forwards and with adapters.

The backend of these tests traces forward and backward, and skips the C++ compiler.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import Activation, Gradients, Surroundings
from lightning_hetero.pipeline.layer_runs import CompiledLayers
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.stage import Stage

from ..pairwise import keeping

BACKEND = "aot_eager"
CONFIG = LlamaConfig(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_hidden_layers=1,
    attention_dropout=0.5,
    attn_implementation="eager",
)


@dataclass
class Noted(CompiledLayers):
    """Notes for which layers it was asked."""

    asked: list[nn.Module] = field(default_factory=list)

    def of(self, layer: nn.Module) -> Callable[..., Any]:
        self.asked.append(layer)
        return super().of(layer)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch.compiler.reset()


def llama_layers() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"0": LlamaDecoderLayer(CONFIG, 0)})


def lora_layers() -> nn.ModuleDict:
    from peft import LoraConfig, inject_adapter_in_model

    layers = llama_layers()
    torch.manual_seed(1)
    config = LoraConfig(
        target_modules=["q_proj", "up_proj"], lora_dropout=0.5, init_lora_weights=False
    )
    inject_adapter_in_model(config, layers)
    return layers


def surroundings(hidden: Tensor, grad_enabled: bool = True, collect: Any = ()) -> Surroundings:
    positions = torch.arange(hidden.shape[1])[None]
    tables = LlamaRotaryEmbedding(CONFIG)(hidden, positions)
    call = LayerCall(0, grad_enabled, (), {"position_embeddings": tables})
    return Surroundings(grad_enabled, None, [call], collect)


def train(stage: Stage, sizes: list[tuple[int, int]]) -> list[Tensor]:
    """The outputs, and all gradients, of some micro-batches."""
    found = []
    for index, (samples, length) in enumerate(sizes):
        hidden = torch.linspace(-1, 1, samples * length * 16).reshape(samples, length, 16)
        activation = Activation(hidden.requires_grad_())
        output = stage.forward(Key(index), activation, surroundings(hidden)).hidden
        [gradient] = stage.backward(Key(index), Gradients((torch.sin(output.detach()),))).tensors
        assert gradient is not None
        found += [output.detach(), gradient]
    return found + [p.grad for p in stage.layers.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("make", "recompute"),
    keeping([(lora_layers, True)], [(llama_layers, False), (lora_layers, True)]),
    ids=["", "lora recompute"],
)
def test_numbers_are_those_of_layers_that_are_not_compiled(
    make: Callable[[], nn.ModuleDict], recompute: bool
) -> None:
    layers, device = make(), torch.device("cpu")
    plain = Stage(copy.deepcopy(layers), device, 1, recompute, seed=3)
    noted = Noted(BACKEND)
    compiled = Stage(layers, device, 1, recompute, seed=3, compiled=noted)
    # The last micro-batch of a batch may be smaller, and the next batch's sequences longer.
    sizes = [(2, 5), (1, 7)]
    for found, expected in zip(train(compiled, sizes), train(plain, sizes), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert set(noted.asked) == set(layers.values())


def test_what_is_watched_from_inside_is_not_compiled() -> None:
    noted = Noted(BACKEND)
    stage = Stage(llama_layers(), torch.device("cpu"), 1, compiled=noted)
    hidden = torch.ones(1, 2, 16)
    with torch.no_grad():
        stage.forward(Key(0), Activation(hidden), surroundings(hidden, False, ["attentions"]))
        assert noted.asked == []
        stage.forward(Key(1), Activation(hidden), surroundings(hidden, False))
    assert len(noted.asked) == 1
