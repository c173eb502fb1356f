"""Finding the head of a model, and what workers build of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from lightning_hetero.errors import BatchError
from lightning_hetero.model.head import HeadLoss, check_labels, find_head
from lightning_hetero.model.layers import (
    EMBEDDING_LAYER,
    HEAD_LAYERS,
    LOGITS_LAYER,
    LOSS_LAYER,
    NORM_LAYER,
    describe_layer,
    describe_layers,
    find_decoder_layers,
    last_decoder_layer,
)
from lightning_hetero.model.recipe import Recipe, build_layers, write_recipe

from ..families import CONFIGS, tiny_model
from ..models import tiny_llama
from ..remedies import Act, come_and_follow, follows


@pytest.mark.parametrize("family", CONFIGS)
def test_a_worker_builds_the_parts_that_the_model_calls(family: str) -> None:
    model = tiny_model(family)
    layers = find_decoder_layers(model)
    head = find_head(model, layers, has_embedding=True)
    called: list[nn.Module] = []
    for module in model.modules():
        module.register_forward_hook(lambda module, *_: called.append(module))
    model(input_ids=torch.ones(1, 4, dtype=torch.int64))
    leaves = [each for each in called if not [*each.children()]]
    assert leaves[-2:] == [head[number].module for number in (NORM_LAYER, LOGITS_LAYER)]
    recipe = write_recipe(model, list({3: layers[3], **head}.items()))
    built = build_layers(Recipe.from_json(recipe.to_json()))
    assert [*map(int, built)] == [3, *HEAD_LAYERS]
    for number in HEAD_LAYERS:
        here, there = head[number].module, built[str(number)]
        assert type(there) is type(here)
        shapes = [[(n, p.shape) for n, p in each.named_parameters()] for each in (here, there)]
        assert shapes[0] == shapes[1]


def test_the_loss_is_the_function_of_transformers() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    head = find_head(model := tiny_llama(2), find_decoder_layers(model), has_embedding=False)
    loss = head[LOSS_LAYER].module
    assert isinstance(loss, HeadLoss)
    expected: Tensor = ForCausalLMLoss(logits, labels, 7)
    assert torch.equal(loss(logits=logits, labels=labels, vocab_size=7), expected)


def given_to_loss(**changes: Any) -> dict[str, Any]:
    """The arguments of a loss with a vocabulary of 7 entries."""
    labels = torch.tensor([[0, 6, -100], [2, 3, 4]])
    given = {"labels": labels, "vocab_size": 7, "ignore_index": -100, "shift_labels": None}
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"vocab_size": 6}, "label 6 at \\[0, 1\\] of the argument `labels` .* has 6 entries"),
        ({"ignore_index": -1}, "label -100 at \\[0, 2\\] .* or -1 where no label counts"),
        ({"shift_labels": torch.tensor([[1, 7]])}, "label 7 at \\[0, 1\\] .* `shift_labels`"),
    ],
)
def test_labels_outside_of_the_vocabulary_are_refused(changes: Any, fault: str) -> None:
    with pytest.raises(BatchError, match=fault):
        check_labels(given_to_loss(**changes))


def test_labels_that_the_loss_leaves_out_may_be_anything() -> None:
    outside = torch.tensor([[9, 6, -100], [-5, 3, 4]])
    check_labels(given_to_loss(labels=outside))
    check_labels(given_to_loss(labels=outside, shift_labels=torch.tensor([[1, -100]])))
    check_labels(given_to_loss(labels=torch.zeros(0, 3, dtype=torch.int64)))


def test_a_loss_of_other_code_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    def digests() -> dict[str, str]:
        model = tiny_llama(2)
        layers = find_decoder_layers(model)
        head = find_head(model, layers, has_embedding=False)
        recipe = write_recipe(model, list({1: layers[1], **head}.items()))
        return {place: code for place, code in recipe.code.items() if "loss_utils" in place}

    before = digests()

    def other(source: Tensor, target: Tensor, *_: object) -> Tensor:
        return nn.functional.cross_entropy(source, target, label_smoothing=0.1)

    monkeypatch.setattr("transformers.loss.loss_utils.fixed_cross_entropy", other)
    assert before
    assert digests() != before


def test_layers_and_ends_have_names() -> None:
    assert describe_layers([EMBEDDING_LAYER, 0, 1, *HEAD_LAYERS]) == (
        "the input embedding, layers 0 to 1 and the head"
    )
    assert describe_layers([4, *HEAD_LAYERS]) == "layer 4 and the head"
    assert describe_layer(LOSS_LAYER) == "the loss"
    assert last_decoder_layer([0, 4, *HEAD_LAYERS]) == 4


class _OwnLayer(LlamaDecoderLayer):
    """A layer of one's own inside a model of transformers."""


def _with_own_layers() -> LlamaForCausalLM:
    model = tiny_llama(2)
    layers = [_OwnLayer(model.config, number) for number in range(2)]
    model.model.layers = nn.ModuleList(layers)
    return model


def _with_two_norms() -> LlamaForCausalLM:
    model = tiny_llama(2)
    model.model.other = LlamaRMSNorm(16)
    return model


def _writes(make: Callable[[], LlamaForCausalLM], *, has_head: bool) -> Act:
    def act() -> None:
        model = make()
        layers = find_decoder_layers(model, "model.layers")
        chosen = dict(enumerate(layers))
        write_recipe(
            model, [*{**chosen, **(find_head(model, layers, True) if has_head else {})}.items()]
        )

    return act


def _finds_in_two_lists(*, has_head: bool) -> Act:
    def act() -> None:
        model = tiny_llama(2)
        first, second = find_decoder_layers(model)
        layers = [first, replace(second, list_index=1)]
        chosen = {0: first, **(find_head(model, layers, True) if has_head else {})}
        write_recipe(model, [*chosen.items()])

    return act


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        follows(
            "so workers cannot build its head. Take `head: true` out of the plan.",
            _writes(_with_own_layers, has_head=True),
            _writes(_with_own_layers, has_head=False),
        ),
        follows(
            "norms of torch or transformers after its layers, and its head has one; take `head: "
            "true` out of the plan, so that it stays with the coordinator.",
            _writes(_with_two_norms, has_head=True),
            _writes(_with_two_norms, has_head=False),
        ),
        follows(
            "so its head cannot be found; take `head: true` out of the plan, so that it stays "
            "with the coordinator.",
            _finds_in_two_lists(has_head=True),
            _finds_in_two_lists(has_head=False),
        ),
    ],
)
def test_heads_that_workers_cannot_build_stay_here(
    request: pytest.FixtureRequest, wrong: Act, right: Act
) -> None:
    come_and_follow(request, wrong, right, None)
