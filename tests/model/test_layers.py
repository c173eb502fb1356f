"""Finding the decoder layers of a module, and refusing those that cannot live apart."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_hetero.errors import ModelError
from lightning_hetero.model.layers import (
    DecoderLayer,
    check_layers_stand_alone,
    find_decoder_layers,
    other_layer_lists,
)

from ..models import TinyModule, tiny_llama


class Towers(nn.Module):
    """A user's own module with layers that no Hugging Face model declares."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
        self.top = nn.Linear(2, 2)


def names(layers: list[DecoderLayer]) -> list[str]:
    return [layer.name for layer in layers]


def test_the_layers_of_a_hugging_face_model_are_found_in_their_order() -> None:
    module = TinyModule(num_layers=3)
    found = find_decoder_layers(module)
    assert names(found) == [f"model.model.layers.{i}" for i in range(3)]
    assert [layer.module for layer in found] == list(module.model.model.layers)


def test_a_family_that_names_its_layers_otherwise_is_found_too() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11))
    assert names(find_decoder_layers(model)) == ["transformer.h.0", "transformer.h.1"]


def test_a_module_without_a_hugging_face_model_has_none() -> None:
    assert find_decoder_layers(Towers()) == []


def test_a_longer_list_of_the_same_layers_is_not_taken_for_the_decoder() -> None:
    model = tiny_llama(2)
    model.spare = nn.ModuleList(tiny_llama(3).model.layers)
    assert names(find_decoder_layers(model)) == ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ("blocks", ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.1", ["blocks.1"]),
        (["top", "blocks"], ["top", "blocks.0", "blocks.1", "blocks.2"]),
        (lambda module: [module.top, module.blocks[0]], ["top", "blocks.0"]),
        (lambda module: module.blocks, ["blocks.0", "blocks.1", "blocks.2"]),
        ([], []),
    ],
    ids=["a list", "a layer", "paths", "a callable", "a callable's list", "none"],
)
def test_layers_can_be_named(choice: Any, found: list[str]) -> None:
    module = Towers()
    layers = find_decoder_layers(module, choice)
    assert names(layers) == found
    assert all(module.get_submodule(layer.name) is layer.module for layer in layers)


class Pair(nn.Module):
    """Two models of one kind, one of them frozen."""

    def __init__(self, frozen: str | None, deep: bool = False) -> None:
        super().__init__()
        self.reference: Any = nn.ModuleDict({"of": tiny_llama(2)}) if deep else tiny_llama(2)
        self.policy = tiny_llama(2)
        if frozen:
            self.get_submodule(frozen).requires_grad_(False)


@pytest.mark.parametrize(
    ("pair", "taken", "other"),
    [
        (Pair("reference"), "policy.model.layers", "reference.model.layers"),
        (Pair("policy"), "reference.model.layers", "policy.model.layers"),
        (Pair(None), "reference.model.layers", "policy.model.layers"),
        (Pair(None, deep=True), "policy.model.layers", "reference.of.model.layers"),
        (Pair("policy", deep=True), "reference.of.model.layers", "policy.model.layers"),
    ],
    ids=["frozen first", "frozen last", "both train", "shallow", "deep and trains"],
)
def test_of_equal_models_that_which_trains_is_taken(pair: Pair, taken: str, other: str) -> None:
    found = find_decoder_layers(pair)
    assert names(found) == [f"{taken}.{i}" for i in range(2)]
    assert other_layer_lists(pair, found) == [other]


@pytest.mark.parametrize("choice", ["bricks", "blocks.9", ["blocks", "top.x"]])
def test_a_path_that_does_not_exist_is_refused(choice: Any) -> None:
    with pytest.raises(ModelError, match="no module '"):
        find_decoder_layers(Towers(), choice)


def test_a_callables_layer_from_elsewhere_is_refused() -> None:
    with pytest.raises(ModelError, match="a Bilinear that is not part"):
        find_decoder_layers(Towers(), lambda _: [nn.Bilinear(1, 1, 1)])


def stages_of(module: Towers, *ranges: tuple[int, int]) -> list[list[DecoderLayer]]:
    layers = find_decoder_layers(module, "blocks")
    return [layers[start:end] for start, end in ranges]


def test_layers_that_share_nothing_stand_alone() -> None:
    module = Towers()
    check_layers_stand_alone(module, stages_of(module, (0, 1), (1, 3)))


def test_layers_of_one_stage_may_share_a_parameter() -> None:
    module = Towers()
    module.blocks[2].weight = module.blocks[1].weight
    check_layers_stand_alone(module, stages_of(module, (0, 1), (1, 3)))


@pytest.mark.parametrize("other", ["blocks.0", "top"])
def test_a_parameter_shared_with_another_place_is_refused_by_both_names(other: str) -> None:
    module = Towers()
    module.get_submodule(other).weight = module.blocks[1].weight
    with pytest.raises(ModelError, match=rf"blocks\.1\.weight.*{other}\.weight|{other}\.weight"):
        check_layers_stand_alone(module, stages_of(module, (0, 1), (1, 3)))


def test_layer_one_does_not_stand_for_layer_ten() -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(11)])
    module.blocks[10].weight = module.blocks[1].weight
    layers = find_decoder_layers(module, "blocks")
    with pytest.raises(ModelError, match=r"blocks\.10\.weight"):
        check_layers_stand_alone(module, [layers[1:2]])


def test_a_parameter_tied_by_its_memory_is_refused_too() -> None:
    module = Towers()
    module.top.weight.data = module.blocks[1].weight.data
    with pytest.raises(ModelError, match=r"blocks\.1\.weight is shared as .*'top\.weight'"):
        check_layers_stand_alone(module, stages_of(module, (0, 1), (1, 3)))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_module_shared_across_stages_is_refused_by_its_tensors(kind: str) -> None:
    module = Towers()
    shared = nn.PReLU() if kind == "parameter" else nn.BatchNorm1d(2, affine=False)
    module.blocks[0].act = module.blocks[2].act = shared
    with pytest.raises(ModelError, match=rf"The {kind} blocks\.0\.act\..* 'blocks\.2\.act\."):
        check_layers_stand_alone(module, stages_of(module, (0, 1), (1, 3)))
    check_layers_stand_alone(module, stages_of(module, (0, 3)))


def test_a_module_without_tensors_may_be_shared() -> None:
    module = Towers()
    module.blocks[0].act = module.blocks[2].act = nn.Dropout(0.1)
    check_layers_stand_alone(module, stages_of(module, (0, 1), (1, 3)))


def test_a_sequential_is_a_list_of_layers_when_it_is_named_alone() -> None:
    module = nn.Module()
    module.encoder = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert names(find_decoder_layers(module, "encoder")) == ["encoder.0", "encoder.1"]
    assert names(find_decoder_layers(module, ["encoder"])) == ["encoder"]


class Residual(nn.Sequential):
    """A Sequential with a forward of its own is one layer."""

    def forward(self, x: Any) -> Any:
        return x + super().forward(x)


def test_a_sequential_with_its_own_forward_is_one_layer() -> None:
    module = nn.Module()
    module.encoder = Residual(nn.Linear(2, 2), nn.Linear(2, 2))
    assert names(find_decoder_layers(module, "encoder")) == ["encoder"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("", "'The LightningModule itself'"),
        ("named", r"'named' \(ModuleDict\) is no layer"),
        ("empty", "'empty' is an empty ModuleList"),
        (["blocks", "blocks.1"], r"names 'blocks\.1' twice"),
        (["tower", "tower.0"], r"names 'tower' twice.*'tower\.0'"),
        (3, "`layers` is a int"),
        (nn.ModuleList([nn.Linear(1, 1)]), "`layers` is a ModuleList; give the dotted path"),
    ],
    ids=str,
)
def test_what_is_no_list_of_layers_is_refused(choice: Any, expected: str) -> None:
    module = Towers()
    module.named = nn.ModuleDict({"a": nn.Linear(2, 2)})
    module.empty = nn.ModuleList()
    module.tower = Residual(Residual(nn.Linear(2, 2)))
    with pytest.raises(ModelError, match=expected):
        find_decoder_layers(module, choice)
