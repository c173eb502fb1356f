from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from lightning_hetero.errors import ModelError
from lightning_hetero.model.captured_outputs import CollectingHooks
from lightning_hetero.model.half_layers import cut_layers
from lightning_hetero.model.hollow import hold_in_place, let_move
from lightning_hetero.model.layers import (
    DecoderLayer,
    check_layers_stand_alone,
    find_decoder_layers,
)
from lightning_hetero.model.override import ForwardOverride
from lightning_hetero.model.partial_layers import (
    absent_in,
    half_of,
    in_tree,
    is_half_with_experts,
    is_second_half,
    join_layers,
)
from lightning_hetero.model.recipe import Recipe, build_layers, write_recipe
from lightning_hetero.profiler.measured_model import kinds_of_layers

from ..families import tiny_model
from ..models import tiny_llama


def halves_of(model: nn.Module) -> list[DecoderLayer]:
    return cut_layers(find_decoder_layers(model))


def names_in(half: DecoderLayer) -> set[str]:
    return {name.partition(".")[0] for name, _ in half.module.named_parameters()}


def tokens() -> Tensor:
    return torch.arange(12).view(2, 6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "opt", "mixtral"])
def test_halves_share_out_the_layers_children_and_compute_its_bits(family: str) -> None:
    model = tiny_model(family).eval()
    layers = find_decoder_layers(model)
    with torch.no_grad():
        expected = model(tokens()).logits
        halves = cut_layers(layers)
        assert torch.equal(model(tokens()).logits, expected)
    for layer, first, second in zip(layers, halves[::2], halves[1::2], strict=True):
        assert first.name == second.name == layer.name
        assert type(first.module) is type(second.module) is type(layer.module)
        assert not names_in(first) & names_in(second)
        assert names_in(first) | names_in(second) == names_in(layer)
        assert is_second_half(second.module)
        assert not is_second_half(first.module)


def test_the_experts_of_a_mixture_are_in_the_second_half() -> None:
    mixed = tiny_model("qwen3_moe", mlp_only_layers=[1])
    whole = [layer.module for layer in find_decoder_layers(mixed)]
    assert not any(map(is_half_with_experts, whole))
    marks = [is_half_with_experts(half.module) for half in halves_of(mixed)]
    # Layer 1 has no experts.
    assert [number for number, mark in enumerate(marks) if mark] == [
        2 * number + 1 for number in range(len(whole)) if number != 1
    ]
    assert not any(is_half_with_experts(half.module) for half in halves_of(tiny_model("llama")))
    assert is_half_with_experts(halves_of(tiny_model("mixtral"))[1].module)


def test_the_cut_is_where_the_attention_has_been_added() -> None:
    first, second, *_ = halves_of(tiny_model("gemma2"))
    assert names_in(first) == {"self_attn", "input_layernorm", "post_attention_layernorm"}
    assert names_in(second) == {"mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"}


def test_a_layer_whose_attention_returns_no_tuple_is_cut_too() -> None:
    config = Qwen3NextConfig(
        num_hidden_layers=4, hidden_size=8, intermediate_size=8, num_experts=2, vocab_size=16
    )
    with torch.device("meta"):
        model = Qwen3NextForCausalLM(config)
    halves = halves_of(model)
    assert names_in(halves[0]) == {"linear_attn", "input_layernorm"}
    assert names_in(halves[6]) == {"self_attn", "input_layernorm"}


def test_joined_layers_are_as_before() -> None:
    model = tiny_llama(2)
    before = [vars(layer).keys() for layer in model.model.layers]
    halves_of(model)
    assert all("forward" in vars(layer) for layer in model.model.layers)
    join_layers(model)
    assert [vars(layer).keys() for layer in model.model.layers] == before


def test_halves_follow_the_plain_attributes_of_their_layer() -> None:
    model = tiny_llama(2)
    layer = model.model.layers[0]
    layer.note, layer.gone = [1], 2
    first, second, *_ = (half.module for half in cut_layers(find_decoder_layers(model)))
    layer.note, layer.added = [2], 3
    del layer.gone
    model(torch.ones(1, 3, dtype=torch.long))
    for half in (first, second):
        assert (half.note, half.added, hasattr(half, "gone")) == ([2], 3, False)
        assert "forward" not in vars(half)


def test_what_has_not_come_back_stays_cut() -> None:
    model = tiny_llama(2)
    halves = halves_of(model)
    ForwardOverride(halves[1].module).put_on()  # like that of a hollow layer
    join_layers(model)
    assert ["forward" in vars(layer) for layer in model.model.layers] == [True, False]
    again = halves_of(model)
    assert [half.module for half in again[:2]] == [half.module for half in halves[:2]]
    assert all(half.module not in [h.module for h in halves] for half in again[2:])


def test_a_half_stands_for_its_children_and_a_whole_layer_for_itself() -> None:
    model = tiny_llama(1)
    layer = model.model.layers[0]
    first, second = (half.module for half in halves_of(model))
    assert in_tree(layer) == [layer]
    assert {*in_tree(first)} == {layer.self_attn, layer.input_layernorm}
    assert {*in_tree(second)} == {layer.mlp, layer.post_attention_layernorm}
    assert not absent_in(layer)


def test_halves_have_two_kinds_in_all() -> None:
    names = kinds_of_layers(halves_of(tiny_llama(3)), first_wants_gradient=True)
    assert names == 3 * ["LlamaDecoderLayer-attention", "LlamaDecoderLayer-rest"]


def test_a_recipe_builds_halves() -> None:
    model = tiny_llama(2)
    halves = dict(enumerate(halves_of(model)))
    recipe = Recipe.from_json(write_recipe(model, [*halves.items()][1:3]).to_json())
    built = build_layers(recipe)
    assert {*built} == {"1", "2"}
    for number, half in built.items():
        expected = halves[int(number)].module
        assert absent_in(half) == absent_in(expected)
        assert {*half.state_dict()} == {*expected.state_dict()}


def test_a_layer_cannot_be_without_children_that_it_does_not_have() -> None:
    with pytest.raises(ModelError, match=r"has no children \['norm'\]"):
        half_of(tiny_llama(1).model.layers[0], {"norm": False})


class Own(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


def with_hook(layer: Any) -> None:
    layer.register_forward_hook(lambda *_: None)


def with_checkpointing(layer: Any) -> None:
    layer.gradient_checkpointing = True


def with_tensor(layer: Any) -> None:
    layer.scale = nn.Parameter(torch.ones(1))


def with_shared(layer: Any) -> None:
    layer.post_attention_layernorm.weight = layer.input_layernorm.weight


def with_tied(layer: Any) -> None:
    layer.post_attention_layernorm.weight.data = layer.input_layernorm.weight.data


def with_patch(layer: Any) -> None:
    layer.forward = layer.forward


def with_idle_child(layer: Any) -> None:
    layer.other_mlp = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (with_patch, "a `forward` of its own"),
        (with_idle_child, "or this cannot be checked"),
        (with_tied, "shares a tensor"),
        (with_hook, "has a hook"),
        (with_checkpointing, "gradient checkpointing on"),
        (with_tensor, "a tensor of its own, 'scale'"),
        (with_shared, "shares a tensor"),
    ],
)
def test_what_cannot_be_cut_is_refused_and_left_alone(change: Any, fault: str) -> None:
    model = tiny_llama(2)
    change(model.model.layers[1])
    with pytest.raises(ModelError, match=fault):
        halves_of(model)
    assert "forward" not in vars(model.model.layers[0])


class Mine(LlamaForCausalLM):
    """A model that workers do not know."""


@pytest.mark.follows(
    "so workers cannot build halves of it. Leave out `cut_layers`.",
)
def test_halves_in_a_model_that_workers_do_not_know_are_refused() -> None:
    model = Mine(tiny_llama(2).config)
    halves = list(enumerate(halves_of(model)))
    with pytest.raises(ModelError, match="in no model of a class of transformers"):
        write_recipe(model, halves)
    model = Mine(tiny_llama(2).config)
    described = write_recipe(model, list(enumerate(find_decoder_layers(model)))).to_json()
    assert len(build_layers(Recipe.from_json(described))) == 2


def test_a_recipe_with_a_half_outside_its_layers_is_refused() -> None:
    model = tiny_llama(2)
    recipe = write_recipe(model, list(enumerate(halves_of(model)))[:2])
    with pytest.raises(ModelError, match="a half 9 that is not among its layers"):
        build_layers(msgspec.structs.replace(recipe, absent={9: {"mlp": False}}))


def gathering_model() -> GPTNeoForCausalLM:
    """It gathers hidden states and attentions by itself."""
    config = GPTNeoConfig(
        vocab_size=16, hidden_size=8, num_layers=2, num_heads=2, attention_types=[[["global"], 2]]
    )
    model = GPTNeoForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.follows(
    "call it without output_hidden_states, or leave out `cut_layers`",
)
def test_hidden_states_that_a_model_gathers_between_halves_are_refused() -> None:
    model = gathering_model()
    names = [half.name for half in halves_of(model)]
    hooks = CollectingHooks(model, names, are_cut=True)
    model(tokens(), output_attentions=True)
    for as_dict in (True, False):
        with pytest.raises(ModelError, match="between halves of layers there are others"):
            model(tokens(), output_hidden_states=True, return_dict=as_dict)
    hooks.remove()
    assert len(model(tokens(), output_hidden_states=True).hidden_states) == 3


def test_further_results_of_a_layer_come_from_either_half() -> None:
    model = gathering_model()
    expected = model(tokens(), output_attentions=True).attentions
    halves_of(model)
    found = model(tokens(), output_attentions=True).attentions
    assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))


def test_two_layers_with_a_child_in_common_are_held_in_place_and_let_go() -> None:
    model = tiny_llama(2)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    halves = halves_of(model)
    for half in halves:
        hold_in_place(half.module)
    model.to(torch.float64)
    assert model.lm_head.weight.dtype == torch.float64
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    for half in halves:
        let_move(half.module)
    assert model.to(torch.float64).model.layers[0].mlp.up_proj.weight.dtype == torch.float64


def test_a_tensor_of_a_half_that_another_stage_has_is_refused() -> None:
    model = tiny_llama(2)
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    halves = halves_of(model)
    check_layers_stand_alone(model, [[*halves]])
    with pytest.raises(ModelError, match="is shared as"):
        check_layers_stand_alone(model, [halves[:3]])


def test_layers_outside_transformers_are_not_cut() -> None:
    with pytest.raises(ModelError, match="is not a layer of transformers"):
        cut_layers([DecoderLayer("blocks.0", Own())])


@pytest.mark.parametrize("family", ["gpt_neox", "falcon", "phi"])
def test_attention_and_perceptron_side_by_side_are_not_cut(family: str) -> None:
    with pytest.raises(ModelError, match="cannot be cut behind its attention"):
        halves_of(tiny_model(family))
