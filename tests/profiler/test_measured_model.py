from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_hetero.coordinator.dry_run import SampleBatch
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.model.layers import DecoderLayer, find_decoder_layers
from lightning_hetero.pipeline.boundary import Surroundings
from lightning_hetero.profiler.embedding_and_head import Example
from lightning_hetero.profiler.measured_model import (
    Cutting,
    cut_example,
    fingerprint,
    kinds_of_layers,
    wants_gradient,
)

from ..families import CONFIGS, tiny_model
from ..models import tiny_llama


def kinds(model: nn.Module, first_wants_gradient: bool = True) -> list[str]:
    return kinds_of_layers(find_decoder_layers(model), first_wants_gradient)


class Windowed(nn.Module):
    """A layer whose cost is in a plain number."""

    def __init__(self, number: int, window: int | None, heads: int = 2) -> None:
        super().__init__()
        self.layer_number = number
        self.window = window
        self.heads = heads
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def own_kinds(modules: Sequence[nn.Module]) -> list[str]:
    layers = [DecoderLayer(f"blocks.{n}", module) for n, module in enumerate(modules)]
    return kinds_of_layers(layers, first_wants_gradient=True)


@pytest.mark.parametrize("family", [name for name in CONFIGS if not name.startswith("gemma")])
def test_layers_that_differ_in_their_number_are_of_one_kind(family: str) -> None:
    assert len(set(kinds(tiny_model(family)))) == 1


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_kinds_of_attention_are_apart(family: str) -> None:
    names = kinds(tiny_model(family))
    assert names[0].endswith("-sliding_attention")
    assert names[1].endswith("-full_attention")


def test_dense_and_mixture_are_apart() -> None:
    model = tiny_model("qwen3_moe", mlp_only_layers=[1])
    names = kinds(model)
    assert names[0] == names[2] == names[3] != names[1]


def test_what_trains_is_apart_from_what_does_not() -> None:
    model = tiny_llama(4)
    model.model.layers[0].requires_grad_(False)
    assert kinds(model) == ["LlamaDecoderLayer", *["LlamaDecoderLayer-2"] * 3]


def test_a_frozen_layer_without_a_backward_is_apart_from_one_with() -> None:
    model = tiny_llama(3).requires_grad_(False)
    layers = find_decoder_layers(model)
    layers[1].module.requires_grad_(True)
    assert wants_gradient(layers, first=False) == [False, False, True]
    assert len(set(kinds(model, first_wants_gradient=False))) == 3
    assert len(set(kinds(model, first_wants_gradient=True))) == 2


def test_adapters_on_all_layers_leave_one_kind() -> None:
    adapted = get_peft_model(tiny_llama(4), LoraConfig(r=2, task_type="CAUSAL_LM"))
    assert set(kinds(adapted, first_wants_gradient=False)) == {"LlamaDecoderLayer"}


def test_settings_count_and_numbering_does_not() -> None:
    assert own_kinds([Windowed(n, 8) for n in range(3)]) == ["Windowed"] * 3
    windows = [8, None, 8, 16]
    found = own_kinds([Windowed(n, window) for n, window in enumerate(windows)])
    assert found == ["Windowed", "Windowed-2", "Windowed", "Windowed-3"]
    # A setting that happens to be a layer's number is not its number.
    assert own_kinds([Windowed(n, 8, heads=2) for n in range(4)]) == ["Windowed"] * 4


def test_the_same_model_has_the_same_fingerprint_whatever_its_weights() -> None:
    model, other = tiny_llama(3), tiny_llama(3)
    nn.init.normal_(other.model.layers[0].mlp.up_proj.weight)
    prints = {fingerprint(m, find_decoder_layers(m)) for m in (model, other)}
    assert len(prints) == 1


def test_another_model_has_another_fingerprint() -> None:
    frozen = tiny_llama(3)
    frozen.model.embed_tokens.requires_grad_(False)
    models = [
        tiny_llama(3),
        tiny_llama(4),
        frozen,
        tiny_llama(3).bfloat16(),
        tiny_llama(3, attn_implementation="eager"),
        tiny_llama(3, num_key_value_heads=1),
    ]
    prints = {fingerprint(model, find_decoder_layers(model)) for model in models}
    assert len(prints) == len(models)


class Attending(nn.Module):
    """A layer with torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, hidden: Tensor, mask: Tensor | None = None, places: Any = None) -> Tensor:
        found: Tensor = self.attend(hidden, hidden, hidden, attn_mask=mask)[0]
        return found


def examples_of(samples: int, **arguments: Tensor) -> tuple[int, dict[int, Example]]:
    """How a batch of samples of length 5 is cut before the layer, with these arguments of it."""
    call = LayerCall(0, True, (), arguments)
    hidden = torch.empty(samples, 5, 8, device="meta")
    whole = Example({0: hidden}, True, Surroundings(True, None, []), {0: call})
    cutting = Cutting(SampleBatch(None, False, samples), True, None)
    return cut_example(whole, cutting, {0: Attending().to("meta")})


def test_a_mask_of_each_sample_and_head_is_cut_as_the_run_cuts_it() -> None:
    size, found = examples_of(4, mask=torch.zeros(4 * 2, 5, 5))
    assert size == 4
    shapes = {n: tuple(each.calls[0].kwargs["mask"].shape) for n, each in found.items()}
    assert shapes == {1: (2, 5, 5), 2: (4, 5, 5), 4: (8, 5, 5)}
    assert [each.hidden.shape[0] for each in found.values()] == [1, 2, 4]


def test_a_batch_that_the_run_leaves_in_one_piece_counts_as_one_sample() -> None:
    with pytest.warns(UserWarning, match="in one piece.*one row per sample or one per position"):
        size, found = examples_of(5, places=torch.arange(5))
    assert (size, [*found]) == (1, [1])
    assert found[1].hidden.shape == (5, 5, 8)
