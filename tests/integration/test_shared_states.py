"""Layers that share keys and values, and rotations that are complex numbers: as on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import ModelError

from ..equality import differing
from ..families import SIZES, WINDOW, FamilyModule
from ..models import VOCABULARY, fit, loader
from ..plans import plan_of

LAYERS = ["sliding_attention", "full_attention"] * 3
WINDOWED: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": len(LAYERS),
    "head_dim": 8,
    "layer_types": LAYERS,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}


def gemma4(num_shared: int) -> hf.PretrainedConfig:
    return hf.Gemma4TextConfig(**WINDOWED, global_head_dim=8, num_kv_shared_layers=num_shared)


def gemma3n() -> hf.PretrainedConfig:
    sizes = {**WINDOWED, "intermediate_size": [24] * len(LAYERS)}
    return hf.Gemma3nTextConfig(
        **sizes,
        num_kv_shared_layers=2,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * len(LAYERS),
    )


def llama4() -> hf.PretrainedConfig:
    return hf.Llama4TextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        intermediate_size_mlp=24,
        head_dim=8,
        num_local_experts=2,
        moe_layers=[1, 3],
        attention_chunk_size=64,
    )


RIGHT: dict[str, tuple[Callable[[], hf.PretrainedConfig], Sequence[int]]] = {
    "Gemma 4": (lambda: gemma4(0), (1, 3, 2)),
    "Gemma 4 that shares": (lambda: gemma4(2), (4, 1, 1)),
    "Gemma 3n": (gemma3n, (4, 1, 1)),
    "Llama 4": (llama4, (1, 2, 1)),
}


def model_of(make: Callable[[], hf.PretrainedConfig]) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = hf.AutoModelForCausalLM.from_config(make())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model


@pytest.mark.parametrize("name", RIGHT)
def test_a_model_equals_one_device(name: str, workers: list[str]) -> None:
    make, sizes = RIGHT[name]
    plan = plan_of(workers, sizes, 2)
    strategy = HeteroPipelineStrategy(workers[:2], plan)
    found = fit(FamilyModule(model_of(make)), strategy, loader(8, 4))
    plain = fit(FamilyModule(model_of(make)), "auto", loader(8, 2), accumulate_grad_batches=2)
    assert differing(found, plain) == []


@pytest.mark.follows(
    "Give the coordinator layers 0 to … in the plan; those from … on may be on workers.",
)
def test_layers_that_keep_states_for_others_are_refused_with_the_plan_that_works(
    workers: list[str],
) -> None:
    strategy = HeteroPipelineStrategy(workers[:2], plan_of(workers, (1, 3, 2), 2))
    with pytest.raises(
        ModelError, match=r"Give the coordinator layers 0 to 3 in the plan; those f"
    ):
        fit(FamilyModule(model_of(lambda: gemma4(2))), strategy, loader(8, 4))
    strategy = HeteroPipelineStrategy(workers[:2], plan_of(workers, (4, 1, 1), 2))
    found = fit(FamilyModule(model_of(lambda: gemma4(2))), strategy, loader(8, 4))
    whole = FamilyModule(model_of(lambda: gemma4(2)))
    assert differing(found, fit(whole, "auto", loader(8, 2), accumulate_grad_batches=2)) == []
