"""A trial computes a layer's forward, and leaves nothing behind."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.model.layers import EMBEDDING_LAYER
from lightning_hetero.pipeline.boundary import Activation, Surroundings
from lightning_hetero.pipeline.layer_runs import on_trial
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.stage import Stage
from lightning_hetero.pipeline.trial_backward import (
    TRIED,
    TriedBackward,
    backwards_in,
    difference_of_backwards,
)

from ..own_layers import WIDTH
from ..stateful_layers import Running

Layer = Callable[[Tensor], Tensor]

TRAINING = Surroundings(False, None, [LayerCall(0, True, (), {})])
TRIAL = replace(TRAINING, is_trial=True)


def stage_of(layer: nn.Module) -> Stage:
    return Stage(nn.ModuleDict({"0": layer}), torch.device("cpu"), 1)


def run(stage: Stage, surroundings: Surroundings) -> Tensor:
    hidden = torch.linspace(-1, 1, 2 * 3 * WIDTH).reshape(2, 3, WIDTH)
    return stage.forward(Key(0), Activation(hidden), surroundings).hidden


def without_dropout(layer: nn.Module) -> nn.Module:
    made = copy.deepcopy(layer)
    made.dropout = nn.Identity()
    return made


def test_a_trial_computes_what_training_does_without_dropout() -> None:
    layer = Running()
    expected = run(stage_of(without_dropout(layer)), TRAINING)
    assert torch.equal(run(stage_of(layer), TRIAL), expected)


def test_a_layer_in_evaluation_stays_there_in_a_trial() -> None:
    layer = Running()
    evaluated = replace(TRAINING, calls=[LayerCall(0, False, (), {})])
    expected = run(stage_of(copy.deepcopy(layer)), evaluated)
    assert torch.equal(run(stage_of(layer), replace(evaluated, is_trial=True)), expected)


def test_a_trial_leaves_buffers_and_their_versions_as_they_were() -> None:
    layer = Running()
    buffers = dict(layer.named_buffers())
    before = {name: (buffer.clone(), buffer._version) for name, buffer in buffers.items()}
    run(stage_of(layer), TRIAL)
    found = dict(layer.named_buffers())
    assert found.keys() == buffers.keys()
    for name, (content, version) in before.items():
        assert found[name] is buffers[name]
        assert torch.equal(found[name], content)
        assert found[name]._version == version


def test_the_forward_behind_a_trial_is_as_without_one() -> None:
    tried = stage_of(Running())
    fresh = copy.deepcopy(tried)
    run(tried, TRIAL)
    assert all(module.training for module in tried.layers.modules())
    assert torch.equal(run(tried, TRAINING), run(fresh, TRAINING))


class Sharing(nn.Module):
    """Two modules that count in one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Module(), nn.Module()
        self.first.register_buffer("seen", torch.zeros(()))
        self.second.register_buffer("seen", self.first.seen)

    def forward(self, hidden: Tensor) -> Tensor:
        self.first.seen += 1
        return hidden + self.second.seen


def test_a_buffer_in_two_places_is_one_in_a_trial() -> None:
    layer = Sharing()
    for _ in range(2):
        with on_trial(layer):
            assert torch.equal(layer(torch.zeros(())), torch.ones(()))
    assert layer.first.seen is layer.second.seen
    assert float(layer.first.seen) == 0


class Frozen(nn.BatchNorm1d):
    """Never leaves evaluation mode."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def test_what_a_layer_itself_keeps_in_evaluation_mode_stays_so() -> None:
    layer = nn.Sequential(Frozen(3), nn.BatchNorm1d(3), nn.Dropout()).train()
    with on_trial(layer):
        assert [module.training for module in layer] == [False, True, False]
    assert [module.training for module in layer] == [False, True, True]


class Own(nn.Module):
    """Code of the user's own, with dropout of torch inside."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout()


def test_code_of_the_users_own_stays_in_training_in_a_trial() -> None:
    layer = nn.Sequential(Own(), nn.Linear(3, 3)).train()
    with on_trial(layer, keeps_own_modes=True):
        assert [module.training for module in layer] == [True, False]
        assert not layer[0].dropout.training
    assert all(module.training for module in layer.modules())


class TrainedOtherwise(nn.Module):
    """Adds one in training."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 1.0 if self.training else hidden


class Skipped(TrainedOtherwise):
    """Is skipped at random in training, nearly always."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 1.0 if self.training and self.draw() > 1e-6 else hidden


class OwnStream(TrainedOtherwise):
    """Draws from a generator of its own in training."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = torch.Generator()

    def forward(self, hidden: Tensor) -> Tensor:
        noise = torch.rand(hidden.shape, generator=self.stream) if self.training else 0.0
        return hidden + noise


@pytest.mark.parametrize(
    ("layer", "added"),
    [
        (TrainedOtherwise(), 1.0),
        (Skipped(lambda: float(torch.rand(()))), 0.0),
        (Skipped(random.random), 0.0),
        (Skipped(np.random.rand), 0.0),
        (OwnStream(), 0.0),
    ],
    ids=["draws nothing", "torch", "python", "numpy", "own generator"],
)
def test_own_code_computes_in_training_in_a_trial_unless_it_draws(
    layer: nn.Module, added: float
) -> None:
    stage, own = stage_of(layer), replace(TRIAL, keeps_own_modes=True)
    assert torch.equal(run(stage, own), run(stage, TRIAL) + added)
    assert torch.equal(run(stage, own), run(stage, TRIAL) + added)


def test_an_error_in_a_trial_leaves_nothing_behind() -> None:
    layer = Running()

    def failing() -> None:
        with on_trial(layer):
            layer.seen += 1
            raise ValueError("shape")

    with pytest.raises(ValueError, match="shape"):
        failing()
    assert layer.dropout.training
    assert float(layer.seen) == 0


class Scaled(nn.Module):
    """Scales a gradient or leaves it as it is, and has a parameter whose gradient is rounding."""

    def __init__(self, scale: Layer) -> None:
        super().__init__()
        self.mix, self.key = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.scale = scale

    def forward(self, hidden: Tensor) -> Tensor:
        scores = (hidden @ (hidden + self.key).transpose(-1, -2)).softmax(-1)
        found = self.mix(scores @ hidden).tanh()
        if found.requires_grad:
            found.register_hook(self.scale)
        return hidden + found


def backwards_of(stage: Stage, hidden: Tensor) -> list[TriedBackward]:
    surroundings = replace(TRIAL, collect=[TRIED])
    found = stage.forward(Key(0), Activation(hidden), surroundings)
    assert not found.requires_grad
    return backwards_in([tensor for kind, tensor in found.collected if kind == TRIED])


def difference_of(layer: nn.Module, sizes: Sequence[int], num_bytes: int) -> float:
    torch.manual_seed(1)
    stage = stage_of(layer)
    hidden = torch.randn(4, 3, WIDTH)
    pieces = [backwards_of(stage, piece) for piece in hidden.split(sizes)]
    assert all(parameter.grad is None for parameter in stage.layers.parameters())
    rounding = torch.finfo(torch.float32 if num_bytes == 4 else torch.bfloat16).eps
    return difference_of_backwards(backwards_of(stage, hidden), pieces, rounding).found


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)])
@pytest.mark.parametrize("num_bytes", [4, 2])
def test_a_trial_compares_the_backward_of_layers(sizes: Sequence[int], num_bytes: int) -> None:
    def compare(scale: Layer) -> float:
        torch.manual_seed(0)
        return difference_of(Scaled(scale), sizes, num_bytes)

    assert compare(lambda gradient: gradient) < 1e-5
    assert compare(lambda gradient: -0.3 * gradient) < 1e-5
    assert compare(lambda gradient: gradient.clamp(-1e-3, 1e-3)) < 1e-5
    assert compare(lambda gradient: gradient / gradient.norm()) > 0.02
    assert compare(lambda gradient: gradient / len(gradient)) > 0.02
    if num_bytes == 4:  # otherwise rows alone are compared, which the residual connection hides
        assert compare(lambda gradient: gradient * (0.1 / gradient.norm()).clamp(max=1)) > 0.02


class Gated(nn.Module):
    """Has a gate that is zero at first, and a bias whose gradient is rounding."""

    def __init__(self, gate: Tensor, behind: Layer) -> None:
        super().__init__()
        self.gate, self.bias = nn.Parameter(gate), nn.Parameter(torch.zeros(WIDTH))
        self.behind = behind

    def forward(self, hidden: Tensor) -> Tensor:
        shifted = hidden + self.bias
        return shifted - shifted.mean(-2, keepdim=True) + self.gate * self.behind(hidden)


@pytest.mark.parametrize("gate", [torch.zeros(WIDTH), torch.zeros(())])
def test_a_gate_of_zero_does_not_hide_mixed_samples(gate: Tensor) -> None:
    assert difference_of(Gated(gate, lambda hidden: hidden.mean(0)), (2, 2), 4) > 0.02
    assert difference_of(Gated(gate, lambda hidden: hidden.tanh()), (2, 2), 4) < 1e-5


def test_layers_of_libraries_do_not_run_backwards_in_a_trial() -> None:
    assert backwards_of(stage_of(nn.Linear(WIDTH, WIDTH)), torch.ones(2, 3, WIDTH)) == []


def test_an_embedding_does_not_run_backwards_in_a_trial() -> None:
    class Embedding(nn.Embedding):
        pass

    surroundings = replace(TRIAL, calls=[LayerCall(EMBEDDING_LAYER, True, (), {})], collect=[TRIED])
    stage = Stage(
        nn.ModuleDict({str(EMBEDDING_LAYER): Embedding(5, WIDTH)}), torch.device("cpu"), 1
    )
    assert not stage.forward(Key(0), Activation(torch.tensor([[1, 2]])), surroundings).collected


def test_what_cannot_run_backwards_in_a_trial_sends_nothing() -> None:
    class Detached(Running):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden.detach()).detach()

    assert backwards_of(stage_of(Detached()), torch.ones(2, 3, WIDTH)) == []
