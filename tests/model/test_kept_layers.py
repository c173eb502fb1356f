"""Layers that are hollow and keep their weights: they run here or elsewhere, as is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.errors import ModelError
from lightning_hetero.model.hollow import HollowLayers
from lightning_hetero.model.layers import DecoderLayer

from ..families import tiny_model
from ..models import tiny_llama
from .hollow_model import AWAY, FAMILIES, FAMILY_NAMES, Elsewhere, Hollowed, tokens

KEPT = {"all": AWAY, "first": [1, 2], "last": [3]}


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_NAMES)
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("training", [False, True])
def test_the_model_computes_the_same_here_and_elsewhere(
    family: Callable[[], Any], kept: list[int], training: bool
) -> None:
    model = family().eval()
    expected = model(tokens(), labels=tokens()).loss.detach()
    hollow = Hollowed(model, kept=kept)
    with torch.set_grad_enabled(training):
        there = model(tokens(), labels=tokens()).loss
        with hollow.run.running_here():
            here = model(tokens(), labels=tokens()).loss
        again = model(tokens(), labels=tokens()).loss
    assert torch.equal(there, expected)
    assert torch.equal(here, expected)
    assert torch.equal(again, expected)
    calls = [[call.layer_index for call in each] for each in hollow.elsewhere.calls]
    rest = [number for number in AWAY if number not in kept]
    assert calls == [[*AWAY], *([rest] if rest else []), [*AWAY]]


@pytest.mark.parametrize("wanted", ["output_hidden_states", "output_router_logits"])
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_collected_outputs_are_those_of_the_plain_model(wanted: str, kept: list[int]) -> None:
    model = tiny_model("mixtral", num_hidden_layers=5).eval()
    name = wanted.removeprefix("output_")
    with torch.no_grad():
        expected = model(tokens(), **{wanted: True})[name]
    hollow = Hollowed(model, kept=kept)
    found = [model(tokens(), **{wanted: True})[name]]
    with hollow.run.running_here():
        found.append(model(tokens(), **{wanted: True})[name])
    for each in found:
        assert len(each) == len(expected)
        assert all(torch.equal(mine, its) for mine, its in zip(each, expected, strict=True))


def test_kept_layers_are_ordinary_to_whoever_looks_at_their_weights() -> None:
    model = tiny_llama(5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hollow = Hollowed(model, kept=[1, 2])
    away = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert away == {name for name in before if ".layers.3." in name}
    found = model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    assert all(name.startswith("3.") for names in hollow.elsewhere.fetched for name in names)
    model.load_state_dict({name: tensor + 1 for name, tensor in before.items()})
    kept = model.model.layers[1].mlp.up_proj.weight
    assert torch.equal(kept, before["model.layers.1.mlp.up_proj.weight"] + 1)
    model.to(torch.float64)
    assert kept.dtype == torch.float64
    assert model.model.layers[3].mlp.up_proj.weight.dtype == torch.float32


def test_after_the_run_kept_layers_are_as_if_nothing_had_been() -> None:
    model = tiny_model("mixtral", num_hidden_layers=5)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    names = [sorted(vars(module)) for module in model.modules()]
    hollow = Hollowed(model, kept=AWAY)
    model(tokens(), output_router_logits=True)
    hollow.refill()
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert [sorted(vars(module)) for module in model.modules()] == names


def test_the_hidden_states_before_the_kept_layers_may_be_exchanged_once() -> None:
    model, entered = tiny_llama(5), []

    def enter(hidden: Tensor, has_more: bool) -> Tensor:
        assert not has_more
        entered.append(hidden)
        return hidden.detach()

    hollow = Hollowed(model, kept=AWAY)
    with hollow.run.running_here(enter):
        model(tokens(), labels=tokens()).loss.backward()
    assert len(entered) == 1
    assert model.model.layers[0].mlp.up_proj.weight.grad is None
    assert model.model.layers[1].mlp.up_proj.weight.grad is not None


def test_a_layer_before_kept_ones_that_was_left_early_is_named() -> None:
    model = tiny_llama(5)
    hollow = Hollowed(model, kept=[3])
    layers, hidden = model.model.layers, torch.zeros(1, 3, 16)
    places = torch.arange(3)[None]
    rotary = model.model.rotary_emb(hidden, places)
    with hollow.run.running_here():
        layers[1](hidden, position_embeddings=rotary)
        with pytest.raises(ModelError, match="left the decoder layers after layer 1; layers up to"):
            layers[3](hidden, position_embeddings=rotary)


class Pair(nn.Module):
    """A layer that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return self.line(hidden), None


def test_a_kept_layer_is_tried_without_its_weights() -> None:
    """To find the form of its result; its weights and their gradients stay as they are."""
    layers = {number: Pair() for number in (1, 2)}
    chosen = {number: DecoderLayer(f"layers.{number}", layer) for number, layer in layers.items()}
    elsewhere, weight = Elsewhere(layers), layers[1].line.weight
    weight.grad, before = torch.ones_like(weight), weight.detach().clone()
    run = HollowLayers(chosen, elsewhere.exchange, elsewhere, kept=[1])
    run.hollow()
    result = layers[1](torch.zeros(1, 3, 4))
    assert result[1:] == (None,)
    assert layers[1].line.weight is weight
    assert torch.equal(weight, before)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    run.forget_calls()
