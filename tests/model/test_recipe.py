"""What a worker builds from a recipe is what the coordinator has, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    ViTConfig,
    ViTModel,
)

from lightning_hetero.errors import ModelError
from lightning_hetero.model import wings
from lightning_hetero.model.adapters import Adapters
from lightning_hetero.model.allowed_imports import Allowed
from lightning_hetero.model.captured_outputs import is_collecting
from lightning_hetero.model.custom_layers import BlocksRecipe, describe_blocks
from lightning_hetero.model.hf_config import plain_config
from lightning_hetero.model.layers import DecoderLayer, find_decoder_layers
from lightning_hetero.model.recipe import Recipe, build_layers, joined, write_recipe

from ..models import tiny_llama

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 31,
}


def llama() -> PreTrainedModel:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    return LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=rope, attention_bias=True))


def qwen2() -> PreTrainedModel:
    config = Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    return Qwen2ForCausalLM(config)


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=3, n_head=4, vocab_size=31))


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4))


FAMILIES = [llama, qwen2, gpt2, mistral]


class Module(nn.Module):
    """Stands in for the LightningModule around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model


def numbered(root: nn.Module, start: int = 1, end: int = 3) -> list[tuple[int, DecoderLayer]]:
    return list(enumerate(find_decoder_layers(root)))[start:end]


def recipe(**changes: Any) -> Recipe:
    root = Module(tiny_llama(3))
    return replace(write_recipe(root, numbered(root)), **changes)


def with_config(**changes: Any) -> Recipe:
    return recipe(config={**recipe().config, **changes})


def tensors(layer: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    named = [*layer.named_parameters(), *layer.named_buffers()]
    return {name: (tensor.shape, tensor.dtype) for name, tensor in named}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_built_are_those_of_the_original(family: Any) -> None:
    root = Module(family())
    originals = numbered(root)
    built = build_layers(Recipe.from_json(write_recipe(root, originals).to_json()))
    assert list(built) == ["1", "2"]
    for number, layer in originals:
        found = built[str(number)]
        assert type(found) is type(layer.module)
        assert tensors(found) == tensors(layer.module)
        assert str(found) == str(layer.module)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_built_layers_compute_as_the_originals_do(family: Any, attention: str) -> None:
    model = family().eval()
    model.set_attn_implementation(attention)
    tokens = torch.arange(20).reshape(2, 10)
    expected = model(tokens, use_cache=False).logits
    originals = numbered(model)
    built = build_layers(write_recipe(model, originals))
    for number, layer in originals:
        found = built[str(number)].to_empty(device="cpu").eval()
        found.load_state_dict(layer.module.state_dict())
        parent, _, name = layer.name.rpartition(".")
        model.get_submodule(parent)[int(name)] = found
    torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, rtol=0, atol=0)


def test_built_layers_collect_what_transformers_collects() -> None:
    for layer in build_layers(recipe()).values():
        hooks = [hook for m in layer.modules() for hook in m._forward_hooks.values()]
        assert len(list(filter(is_collecting, hooks))) == 2  # hidden states and attentions


def test_building_takes_no_memory_for_weights() -> None:
    built = build_layers(with_config(hidden_size=2**17, intermediate_size=2**18))
    assert all(parameter.is_meta for parameter in built.parameters())


def test_paths_are_those_inside_the_model_wherever_it_is() -> None:
    root = Module(Module(tiny_llama(3)))
    found = write_recipe(root, numbered(root))
    assert found.model_class == "LlamaForCausalLM"
    assert found.layers == {1: "model.layers.1", 2: "model.layers.2"}
    bare = tiny_llama(3)
    assert write_recipe(bare, numbered(bare)) == found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recipe_survives_its_way_as_json(family: Any) -> None:
    root = Module(family())
    written = write_recipe(root, numbered(root))
    assert Recipe.from_json(written.to_json()) == written
    assert json.loads(written.to_json())["model_class"] == type(root.net).__name__


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        "{}",
        '{"model_class": 1, "config": {}, "attention": "sdpa", "layers": {}}',
        '{"model_class": "X", "config": [], "attention": "sdpa", "layers": {}}',
        '{"model_class": "X", "config": {}, "attention": "sdpa", "layers": {"a": "b"}}',
    ],
)
def test_text_that_is_no_recipe_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="recipe cannot be read"):
        Recipe.from_json(text)


@pytest.mark.parametrize(
    "name",
    ["NoSuchModel", "LlamaConfig", "AutoModelForCausalLM", "pipeline", "torch", "__doc__", ""],
)
def test_a_name_that_is_not_a_model_class_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="no model class"):
        build_layers(recipe(model_class=name))


@pytest.mark.parametrize(
    "attention", ["kernels-community/flash-attn3", "someone/evil", "paged|sdpa", "", "other"]
)
def test_an_attention_that_would_fetch_a_kernel_is_refused(attention: str) -> None:
    with pytest.raises(ModelError, match="not allowed on a worker"):
        build_layers(recipe(attention=attention))


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_an_attention_hidden_in_the_config_is_refused(key: str) -> None:
    with pytest.raises(ModelError, match=f"'{key}' with the value 'someone/evil'"):
        build_layers(with_config(**{key: "someone/evil"}))


def test_a_hub_that_the_users_config_names_stays_at_home() -> None:
    model = tiny_llama(3)
    model.config._name_or_path = "meta-llama/Llama"
    model.config.auto_map = {"AutoModel": "somewhere/else--modeling.Own"}
    model.config.sub = {"vision": [{"backbone": "resnet50", "width": 3}]}
    config = write_recipe(model, numbered(model)).config
    assert config["sub"] == {"vision": [{"width": 3}]}
    assert not {"_name_or_path", "auto_map"} & config.keys()


class ScaledConfig(LlamaConfig):
    """A user's config, with a number that a worker does not take by its name."""

    backbone_scale: float = 1.0


@pytest.mark.follows(
    "transformers downloads models by entries of such names. Rename it, or keep its layers with"
)
@pytest.mark.parametrize("key", ["backbone_scale", "backbone_shift"])
def test_an_entry_that_a_worker_would_have_otherwise_is_refused(key: str) -> None:
    config = ScaledConfig(**SMALL)
    plain_config(config)
    setattr(config, key, 2.0)
    with pytest.raises(ModelError, match=f"'{key}' of a ScaledConfig has the value 2.0"):
        plain_config(config)
    renamed = ScaledConfig(**SMALL)
    renamed.own_scale = 2.0
    assert plain_config(renamed)["own_scale"] == 2.0


def test_an_entry_that_no_layer_of_transformers_reads_is_left_out() -> None:
    config = LlamaConfig(**SMALL)
    config.backbone_scale = 2.0
    assert "backbone_scale" not in plain_config(config)


def test_parameters_are_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Module(llama())
    written = write_recipe(root, numbered(root))
    for name in ("uniform_", "normal_"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, **__: pytest.fail("It was filled."))
    assert all(p.is_meta for p in build_layers(written).parameters())


def test_stages_of_one_model_are_built_together() -> None:
    root, other = Module(llama()), Module(mistral())
    first, second = numbered(root, 0, 1), numbered(root, 1, 3)
    whole, apart = joined(
        [
            write_recipe(root, first),
            write_recipe(root, second),
            write_recipe(other, numbered(other)),
        ]
    )
    assert whole == write_recipe(root, [*first, *second])
    assert apart == write_recipe(other, numbered(other))
    with_adapters = replace(whole, adapters=Adapters({}, []))
    assert joined([with_adapters, whole]) == [with_adapters, whole]


@pytest.mark.follows("lacks `model.layer_code`; install the whole package on the worker.")
def test_code_that_one_end_cannot_compare_is_refused_or_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = Module(llama())
    first, second = numbered(root, 0, 1), numbered(root, 1, 3)
    compared = write_recipe(root, first)
    build_layers(compared)
    with monkeypatch.context() as patch:
        patch.setattr(wings, "has_wing", lambda _: False)
        with pytest.raises(ModelError, match="cannot compare the code of its layers"):
            build_layers(compared)
        with pytest.warns(UserWarning, match="Nothing compares the code of layers here"):
            recipes = [write_recipe(root, first), write_recipe(root, second)]
        (whole,) = joined(recipes)
        assert whole.code is None
        build_layers(whole)
        blocks = [(0, DecoderLayer("own", nn.Linear(2, 2)))]
        with pytest.warns(UserWarning, match="Nothing compares the code of layers here"):
            own = describe_blocks(blocks)
        build_layers(own)
    # As at a worker that could compare them.
    assert all(build_layers(Recipe.from_json(each.to_json())) for each in (whole, own))
    with pytest.raises(ModelError, match="The code of another function is not the same"):
        build_layers(replace(own, code={"another function": "1"}))


def test_labels_are_the_users_own_words() -> None:
    labels = {0: "backbone", 1: "num_1"}
    model = LlamaForSequenceClassification(
        LlamaConfig(**SMALL, id2label=labels, label2id={"backbone": 99_999, "num_1": -1})
    )
    built = build_layers(write_recipe(model, numbered(model)))
    assert built["1"].self_attn.config.label2id == {"backbone": 99_999, "num_1": -1}


def test_the_decoder_inside_a_model_of_several_models_is_built() -> None:
    vision = {"model_type": "clip_vision_model", **SMALL, "image_size": 8, "patch_size": 4}
    text = {"model_type": "llama", **SMALL}
    config = LlavaConfig(text_config=text, vision_config=vision)
    model = LlavaForConditionalGeneration(config)
    layers = list(enumerate(find_decoder_layers(model, "model.language_model.layers")))
    written = write_recipe(model, layers)
    assert written.model_class == "LlamaModel"
    built = build_layers(Recipe.from_json(written.to_json()))
    assert tensors(built["0"]) == tensors(layers[0][1].module)


def test_layers_of_another_model_are_described_like_the_users_own() -> None:
    model = ViTModel(ViTConfig(**{**SMALL, "num_hidden_layers": 2}, image_size=8, patch_size=4))
    layers = list(enumerate(find_decoder_layers(model)))
    written = write_recipe(model, layers)
    assert isinstance(written, BlocksRecipe)
    built = build_layers(written)
    assert tensors(built["1"]) == tensors(layers[1][1].module)


def test_an_endless_float_in_a_config_arrives() -> None:
    config = Mamba2Config(
        hidden_size=16, num_heads=4, head_dim=8, n_groups=1, num_hidden_layers=3, vocab_size=31
    )
    assert config.time_step_limit[1] == float("inf")
    model = Mamba2ForCausalLM(config)
    built = build_layers(Recipe.from_json(write_recipe(model, numbered(model)).to_json()))
    assert tuple(built["1"].mixer.time_step_limit) == config.time_step_limit


@pytest.mark.parametrize("number", [0, -1, 1025, 10**9, "3", None, 2.0])
def test_an_absurd_number_of_layers_is_refused(number: Any) -> None:
    with pytest.raises(ModelError, match="num_hidden_layers"):
        build_layers(with_config(num_hidden_layers=number))


def test_an_absurd_number_inside_the_config_is_refused() -> None:
    with pytest.raises(ModelError, match="num_experts is 100000; a count must be .* 0 to 16384"):
        build_layers(with_config(text_config={"num_experts": 100_000}))


def test_an_absurd_number_of_layers_is_refused_under_a_familys_own_name() -> None:
    root = gpt2()
    written = write_recipe(root, numbered(root))
    with pytest.raises(ModelError, match="layer"):
        build_layers(replace(written, config={**written.config, "n_layer": 5000}))


def test_a_path_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ModelError, match="LlamaForCausalLM has no such layer"):
        build_layers(recipe(layers={0: "model.layers.17"}))


class MyLlama(LlamaForCausalLM):
    """A user's subclass, which no worker has."""


def test_layers_that_transformers_cannot_build_are_described() -> None:
    plain = nn.Module()
    plain.blocks = nn.ModuleList([nn.Linear(2, 2)])
    own_class = Module(MyLlama(tiny_llama(2).config))
    own_layer = Module(tiny_llama(2))
    own_layer.net.model.layers[0] = nn.Linear(2, 2)
    for root, choice in [(plain, "blocks"), (own_class, None), (own_layer, "net.model.layers.0")]:
        layers = list(enumerate(find_decoder_layers(root, choice)))
        assert isinstance(write_recipe(root, layers), BlocksRecipe)


def test_described_layers_of_a_hugging_face_model_compute_as_the_originals_do() -> None:
    model = MyLlama(tiny_llama(2).config).eval()
    tokens = torch.arange(20).reshape(2, 10)
    expected = model(tokens, use_cache=False).logits
    originals = numbered(model, 0, 2)
    written = Recipe.from_json(write_recipe(model, originals).to_json())
    built = build_layers(written, Allowed(tuple(written.imports)))
    for number, layer in originals:
        found = built[str(number)].to_empty(device="cpu").eval()
        found.load_state_dict(layer.module.state_dict())
        model.model.layers[number] = found
    torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, rtol=0, atol=0)
