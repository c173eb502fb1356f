"""The input embedding as layer -1 of a hollow run: token ids leave, and no number stays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.errors import ModelError
from lightning_hetero.model.calls import LayerCall
from lightning_hetero.model.embedding import EMBEDDING_LAYER, check_token_ids, find_embedding
from lightning_hetero.model.layers import DecoderLayer, find_decoder_layers
from lightning_hetero.model.recipe import Recipe, build_layers, write_recipe

from ..models import tiny_llama
from .test_hollow import Hollowed, gpt2, mistral, qwen2, tokens

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
        hidden: Tensor, calls: list[LayerCall], collect: list[str]
    ) -> tuple[Tensor, list[tuple[str, Tensor]]]:
        sent.append(hidden)
        return hollowed.elsewhere.exchange(hidden, calls, collect)

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


def test_what_comes_from_the_embedding_has_its_form_and_nothing_else() -> None:
    model = tiny_llama(5).bfloat16()
    model.get_input_embeddings().max_norm = 1.0  # which cannot be tried without weights
    away = Hollowed(model, away=FIRST_ONES)
    found = away.model.get_input_embeddings()(tokens())
    assert (found.shape, found.dtype) == ((2, 7, 16), torch.bfloat16)
    assert found.requires_grad
    with pytest.raises(ModelError, match="`mean` wants what comes from the input emb.*out of"):
        found.mean()


def test_what_is_written_into_the_placeholder_in_inference_mode_is_refused(
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
        (torch.tensor([[0, 47, 48]]), "token id 48 .* has 48 rows; see whether the tokenizer"),
        (torch.tensor([[-1, 5]]), "token id -1 "),
        (torch.zeros(1, 2), "float32 instead of token ids"),
    ],
)
def test_what_is_no_token_id_is_refused_before_it_is_looked_up(
    token_ids: Tensor, fault: str
) -> None:
    embedding = nn.Embedding(48, 16)
    check_token_ids(embedding, torch.tensor([[0, 47]]))
    check_token_ids(embedding, torch.zeros(0, 3, dtype=torch.int64))
    with pytest.raises(ModelError, match=fault):
        check_token_ids(embedding, token_ids)


def test_a_worker_builds_the_embedding_as_it_is_and_not_as_its_config_says() -> None:
    model = tiny_llama(5)
    embedding = model.get_input_embeddings()
    embedding.padding_idx, embedding.scale_grad_by_freq = 3, True
    model.config.pad_token_id = 7
    layers = find_decoder_layers(model)
    recipe = write_recipe(model, [(EMBEDDING_LAYER, find_embedding(model, layers))])
    (built,) = build_layers(Recipe.from_json(recipe.to_json())).values()
    assert (built.padding_idx, built.scale_grad_by_freq, built.max_norm) == (3, True, None)


def test_a_model_that_changes_what_comes_from_its_embedding_is_refused() -> None:
    away = Hollowed(gpt2(), away=range(EMBEDDING_LAYER, 2))
    with pytest.raises(ModelError, match="`add` wants what comes from the input embedding.*out of"):
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


def test_what_is_no_embedding_stays() -> None:
    model = tiny_llama(5)
    layers = find_decoder_layers(model)
    model.set_input_embeddings(nn.Sequential(nn.Embedding(48, 16)))
    with pytest.raises(ModelError, match="is a Sequential and no torch.nn.Embedding; take"):
        find_embedding(model, layers)


def test_layers_outside_of_hugging_face_models_have_no_embedding() -> None:
    block = nn.Linear(4, 4)
    with pytest.raises(ModelError, match="not inside one Hugging Face model.*`embedding: true`"):
        find_embedding(nn.Sequential(block), [DecoderLayer("0", block)])
