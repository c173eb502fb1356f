"""State that layers keep between forwards is refused or reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, VeloraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lightning_hetero.errors import ModelError
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import Activation, Gradients, Surroundings
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.stage import LayerState, Stage, Updates

from ..own_layers import WIDTH
from ..stateful_layers import (
    Averaging,
    Caching,
    Following,
    Growing,
    Listing,
    Restoring,
    Running,
    Scaling,
)

SHAPE = (2, 3, WIDTH)
TRAINING = Surroundings(True, None, [LayerCall(4, True, (), {})])
EVALUATION = Surroundings(False, None, [LayerCall(4, False, (), {})])
TRIAL = Surroundings(False, None, [LayerCall(4, True, (), {})], is_trial=True)
RUNNING = ("norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "seen")


def stage_of(layer: nn.Module, **options: Any) -> Stage:
    torch.manual_seed(0)
    state = LayerState({4: layer})
    return Stage(nn.ModuleDict({"4": layer}), torch.device("cpu"), 1, state=state, **options)


def forward(stage: Stage, microbatch: int = 0, around: Surroundings = TRAINING) -> Tensor:
    hidden = torch.linspace(-1, 1, 2 * 3 * WIDTH).reshape(SHAPE).requires_grad_()
    return stage.forward(Key(microbatch), Activation(hidden), around).hidden


def test_a_forward_that_updates_a_buffer_of_shared_layers_is_refused() -> None:
    stage = stage_of(Running())
    stage.state = LayerState({4: stage.layers["4"]}, is_shared=True)
    with pytest.raises(ModelError, match=r"buffers \['4.norm.num_batches_tracked', .* several"):
        forward(stage)


def backward(stage: Stage, microbatch: int = 0) -> None:
    stage.backward(Key(microbatch), Gradients((torch.ones(SHAPE),)))


def updates(stage: Stage) -> list[Updates]:
    assert stage.state is not None
    return stage.state.take_updates()


def named(names: Sequence[str], is_again: bool = False) -> Updates:
    return Updates(tuple(f"4.{name}" for name in names), is_again)


@pytest.mark.parametrize("around", [TRAINING, EVALUATION, TRIAL], ids=["F", "E", "T"])
@pytest.mark.parametrize(("kind", "name"), [(Caching, "cache"), (Listing, "seen")])
def test_a_forward_that_changes_an_attribute_is_refused(
    kind: type[nn.Module], name: str, around: Surroundings
) -> None:
    sentence = rf"layer 4 \({kind.__name__}\) changed its attribute '{name}' on a worker"
    with pytest.raises(ModelError, match=sentence):
        forward(stage_of(kind()), around=around)


class Adapted(nn.Module):
    """Has an adapter of PEFT that keeps the mean of its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        kept = VeloraConfig(num_groups=4, init_type="batch_average_once")
        inject_adapter_in_model(LoraConfig(target_modules=["mix"], velora_config=kept), self)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.mix(hidden)
        return mixed


@pytest.mark.follows("If it stays as the first forward makes it, run a batch through the model")
def test_an_adapter_that_changes_its_attribute_in_training_is_refused() -> None:
    with pytest.raises(ModelError, match="attribute 'mix.lora_velora_initialized' on a worker"):
        forward(stage_of(Adapted()))
    layer = Adapted()
    layer(torch.rand(SHAPE))
    forward(stage_of(layer))


class Around(nn.Module):
    """Has what changes an attribute inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Caching())

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.inner(hidden)
        return found


def test_the_place_of_an_attribute_inside_of_a_layer_is_named() -> None:
    with pytest.raises(ModelError, match=r"layer 4 \(Around\) changed its attribute 'inner\.0\.ca"):
        forward(stage_of(Around()))


def test_a_forward_that_runs_again_may_not_change_an_attribute_either() -> None:
    layer = Restoring()
    stage = stage_of(layer, recompute=True)
    forward(stage)
    layer.factor = Caching.factor.__get__(layer)  # type: ignore[method-assign]
    layer.cache = None
    assert stage.state is not None
    stage.state.note_attributes()
    with pytest.raises(ModelError, match="changed its attribute 'cache'"):
        backward(stage)


def test_attributes_that_the_coordinator_has_set_are_no_change() -> None:
    layer = Restoring()
    stage = stage_of(layer)
    layer.present = torch.ones(2)
    assert stage.state is not None
    stage.state.note_attributes()
    layer.present = None
    with pytest.raises(ModelError, match="changed its attribute 'present'"):
        forward(stage)
    stage.state.note_attributes()
    forward(stage)


def test_buffers_are_named_with_the_second_micro_batch_and_once() -> None:
    stage = stage_of(Averaging())
    stage.begin_batch()
    forward(stage, 0)
    assert updates(stage) == []
    forward(stage, 1)
    assert updates(stage) == [named(["mean"])]
    forward(stage, 2)
    stage.begin_batch()
    forward(stage, 0)
    forward(stage, 1)
    assert updates(stage) == []


def test_with_one_micro_batch_per_step_no_buffer_is_named() -> None:
    stage = stage_of(Averaging())
    for _ in range(3):
        stage.begin_batch()
        forward(stage)
        backward(stage)
    assert updates(stage) == []


def test_in_evaluation_a_buffer_that_changes_is_named_too() -> None:
    stage = stage_of(Averaging())
    for microbatch in range(2):
        forward(stage, microbatch, EVALUATION)
    assert updates(stage) == [named(["mean"])]


def test_statistics_of_norms_are_named_in_training_only() -> None:
    stage = stage_of(Running())
    stage.state = LayerState({4: stage.layers["4"]})
    for microbatch in range(2):
        forward(stage, microbatch, EVALUATION)
    assert updates(stage) == [named(["seen"])]
    stage.begin_batch()
    for microbatch in range(2):
        forward(stage, microbatch)
    assert updates(stage) == [named(RUNNING)]


def test_a_forward_that_runs_again_updates_buffers_once_more() -> None:
    stage = stage_of(Running(), recompute=True)
    forward(stage)
    backward(stage)
    assert updates(stage) == [named(RUNNING, is_again=True)]


def test_trials_are_not_counted() -> None:
    stage = stage_of(Running())
    stage.begin_batch()
    for microbatch in range(2):
        forward(stage, microbatch, TRIAL)
    forward(stage)
    assert updates(stage) == []


class Replacing(Averaging):
    """Puts another tensor in the place of its buffer."""

    def factor(self, hidden: Tensor) -> Tensor:
        self.mean = self.mean * 0.5
        return self.mean


def test_a_buffer_that_is_replaced_is_updated() -> None:
    stage = stage_of(Replacing())
    for microbatch in range(2):
        forward(stage, microbatch)
    assert updates(stage) == [named(["mean"])]


def test_buffers_that_are_loaded_between_steps_are_not_updated() -> None:
    layer = Averaging()
    stage = stage_of(layer)
    around = replace(TRAINING, calls=[])
    stage.begin_batch()
    for microbatch in range(2):
        layer.mean = torch.full((WIDTH,), float(microbatch))
        forward(stage, microbatch, around)
    assert updates(stage) == []


@pytest.mark.follows(
    "Give the buffer its last form in the constructor, run the longest batch through the model "
    "before `fit`"
)
@pytest.mark.parametrize("around", [TRAINING, EVALUATION], ids=["F", "E"])
def test_a_forward_that_changes_the_form_of_a_buffer_is_refused(around: Surroundings) -> None:
    layer = Growing()
    sentence = r"layer 4 \(Growing\) changed the form of its buffer 'table' .* from .*\[0, 16\] to"
    with pytest.raises(ModelError, match=sentence.replace("16", str(WIDTH))):
        forward(stage_of(layer), around=around)
    assert layer.table is not None
    assert layer.table.shape == (0, WIDTH)  # it can still go home
    layer(torch.zeros(SHAPE))
    forward(stage_of(layer), around=around)


def test_a_forward_that_makes_a_buffer_is_refused() -> None:
    layer = Growing()
    layer.table = None
    with pytest.raises(ModelError, match="buffer 'table' on a worker, from nothing to"):
        forward(stage_of(layer))


def test_parameters_that_forwards_change_are_named_with_the_second_micro_batch() -> None:
    stage = stage_of(Following())
    stage.begin_batch()
    forward(stage, 0)
    assert updates(stage) == []
    forward(stage, 1)
    assert updates(stage) == [named(["target"])]


def test_parameters_that_a_second_forward_leaves_are_not_named() -> None:
    stage = stage_of(Scaling())
    stage.begin_batch()
    for microbatch in range(3):
        forward(stage, microbatch)
    assert updates(stage) == []


@pytest.mark.parametrize("kind", [Following, Scaling])
def test_parameters_that_a_trial_changes_are_put_back(kind: type[nn.Module]) -> None:
    layer = kind()
    parameter = next(each for each in layer.parameters(recurse=False))
    before, memory = parameter.detach().clone(), parameter.data_ptr()
    forward(stage_of(layer), around=replace(TRIAL, keeps_modes=True))
    assert parameter.equal(before)
    assert parameter.data_ptr() == memory


def test_a_forward_that_runs_again_changes_parameters_once_more() -> None:
    stage = stage_of(Following(), recompute=True)
    forward(stage)
    backward(stage)
    assert updates(stage) == [named(["target"], is_again=True)]


def test_parameters_of_shared_layers_that_a_forward_changes_are_refused() -> None:
    stage = stage_of(Following())
    stage.state = LayerState({4: stage.layers["4"]}, is_shared=True)
    with pytest.raises(ModelError, match=r"\['4.target'\] of layers that several"):
        forward(stage)


class Overwriting(Averaging):
    """Changes in place a buffer that its backward needs."""

    def factor(self, hidden: Tensor) -> Tensor:
        self.mean.add_(1.0)
        return hidden * self.mean


@pytest.mark.follows(
    "Use `micro_batches=1`, or keep the layer with the coordinator, for training with "
    "`micro_batching='boundary'`"
)
def test_a_backward_without_its_tensors_names_the_remedy() -> None:
    stage = stage_of(Overwriting())
    forward(stage, 0)
    forward(stage, 1)
    with pytest.raises(ModelError, match="changed in place since .* `micro_batches=1`"):
        backward(stage, 0)
    whole = stage_of(Overwriting())
    for step in range(2):
        forward(whole, step)
        backward(whole, step)
