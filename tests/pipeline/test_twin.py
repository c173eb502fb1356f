"""The numbers by which a layer and its twin are compared tell other code from rounding."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.errors import RemoteProtocolError
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import Activation, Surroundings
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.stage import Stage
from lightning_hetero.pipeline.tolerance import Rounding
from lightning_hetero.pipeline.twin import (
    TwinAnswer,
    TwinDifference,
    answer_of,
    difference_of,
    kind_of,
    trained_names,
)

WIDTH = 16
CALL = LayerCall(0, True, (), {})
FINE = Rounding(torch.float32, WIDTH).of_hidden(1)
COARSE = Rounding(torch.bfloat16, WIDTH).of_hidden(1)


class Attending(nn.Module):
    """Has a key's bias, whose gradient is rounding and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        scores = (self.query(hidden) @ self.key(hidden).transpose(-1, -2)).softmax(-1)
        found: Tensor = hidden + self.out(scores @ hidden)
        return found


class Wrapped(nn.Module):
    """Another layer with something around it."""

    def __init__(self, layer: nn.Module, around: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.around = layer, around

    def forward(self, hidden: Tensor) -> Tensor:
        return self.around(self.layer(hidden))


class _Steeper(torch.autograd.Function):
    """Scales gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 1.01 * gradient


def hidden_states(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(8, 6, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def answer(layer: nn.Module, hidden: Tensor | None = None, call: LayerCall = CALL) -> TwinAnswer:
    given = hidden_states() if hidden is None else hidden
    return answer_of(layer, layer, call, given)[1]


def apart(
    around: Callable[[Tensor], Tensor], rounding: float = FINE, dtype: torch.dtype = torch.float32
) -> TwinDifference | None:
    """The difference of a layer with something around it to the layer."""
    layer = Attending()
    plain = Wrapped(layer, lambda hidden: hidden)
    other = Wrapped(copy.deepcopy(layer).to(dtype), around)
    names = trained_names(plain)
    return difference_of(answer(plain), answer(other, hidden_states(dtype)), names, rounding)


def turned_in_one_row(hidden: Tensor) -> Tensor:
    """Other numbers in one row of 48, as another expert gives them."""
    signs = torch.ones(hidden.shape[:-1])
    signs[0, 0] = -1
    return hidden * signs.unsqueeze(-1)


def test_the_same_layer_has_no_difference() -> None:
    assert apart(lambda hidden: hidden) is None


def test_other_orders_of_sums_are_rounding() -> None:
    assert apart(lambda hidden: hidden * (1 + 1e-6)) is None
    assert apart(lambda hidden: hidden, COARSE, torch.bfloat16) is None


def test_another_result_is_a_difference() -> None:
    found = apart(lambda hidden: 1.01 * hidden)
    assert found is not None
    assert found.what == "its results"
    assert found.relative == pytest.approx(0.01, rel=0.2)
    assert str(found) == f"its results differ by {100 * found.relative:.3g} %"


def test_another_gradient_alone_is_a_difference() -> None:
    found = apart(_Steeper.apply)
    assert found is not None
    assert "gradients of" in found.what
    assert 0.003 < found.relative < 0.03


def test_a_gradient_of_one_parameter_alone_is_a_difference() -> None:
    layer = Attending()
    other = copy.deepcopy(layer)
    other.out.bias.register_hook(lambda gradient: 2 * gradient)
    found = difference_of(answer(layer), answer(other), trained_names(layer), FINE)
    assert found is not None
    assert found.what == "its gradients of out.bias"


def test_a_row_that_takes_another_expert_is_no_difference() -> None:
    assert apart(turned_in_one_row) is None


def test_what_has_no_finite_partner_is_a_difference() -> None:
    found = apart(lambda hidden: hidden / 0)
    assert found is not None
    assert math.isinf(found.relative)
    assert str(found) == "its results have another form or are not finite"
    assert apart(lambda hidden: hidden[:, :3]) is not None


def test_a_twin_that_trains_other_parameters_is_a_difference() -> None:
    layer = Attending()
    other = copy.deepcopy(layer)
    other.out.bias.requires_grad_(False)
    found = difference_of(answer(layer), answer(other), trained_names(layer), FINE)
    assert found is not None


def test_a_twin_without_a_graph_is_a_difference() -> None:
    found = apart(lambda hidden: hidden.detach())
    assert found is not None
    assert found.what == "the gradients of its input"


def test_a_layer_that_cannot_run_backwards_is_compared_forwards() -> None:
    plain = answer(Attending())
    failed = replace(plain, gradients=(), has_failed=True)
    assert difference_of(plain, failed, trained_names(Attending()), FINE) is None


def test_nothing_is_left_behind() -> None:
    layer, hidden = Attending(), hidden_states()
    before = hidden.clone()

    def in_place(given: Tensor) -> Tensor:
        return given.mul_(2)

    found, _ = answer_of(layer, in_place, CALL, hidden)
    assert torch.equal(hidden, before)
    assert torch.equal(found[0], 2 * before)
    assert not found[0].requires_grad
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_a_call_in_evaluation_has_no_backward() -> None:
    found = answer(Attending(), call=replace(CALL, training=False))
    assert found.gradients == ()
    assert not found.has_failed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_answer_comes_back_from_its_tensors(dtype: torch.dtype) -> None:
    layer, along = Attending().to(dtype), torch.arange(3)
    _, sent = answer_of(layer, layer, CALL, hidden_states(dtype), [along])
    tensors = sent.encoded()
    # Nothing that a boundary would round.
    assert not any(tensor.is_floating_point() for tensor in tensors)
    found = TwinAnswer.decoded(tensors)
    assert found.has_failed == sent.has_failed
    for part in ("given", "results", "gradients"):
        mine, theirs = getattr(found, part), getattr(sent, part)
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: [],
        lambda tensors: tensors[:-1],
        lambda tensors: [tensors[0] + 1, *tensors[1:]],
        lambda tensors: [torch.tensor([10**9, 0, 0, 0, 9]), *tensors[1:]],
        lambda tensors: [tensors[0], *(tensor.flatten() for tensor in tensors[1:])],
        lambda tensors: [torch.tensor(3), *tensors[1:]],
    ],
)
def test_what_is_no_answer_is_refused(change: Callable[[list[Tensor]], list[Tensor]]) -> None:
    with pytest.raises(RemoteProtocolError, match="A twin's answer"):
        TwinAnswer.decoded(change(answer(Attending()).encoded()))


def test_a_stage_answers_for_the_layers_that_it_is_asked_for() -> None:
    layers = nn.ModuleDict({str(number): Attending() for number in range(3)})
    stage = Stage(layers, torch.device("cpu"), 1)
    calls = [LayerCall(number, True, (), {}) for number in range(3)]
    asked = [kind_of(0), kind_of(2)]
    around = Surroundings(False, None, calls, asked, is_trial=True, keeps_modes=True)
    found = stage.forward(Key(0), Activation(hidden_states()), around)
    plain = stage.forward(Key(0), Activation(hidden_states()), replace(around, collect=()))
    assert torch.equal(found.hidden, plain.hidden)
    assert {kind for kind, _ in found.collected} == {*asked}
    given = TwinAnswer.decoded([t for kind, t in found.collected if kind == kind_of(2)]).given
    with torch.no_grad():
        expected = layers["1"](layers["0"](hidden_states()))
    torch.testing.assert_close(given[0], expected)
