"""A model after its dry run: its kinds of layers, their calls, and its part of the profile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_utilities.core.rank_zero import rank_zero_info
from msgspec import structs
from torch import nn

from ..devices.device import device_for, is_out_of_memory
from ..errors import BatchError, ModelError
from ..model.half_layers import is_half_with_experts
from ..model.layers import DecoderLayer
from ..model.tensors import ends_of, gradient_bytes, num_trained, stored_bytes, tied_parameters
from ..pipeline.bench import Bench, LayerTrial, OptimizerTrial
from ..pipeline.handover import Request, first_of_request
from ..plan import Dtype
from ..planner.profile import ModelProfile, Part
from ..protocol import messages as m
from ..protocol.tensors import DTYPES, dtype_name
from .dry_run import OptimizerSettings, SampleBatch
from .ends import EndsRunner, Example, embedding_to_leave, parameters_of_ends
from .sample_layers import Blueprint, LayerJob, MadeUpOutputs, kinds_of_layers, wants_gradient


@dataclass(frozen=True)
class Subject:
    """A model with everything that a device needs to measure it.

    Args:
        blueprint: One layer of each kind.
        wants_gradient: For each layer, whether its hidden states have a backward.
        examples: How the model calls its layers, by the size of the micro-batch.
        optimizer: The optimizer's settings; None without an optimizer.
        dtype: The compute dtype of the user's precision.
        converts_weights: Whether a stage's own dtype applies to its weights too.
        embedding_may_leave: Whether a worker may have the input embedding.
    """

    blueprint: Blueprint
    wants_gradient: Sequence[bool]
    examples: Mapping[int, Example]
    optimizer: OptimizerSettings | None
    dtype: Dtype
    converts_weights: bool
    embedding_may_leave: bool = False

    @property
    def kinds(self) -> list[str]:
        """The kinds of layers, each once."""
        return list(dict.fromkeys(self.blueprint.kinds))

    def layer_trial(self, job: LayerJob, patience_seconds: float) -> LayerTrial:
        """The trial of a layer for a job.

        Raises:
            ModelError: If the model did not call the layer.
        """
        example, number = self.examples[job.micro_batch_size], self.blueprint.number_of(job.kind)
        if number not in example.calls:
            raise ModelError(
                f"Layer {number} was not called in `training_step`, so it cannot be measured; use "
                "plan='even', or a plan of your own."
            )
        return LayerTrial(
            number=number,
            hidden_shape=tuple(example.inputs[number].shape),
            hidden_dtype=example.inputs[number].dtype,
            wants_gradient=self.wants_gradient[number],
            surroundings=replace(example.surroundings, calls=[example.calls[number]]),
            recompute=job.recompute,
            dtype=None if job.dtype == self.dtype else DTYPES[job.dtype],
            converts_weights=self.converts_weights,
            patience_seconds=patience_seconds,
        )

    def optimizer_trial(self, kind: str, patience_seconds: float) -> OptimizerTrial | None:
        """The trial of the optimizer's step over a layer; None without an optimizer."""
        used, number = self.optimizer, self.blueprint.number_of(kind)
        if used is None:
            return None
        return OptimizerTrial(
            number, used.class_name, used.defaults, used.options, patience_seconds
        )


def cut_example(whole: Example, sizes: Sequence[int]) -> dict[int, Example]:
    """Examples for micro-batches that are cut before the first layer.

    A size into which the hidden states cannot be cut has no example.
    """
    calls = list(whole.calls.values())
    request = Request(whole.hidden, replace(whole.surroundings, calls=calls))
    found = {}
    for size in sizes:
        try:
            piece = first_of_request(request, size)
        except BatchError:
            continue
        found[size] = replace(
            whole,
            inputs={number: hidden[:size] for number, hidden in whole.inputs.items()},
            surroundings=piece.surroundings,
            calls={call.layer_index: call for call in piece.surroundings.calls},
        )
    return found


@dataclass(frozen=True)
class Cutting:
    """How training batches become micro-batches.

    Args:
        sample: A training batch, on its device.
        at_boundary: Whether ``training_step`` sees whole batches, and only hidden states are cut.
        sizes: Samples of the micro-batches to measure; None for 1, 2, 4, … up to the batch.
    """

    sample: SampleBatch
    at_boundary: bool
    sizes: Sequence[int] | None

    def batch(self, size: int) -> Any:
        """The batch that ``training_step`` sees for micro-batches of this size."""
        return self.sample.batch if self.at_boundary else self.sample.first(size)


@dataclass(frozen=True)
class Sighting:
    """A model after its dry run.

    Args:
        subject: The model as devices measure it.
        bench: Measures its layers in this process.
        runner: Runs its ends.
        cutting: How its training batches become micro-batches.
        batch_size: Samples in a training batch; 1 if it cannot be cut.
    """

    subject: Subject
    bench: Bench
    runner: EndsRunner
    cutting: Cutting
    batch_size: int


def sight(
    module: pl.LightningModule,
    layers: Sequence[DecoderLayer],
    cutting: Cutting,
    optimizer: OptimizerSettings | None,
) -> Sighting:
    """Run ``training_step`` while no layer computes, to see how the model calls its layers.

    Args:
        module: Attached to its Trainer; all modules but its layers are on their device.
        layers: All its decoder layers.
        cutting: How training batches become micro-batches.
        optimizer: The settings of the optimizer of these parameters.
    """
    trainer = module.trainer
    device = trainer.strategy.root_device
    drawn = Blueprint.draw(module, layers, kinds_of_layers(layers, first_wants_gradient=True))
    bench = drawn.bench(device)
    runner = EndsRunner(module, layers, drawn.on_meta(), MadeUpOutputs(drawn, bench))
    batch_size, examples = _examples(runner, cutting)
    first = examples[min(examples)]
    kinds = kinds_of_layers(layers, first.wants_gradient)
    if kinds != drawn.kinds:
        drawn = Blueprint.draw(module, layers, kinds)
        bench = drawn.bench(device)
    embedding = embedding_to_leave(module, layers)
    largest = cutting.batch(max(examples))
    subject = Subject(
        blueprint=drawn,
        wants_gradient=wants_gradient(layers, first.wants_gradient),
        examples=examples,
        optimizer=optimizer,
        dtype=_dtype(first),
        converts_weights=not isinstance(trainer.precision_plugin, MixedPrecision),
        embedding_may_leave=embedding is not None and runner.only_layers_read(embedding, largest),
    )
    return Sighting(subject, bench, runner, cutting, batch_size)


def _examples(runner: EndsRunner, cutting: Cutting) -> tuple[int, dict[int, Example]]:
    """The size of a training batch, and examples of micro-batches by their sizes."""
    if cutting.at_boundary:
        whole = runner.example(cutting.sample.batch)
        batch_size = whole.hidden.shape[0]
        return batch_size, cut_example(whole, _sizes(batch_size, cutting))
    if cutting.sample.size is None:
        # A batch that runs in one piece counts as one sample, so that no plan cuts it.
        return 1, {1: runner.example(cutting.sample.batch)}
    sizes = _sizes(cutting.sample.size, cutting)
    examples: dict[int, Example] = {}
    for size in sizes:
        try:
            examples[size] = runner.example(cutting.sample.first(size))
        except Exception as error:
            if not examples or not is_out_of_memory(error):
                raise
            rank_zero_info(f"the coordinator has not enough memory for {size} samples at once")
            break
    device_for(runner.device).free_cache()
    return cutting.sample.size, examples


def micro_batch_sizes(batch_size: int) -> list[int]:
    """1, 2, 4, … and the whole batch."""
    powers = [2**exponent for exponent in range(batch_size.bit_length())]
    return sorted({*powers, batch_size})


def _sizes(batch_size: int, cutting: Cutting) -> list[int]:
    if cutting.sizes is None:
        return micro_batch_sizes(batch_size)
    return sorted({min(size, batch_size) for size in cutting.sizes})


def _dtype(example: Example) -> Dtype:
    """The compute dtype of the user's precision; float32 for one that plans do not know."""
    dtype = example.surroundings.autocast_dtype or example.hidden.dtype
    name = dtype_name(dtype)
    return cast(Dtype, name) if name in get_args(Dtype) else "float32"


def model_profile(
    root: nn.Module,
    layers: Sequence[DecoderLayer],
    subject: Subject,
    optimizers: Mapping[str, m.OptimizerMeasured],
    fingerprint: str,
) -> ModelProfile:
    """A model's part of the profile.

    Args:
        root: The LightningModule.
        layers: All its decoder layers.
        subject: The model as devices have measured it.
        optimizers: The optimizer's measured step over one layer of each kind, and over both ends.
        fingerprint: Differs between models.
    """
    samples, example = min(subject.examples.items())
    hidden_bytes = max(hidden.nbytes for hidden in example.inputs.values())
    return ModelProfile(
        fingerprint=fingerprint,
        layers=list(subject.blueprint.kinds),
        parts=[
            *(_layer_part(subject, kind, optimizers) for kind in subject.kinds),
            *_end_parts(root, layers, optimizers),
        ],
        tokens_per_sample=max(1, math.prod(example.hidden.shape[:-1]) // samples),
        activation_bytes_per_sample=hidden_bytes // samples,
        gradient_bytes_per_sample=hidden_bytes // samples,
        dtype=subject.dtype,
        tied_gradient_bytes=gradient_bytes(tied_parameters(root, layers)),
        embedding_may_leave=subject.embedding_may_leave,
    )


def _layer_part(subject: Subject, kind: str, optimizers: Mapping[str, m.OptimizerMeasured]) -> Part:
    number = subject.blueprint.number_of(kind)
    layer = subject.blueprint.layers[number]
    plain = stored_bytes({number: layer})
    inside: dict[Dtype, int] = {
        dtype: num_bytes
        for dtype in get_args(Dtype)
        if subject.converts_weights
        and dtype != subject.dtype
        and (num_bytes := stored_bytes({number: layer}, DTYPES[dtype])) != plain
    }
    part = _part(kind, plain, list(layer.parameters()), optimizers)
    experts = is_half_with_experts(layer)
    return structs.replace(part, parameter_bytes_in=inside, is_experts=experts)


def _end_parts(
    root: nn.Module, layers: Sequence[DecoderLayer], optimizers: Mapping[str, m.OptimizerMeasured]
) -> Iterator[Part]:
    ends = zip(parameters_of_ends(root, layers).items(), ends_of(root, layers), strict=True)
    for (name, parameters), tensors in ends:
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        yield _part(name, num_bytes, parameters, optimizers)


def _part(
    name: str,
    num_bytes: int,
    parameters: Sequence[nn.Parameter],
    optimizers: Mapping[str, m.OptimizerMeasured],
) -> Part:
    return Part(
        name=name,
        parameter_bytes=num_bytes,
        trainable_parameters=num_trained(parameters),
        gradient_bytes=gradient_bytes(parameters),
        optimizer_bytes=optimizers[name].state_bytes if name in optimizers else 0,
    )
