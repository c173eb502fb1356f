from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.errors import ModelError
from lightning_hetero.model.halves import (
    absent_in,
    cut_layers,
    half_of,
    in_tree,
    is_second_half,
    join_layers,
)
from lightning_hetero.model.kinds import kinds_of_layers
from lightning_hetero.model.layers import DecoderLayer, find_decoder_layers
from lightning_hetero.model.recipe import Recipe, build_layers, write_recipe

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


def test_the_cut_is_where_the_attention_has_been_added() -> None:
    first, second, *_ = halves_of(tiny_model("gemma2"))
    assert names_in(first) == {"self_attn", "input_layernorm", "post_attention_layernorm"}
    assert names_in(second) == {"mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"}


def test_joined_layers_are_as_before() -> None:
    model = tiny_llama(2)
    before = [vars(layer).keys() for layer in model.model.layers]
    halves_of(model)
    assert all("forward" in vars(layer) for layer in model.model.layers)
    join_layers(model)
    assert [vars(layer).keys() for layer in model.model.layers] == before


def test_what_has_not_come_back_stays_cut() -> None:
    model = tiny_llama(2)
    halves = halves_of(model)
    halves[1].module.forward = halves[1].module.forward  # as a hollow one has
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


@pytest.mark.parametrize(
    ("change", "fault"),
    [
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
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_layers_of_ones_own_are_not_cut() -> None:
    with pytest.raises(ModelError, match="none of transformers' layers"):
        cut_layers([DecoderLayer("blocks.0", Own())])


@pytest.mark.parametrize("family", ["gpt_neox", "falcon", "phi"])
def test_attention_and_perceptron_side_by_side_are_not_cut(family: str) -> None:
    with pytest.raises(ModelError, match="cannot be cut behind its attention"):
        halves_of(tiny_model(family))
