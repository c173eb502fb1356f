"""Every causal language model of the installed transformers: its layers are found, described, and
built from the description, as a worker builds them. New families come in by themselves."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_hetero.model.layers import find_decoder_layers, without_layers
from lightning_hetero.model.recipe import Recipe, build_layers, write_recipe
from lightning_hetero.model.tensors import named_tensors

# Their layers have to be named by `layers=`.
NOT_FOUND = frozenset(
    {
        "bert-generation",
        "big_bird",
        "biogpt",
        "blenderbot",
        "blenderbot-small",
        "cpmant",
        "ctrl",
        "electra",
        "git",
        "hrm_text",
        "longcat_flash",
        "marian",
        "megatron-bert",
        "mvp",
        "openai-gpt",
        "pegasus",
        "prophetnet",
        "rembert",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm",
        "xlnet",
        "xmod",
    }
)
# Their default configs make no model, or want another package.
NO_DEFAULT = frozenset(
    {
        "cohere_compass_text",
        "dbrx",
        "dots1",
        "gemma3n",
        "gemma4_assistant",
        "gemma4_unified_assistant",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "lfm2_moe",
        "ministral",
        "musicgen",
        "musicgen_melody",
        "nemotron",
        "qwen4_exp",
        "qwen4_exp_text",
        "reformer",
    }
)
NUM_DESCRIBED = 2


class Whole(pl.LightningModule):
    """A model of a family, without content."""

    def __init__(self, family: str) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family]())


@pytest.mark.sweep
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - NO_DEFAULT))
def test_a_worker_builds_the_layers_of_every_family(family: str) -> None:
    module = Whole(family)
    layers = [*enumerate(find_decoder_layers(module))][-NUM_DESCRIBED:]
    if family in NOT_FOUND:
        assert layers == []
        assert "has no decoder layers that could be found" in without_layers(module)
        return
    built = build_layers(Recipe.from_json(write_recipe(module, layers).to_json()))
    found = named_tensors({int(number): layer for number, layer in built.items()})
    expected = named_tensors({number: layer.module for number, layer in layers})
    assert [(n, t.shape) for n, t in found] == [(n, t.shape) for n, t in expected]
    assert len(layers) == NUM_DESCRIBED
