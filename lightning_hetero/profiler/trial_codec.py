"""The coordinator's side of measuring: trials as messages, and the answers to them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..errors import RemoteProtocolError
from ..model.custom_layers import BlocksRecipe
from ..model.recipe import Recipe
from ..pipeline.bench import Failed, LayerTrial, Measurement, OptimizerMeasurement, OptimizerTrial
from ..pipeline.codec import Content, encode_arguments
from ..pipeline.rule import Key
from ..pipeline.stage_layers import describe_parameters
from ..protocol import messages as m
from ..protocol.tensors import TensorSpec, dtype_name
from ..protocol.values import Packer

Trial = LayerTrial | OptimizerTrial


Outcome = Measurement | OptimizerMeasurement | Failed


def say_prepare(
    recipe: Recipe | BlocksRecipe, layers: Mapping[int, nn.Module], buffers: Mapping[str, Tensor]
) -> Content:
    """Layers that are to be built on a worker; ``layers`` are those of the recipe, here."""
    specs = describe_parameters(layers)
    return m.PrepareLayers(recipe.to_json(), specs, list(buffers)), list(buffers.values())


def say_trial(trial: Trial) -> Content:
    """What a worker is to measure."""
    if isinstance(trial, OptimizerTrial):
        packer = Packer()
        defaults = packer.pack(dict(trial.defaults), "An optimizer default")
        options = packer.pack(dict(trial.options), "An optimizer option")
        message = m.MeasureOptimizer(
            trial.number, trial.class_name, defaults, options, trial.patience_seconds
        )
        return message, packer.tensors
    arguments, tensors = encode_arguments(0, Key(0), trial.surroundings, [trial.number], Packer())
    if not isinstance(arguments, m.Arguments):
        raise TypeError(f"{arguments} are not the arguments of a layer.")
    return (
        m.MeasureLayer(
            arguments,
            TensorSpec(dtype_name(trial.hidden_dtype), list(trial.hidden_shape)),
            trial.wants_gradient,
            trial.recompute,
            None if trial.dtype is None else dtype_name(trial.dtype),  # type: ignore[arg-type]
            trial.converts_weights,
            trial.patience_seconds,
        ),
        tensors,
    )


def read_outcome(message: m.Message) -> Outcome:
    """What a worker's answer says.

    Raises:
        RemoteProtocolError: If it is no answer to a trial.
    """
    match message:
        case m.LayerMeasured():
            return Measurement(
                message.forward_seconds,
                message.backward_seconds,
                message.saved_bytes,
                message.peak_bytes,
            )
        case m.OptimizerMeasured():
            return OptimizerMeasurement(message.step_seconds, message.state_bytes)
        case m.NotMeasured():
            return Failed(message.reason, message.traceback, message.is_out_of_memory)
    raise RemoteProtocolError(f"{message} is no answer to what was to be measured.")
