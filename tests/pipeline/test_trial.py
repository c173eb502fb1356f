"""A trial computes a layer's forward, and leaves nothing behind."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import Activation, Surroundings
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.stage import Stage, on_trial

from ..own_layers import WIDTH
from ..stateful_layers import Running

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
