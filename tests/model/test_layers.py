"""Finding the decoder layers of a module, and refusing those that cannot live apart.

The input embedding as layer -1 of a hollow run: token ids leave, and no number stays.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_hetero.errors import ModelError
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.model.layers import (
    EMBEDDING_LAYER,
    DecoderLayer,
    check_layers_stand_alone,
    check_token_ids,
    find_decoder_layers,
    find_embedding,
    other_layer_lists,
    without_layers,
)
from lightning_hetero.model.recipe import Recipe, build_layers, write_recipe

from ..models import TinyModule, tiny_llama
from .hollow_model import Hollowed, gpt2, mistral, qwen2, tokens


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


def test_the_largest_list_of_equal_modules_is_proposed_where_no_layers_are_found() -> None:
    module = nn.Module()
    assert without_layers(module) == "Module has no decoder layers that could be found"
    module.short = nn.ModuleList([nn.Linear(9, 9)])
    module.mixed = nn.ModuleList([nn.Linear(9, 9), nn.LayerNorm(9)])
    module.heads = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    module.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    assert "(perhaps `layers='blocks'` is meant, which has 2 Linear)" in without_layers(module)


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
def test_of_two_equal_models_the_one_that_trains_is_taken(
    pair: Pair, taken: str, other: str
) -> None:
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


@pytest.mark.follows("`clone()` one of them")
@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_trained_parameter_in_the_memory_of_another_tensor_is_refused(
    is_parameter: bool,
) -> None:
    module = Towers()
    same = module.blocks[1].weight.data[1:]
    again = nn.Parameter(same) if is_parameter else nn.Buffer(same)
    module.blocks[1].again = again
    with pytest.raises(ModelError, match=r"blocks\.1\.(weight|again) and .* in the same memory"):
        check_layers_stand_alone(module, stages_of(module, (0, 1), (1, 3)))
    module.blocks[1].again = again.detach().clone() if not is_parameter else nn.Parameter(same + 1)
    check_layers_stand_alone(module, stages_of(module, (0, 1), (1, 3)))


def test_parameters_that_are_columns_of_one_table_stand_alone() -> None:
    module = Towers()
    table = torch.ones(2, 4)
    module.blocks[1].weight = nn.Parameter(table[:, :2])
    module.blocks[1].other = nn.Parameter(table[:, 2:])
    check_layers_stand_alone(module, stages_of(module, (0, 1), (1, 3)))
    module.blocks[1].other = nn.Parameter(table[:, 1:3])
    with pytest.raises(ModelError, match="in the same memory"):
        check_layers_stand_alone(module, stages_of(module, (0, 1), (1, 3)))


def test_frozen_tensors_in_the_same_memory_stand_alone() -> None:
    module = Towers()
    module.blocks[1].sines, module.blocks[1].cosines = map(nn.Buffer, torch.ones(2, 4).chunk(2))
    module.blocks[1].whole = nn.Buffer(module.blocks[1].sines[:1])
    check_layers_stand_alone(module, stages_of(module, (0, 1), (1, 3)))


@pytest.mark.follows("convert it by `to_dense()`, or keep the layer with the coordinator")
def test_a_sparse_buffer_is_refused() -> None:
    module = Towers()
    module.blocks[1].edges = nn.Buffer(torch.eye(2).to_sparse())
    with pytest.raises(ModelError, match=r"blocks\.1\.edges has the layout sparse_coo"):
        check_layers_stand_alone(module, stages_of(module, (0, 1), (1, 3)))
    check_layers_stand_alone(module, stages_of(module, (0, 1), (2, 3)))
    module.blocks[1].edges = nn.Buffer(module.blocks[1].edges.to_dense())
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
def test_a_choice_that_names_no_layers_is_refused(choice: Any, expected: str) -> None:
    module = Towers()
    module.named = nn.ModuleDict({"a": nn.Linear(2, 2)})
    module.empty = nn.ModuleList()
    module.tower = Residual(Residual(nn.Linear(2, 2)))
    with pytest.raises(ModelError, match=expected):
        find_decoder_layers(module, choice)


FIRST_ONES = range(EMBEDDING_LAYER, 3)


@pytest.fixture
def hollowed() -> Hollowed:
    return Hollowed(tiny_llama(5), away=FIRST_ONES)


@pytest.mark.parametrize("build", [lambda: tiny_llama(5), mistral, qwen2])
def test_a_model_without_its_embedding_computes_the_same(build) -> None:  # type: ignore[no-untyped-def]
    model = build().eval()
    with torch.no_grad():
        expected = model(tokens()).logits
        away = Hollowed(model, away=FIRST_ONES)
        assert torch.equal(model(tokens()).logits, expected)
        away.refill()
        assert torch.equal(model(tokens()).logits, expected)


def test_a_model_without_its_embedding_knows_its_device(hollowed: Hollowed) -> None:
    assert hollowed.model.device.type == "cpu"
    with torch.device("meta"):
        assert tiny_llama(2).device.type == "meta"


def test_token_ids_leave_and_nothing_else(hollowed: Hollowed) -> None:
    sent: list[Tensor] = []

    def exchange(
        hidden: Tensor, calls: list[LayerCall], collect: list[str], carried: Any
    ) -> tuple[Tensor, list[tuple[str, Tensor]]]:
        sent.append(hidden)
        return hollowed.elsewhere.exchange(hidden, calls, collect, carried)

    away = Hollowed(tiny_llama(5), exchange, away=FIRST_ONES)
    ids = tokens()
    away.model(ids, use_cache=False)
    assert [call.layer_index for call in hollowed.elsewhere.calls[0]] == [*FIRST_ONES]
    assert [tensor.data_ptr() for tensor in sent] == [ids.data_ptr()]


def test_all_hidden_states_are_collected_the_first_ones_too(hollowed: Hollowed) -> None:
    plain = tiny_llama(5)
    expected = plain(tokens(), output_hidden_states=True).hidden_states
    found = hollowed.model(tokens(), output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_the_output_of_an_embedding_on_a_worker_has_a_form_and_no_content() -> None:
    model = tiny_llama(5).bfloat16()
    model.get_input_embeddings().max_norm = 1.0  # which cannot be tried without weights
    away = Hollowed(model, away=FIRST_ONES)
    found = away.model.get_input_embeddings()(tokens())
    assert (found.shape, found.dtype) == ((2, 7, 16), torch.bfloat16)
    assert found.requires_grad
    with pytest.raises(ModelError, match="`mean` wants .* the input embedding.*out of"):
        found.mean()


def test_writing_into_the_placeholder_in_inference_mode_is_refused(
    hollowed: Hollowed,
) -> None:
    def overwrite(_module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        output[args[0] > 5] = 0.0  # as image features are put in place of their tokens

    hollowed.model.get_input_embeddings().register_forward_hook(overwrite)
    with torch.inference_mode(), pytest.raises(ModelError, match="__setitem__.*input embedding"):
        hollowed.model(tokens(), use_cache=False)


@pytest.mark.parametrize(
    ("token_ids", "fault"),
    [
        (torch.tensor([[0, 47, 48]]), "token id 48 .* has 48 rows; check that the tokenizer"),
        (torch.tensor([[-1, 5]]), "token id -1 "),
        (torch.zeros(1, 2), "float32 instead of token ids"),
    ],
)
def test_invalid_token_ids_are_refused_before_the_lookup(token_ids: Tensor, fault: str) -> None:
    embedding = nn.Embedding(48, 16)
    check_token_ids(embedding, torch.tensor([[0, 47]]))
    check_token_ids(embedding, torch.zeros(0, 3, dtype=torch.int64))
    with pytest.raises(ModelError, match=fault):
        check_token_ids(embedding, token_ids)


def test_a_worker_builds_the_embedding_with_its_options_and_not_with_the_config_s() -> None:
    model = tiny_llama(5)
    embedding = model.get_input_embeddings()
    embedding.padding_idx, embedding.scale_grad_by_freq = 3, True
    model.config.pad_token_id = 7
    layers = find_decoder_layers(model)
    recipe = write_recipe(model, [(EMBEDDING_LAYER, find_embedding(model, layers))])
    (built,) = build_layers(Recipe.from_json(recipe.to_json())).values()
    assert (built.padding_idx, built.scale_grad_by_freq, built.max_norm) == (3, True, None)


def test_a_model_that_changes_the_output_of_its_embedding_is_refused() -> None:
    model = gpt2().train()
    model.transformer.drop.p = 0.5
    away = Hollowed(model, away=range(EMBEDDING_LAYER, 2))
    with pytest.raises(ModelError, match="`dropout` wants .* the input embedding.*out of"):
        away.model(tokens(), use_cache=False)


def test_a_model_called_without_token_ids_is_refused(hollowed: Hollowed) -> None:
    with pytest.raises(ModelError, match="Layer 0 was called without the input embedding before"):
        hollowed.model(inputs_embeds=torch.zeros(2, 7, 16), use_cache=False)


def test_an_embedding_called_by_itself_is_refused_at_the_end(hollowed: Hollowed) -> None:
    hollowed.model.get_input_embeddings()(tokens())
    with pytest.raises(ModelError, match="left the decoder layers after the input embedding"):
        hollowed.run.check_finished()


def test_an_embedding_with_a_hook_stays() -> None:
    model = tiny_llama(5)
    model.enable_input_require_grads()
    with pytest.raises(ModelError, match="embed_tokens has a hook"):
        Hollowed(model, away=FIRST_ONES)


@pytest.mark.follows(
    "and no torch.nn.Embedding; take `embedding: true` out of the plan",
)
def test_a_module_that_is_not_an_embedding_stays() -> None:
    model = tiny_llama(5)
    layers = find_decoder_layers(model)
    model.set_input_embeddings(nn.Sequential(nn.Embedding(48, 16)))
    with pytest.raises(ModelError, match="is a Sequential and no torch.nn.Embedding; take"):
        find_embedding(model, layers)
    Hollowed(model)


@pytest.mark.follows(
    "so its input embedding cannot be found; take `embedding: true` out of the plan",
)
def test_layers_outside_of_hugging_face_models_have_no_embedding() -> None:
    block = nn.Linear(4, 4)
    with pytest.raises(ModelError, match="not inside one Hugging Face model.*`embedding: true`"):
        find_embedding(nn.Sequential(block), [DecoderLayer("0", block)])
    recipe = Recipe.from_json(write_recipe(block, [(0, DecoderLayer("", block))]).to_json())
    assert list(build_layers(recipe)) == ["0"]


@pytest.mark.parametrize("choice", [None, "model.model.layers"])
def test_a_compiled_layer_is_taken_out_of_its_wrapper(choice: str | None) -> None:
    module = TinyModule()
    layers = module.model.model.layers
    inside, layers[1] = layers[1], torch.compile(layers[1])
    found = find_decoder_layers(module, choice)
    assert found[1].name == "model.model.layers.1._orig_mod"
    assert found[1].module is inside
    assert found[2].name == "model.model.layers.2"


def test_a_wrong_path_of_layers_is_answered_with_the_paths_that_exist() -> None:
    with pytest.raises(ModelError, match=r"the most similar first: model\.model\.layers\."):
        find_decoder_layers(TinyModule(), "model.layer")
