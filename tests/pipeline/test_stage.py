"""A stage's forward and backward are those of its layers, run one after the other."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.errors import ModelError
from lightning_hetero.model.calls import LayerCall
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.stage import Stage, Surroundings

FIRST = Key(0)


class Scaled(nn.Module):
    """A layer that takes arguments beside the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, scale: float, shift: Tensor | None = None) -> Tensor:
        output: Tensor = self.linear(hidden) * scale
        return output if shift is None else output + shift


def layers(*modules: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({str(3 + i): module for i, module in enumerate(modules)})


def stage_of(*modules: nn.Module, **options: Any) -> Stage:
    return Stage(layers(*modules), torch.device("cpu"), stage_index=1, **options)


def surroundings(*calls: LayerCall, grad_enabled: bool = True) -> Surroundings:
    return Surroundings(grad_enabled, None, calls)


def plain_calls(count: int, training: bool = True) -> list[LayerCall]:
    return [LayerCall(3 + i, training, (), {}) for i in range(count)]


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


@dataclass(frozen=True)
class Trip:
    """What a forward and a backward gave."""

    output: Tensor
    input_gradient: Tensor | None
    gradients: list[Tensor | None]


def forward_and_backward(stage: Stage, around: Surroundings, key: Key = FIRST) -> Trip:
    hidden = torch.linspace(-1, 1, 8).reshape(2, 4)
    output = stage.forward(key, hidden, True, around)
    gradient = stage.backward(key, torch.linspace(1, 2, 8).reshape(2, 4))
    return Trip(output, gradient, [p.grad for p in stage.layers.parameters()])


@pytest.mark.parametrize("recompute", [False, True])
def test_forward_and_backward_are_bit_equal_to_the_layers_own(recompute: bool) -> None:
    torch.manual_seed(0)
    modules = [Scaled(), Scaled()]
    plain = copy.deepcopy(modules)
    shift = torch.rand(4)
    calls = [LayerCall(3, True, (2.0,), {"shift": shift}), LayerCall(4, True, (), {"scale": 0.5})]
    found = forward_and_backward(stage_of(*modules, recompute=recompute), surroundings(*calls))

    leaf = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
    expected = plain[1](plain[0](leaf, 2.0, shift=shift), scale=0.5)
    expected.backward(torch.linspace(1, 2, 8).reshape(2, 4))
    torch.testing.assert_close(found.output, expected, rtol=0, atol=0)
    torch.testing.assert_close(found.input_gradient, leaf.grad, rtol=0, atol=0)
    gradients = [p.grad for module in plain for p in module.parameters()]
    torch.testing.assert_close(found.gradients, gradients, rtol=0, atol=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_holds_in_the_forward_and_when_it_runs_again(recompute: bool) -> None:
    around = replace(surroundings(*plain_calls(2)), autocast_dtype=torch.bfloat16)
    found = forward_and_backward(stage_of(linear(0), linear(1), recompute=recompute), around)
    expected = forward_and_backward(stage_of(linear(0), linear(1)), around)
    assert found.output.dtype == torch.bfloat16
    assert torch.equal(found.output, expected.output)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=0, atol=0)


def test_what_is_sent_on_is_cut_from_the_graph() -> None:
    stage = stage_of(linear())
    output = stage.forward(Key(0), torch.ones(1, 4), True, surroundings(*plain_calls(1)))
    assert output.grad_fn is None
    assert output.requires_grad


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("is_frozen", "input_wants_gradient", "wanted"),
    [(False, False, True), (False, True, True), (True, True, True), (True, False, False)],
)
def test_a_gradient_is_wanted_if_the_input_or_a_weight_wants_one(
    recompute: bool, is_frozen: bool, input_wants_gradient: bool, wanted: bool
) -> None:
    layer = linear().requires_grad_(not is_frozen)
    stage = stage_of(layer, recompute=recompute)
    output = stage.forward(
        Key(0), torch.ones(1, 4), input_wants_gradient, surroundings(*plain_calls(1))
    )
    assert output.requires_grad == wanted
    assert stage.has_saved(0) == wanted
    gradient = stage.backward(Key(0), torch.ones(1, 4))
    assert (gradient is not None) == (wanted and input_wants_gradient)
    assert (layer.weight.grad is not None) == (not is_frozen)


def test_a_forward_without_grad_mode_saves_nothing() -> None:
    stage = stage_of(linear())
    around = surroundings(*plain_calls(1), grad_enabled=False)
    assert not stage.forward(Key(0), torch.ones(1, 4), True, around).requires_grad
    assert not stage.has_saved(0)


def test_no_gradient_from_downstream_means_none_upstream_and_nothing_saved() -> None:
    layer = linear()
    stage = stage_of(layer)
    stage.forward(Key(0), torch.ones(1, 4), True, surroundings(*plain_calls(1)))
    assert stage.backward(Key(0), None) is None
    assert layer.weight.grad is None
    assert not stage.has_saved(0)


def test_microbatches_add_their_gradients_up() -> None:
    layer = linear()
    stage = stage_of(layer)
    for microbatch in range(3):
        hidden = torch.full((1, 4), float(microbatch))
        stage.forward(Key(microbatch), hidden, False, surroundings(*plain_calls(1)))
    for microbatch in range(3):
        stage.backward(Key(microbatch), torch.ones(1, 4))
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 3.0))


def test_what_is_forgotten_has_no_backward() -> None:
    layer = linear()
    stage = stage_of(layer)
    stage.forward(Key(0), torch.ones(1, 4), True, surroundings(*plain_calls(1)))
    stage.forget()
    assert stage.backward(Key(0), torch.ones(1, 4)) is None
    assert layer.weight.grad is None


def test_each_layer_runs_in_the_mode_that_the_model_called_it_in() -> None:
    calls = [LayerCall(3, False, (), {}), LayerCall(4, True, (), {})]
    hidden = torch.ones(1, 1000)
    stage = stage_of(nn.Dropout(0.5), nn.Identity())
    assert torch.equal(stage.forward(Key(0), hidden, False, surroundings(*calls)), hidden)
    stage = stage_of(nn.Identity(), nn.Dropout(0.5))
    assert not torch.equal(stage.forward(Key(0), hidden, False, surroundings(*calls)), hidden)


def dropout_mask(step: int = 1, key: Key = FIRST, stage_index: int = 1, seed: int = 5) -> Tensor:
    stage = Stage(layers(nn.Dropout(0.5)), torch.device("cpu"), stage_index, seed=seed, step=step)
    return stage.forward(key, torch.ones(1, 64), False, surroundings(*plain_calls(1)))


def test_a_replayed_forward_draws_the_same_dropout_mask() -> None:
    assert torch.equal(dropout_mask(), dropout_mask())


@pytest.mark.parametrize(
    "place",
    [{"step": 2}, {"key": Key(1)}, {"key": Key(0, 1)}, {"stage_index": 2}, {"seed": 6}],
    ids=str,
)
def test_every_place_draws_its_own_dropout_mask(place: dict[str, Any]) -> None:
    assert not torch.equal(dropout_mask(**place), dropout_mask())


def test_a_forward_that_runs_again_draws_the_same_dropout_mask() -> None:
    found, expected = (
        forward_and_backward(
            stage_of(linear(), nn.Dropout(0.5), recompute=recompute),
            surroundings(*plain_calls(2)),
            Key(3, 1),
        )
        for recompute in (True, False)
    )
    assert torch.equal(found.output, expected.output)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=0, atol=0)


def test_a_layer_that_returns_more_than_a_tensor_is_refused_by_number() -> None:
    class Both(nn.Module):
        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return hidden, hidden

    with pytest.raises(ModelError, match=r"Layer 3 \(Both\) returns a tuple"):
        stage_of(Both()).forward(Key(0), torch.ones(1, 4), True, surroundings(*plain_calls(1)))
