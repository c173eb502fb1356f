"""Looks at a model in its run: its kinds of layers, and what it passes to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_utilities.core.rank_zero import rank_zero_info

from ..devices.memory import free_cached_memory, is_out_of_memory
from ..model.kinds import kinds_of_layers, wants_gradient
from ..model.layers import DecoderLayer
from ..pipeline.bench import Bench, Clock
from ..plan import Dtype
from ..planning.measuring import micro_batch_sizes
from ..protocol.tensors import dtype_name
from .blueprint import Blueprint, MadeUpOutputs
from .ends import EndsRunner, Example
from .leaving import embedding_to_leave
from .sample import SampleBatch
from .stepping import OptimizerSettings
from .subject import Subject, cut_example


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


@dataclass(frozen=True)
class Sighting:
    """A model that was looked at.

    Args:
        subject: What is to be measured of it.
        bench: Where its layers are measured in this process.
        runner: Runs its ends.
        batch_size: Samples in a training batch; one, if it cannot be cut.
    """

    subject: Subject
    bench: Bench
    runner: EndsRunner
    batch_size: int


def sight(
    module: pl.LightningModule,
    layers: Sequence[DecoderLayer],
    cutting: Cutting,
    optimizer: OptimizerSettings | None,
    clock: Clock,
) -> Sighting:
    """Look at a model by running ``training_step`` while no layer computes.

    Args:
        module: Attached to its Trainer; what is no layer of it is on its device.
        layers: All its decoder layers.
        cutting: How training batches become micro-batches.
        optimizer: What steps over the parameters.
        clock: Seconds that only grow.
    """
    trainer, device = module.trainer, module.trainer.strategy.root_device
    drawn = Blueprint.draw(module, layers, kinds_of_layers(layers, first_wants_gradient=True))
    bench = drawn.bench(device, clock)
    runner = EndsRunner(module, layers, drawn.on_meta(), MadeUpOutputs(drawn, bench), clock)
    batch_size, examples = _examples(runner, cutting)
    first = examples[min(examples)]
    kinds = kinds_of_layers(layers, first.wants_gradient)
    if kinds != drawn.kinds:
        drawn = Blueprint.draw(module, layers, kinds)
        bench = drawn.bench(device, clock)
    subject = Subject(
        blueprint=drawn,
        wants_gradient=wants_gradient(layers, first.wants_gradient),
        examples=examples,
        optimizer=optimizer,
        dtype=_dtype(first),
        converts_weights=not isinstance(trainer.precision_plugin, MixedPrecision),
        embedding_may_leave=_embedding_may_leave(runner, module, layers, cutting, max(examples)),
    )
    return Sighting(subject, bench, runner, batch_size)


def _examples(runner: EndsRunner, cutting: Cutting) -> tuple[int, dict[int, Example]]:
    """The size of a training batch, and examples of micro-batches by their sizes."""
    if cutting.at_boundary:
        whole = runner.example(cutting.sample.batch)
        batch_size = whole.hidden.shape[0]
        return batch_size, cut_example(whole, _sizes(batch_size, cutting))
    if cutting.sample.size is None:
        # A batch that runs in one piece is one sample, so that nobody plans to cut it.
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
    free_cached_memory(runner.device)
    return cutting.sample.size, examples


def _embedding_may_leave(
    runner: EndsRunner,
    module: pl.LightningModule,
    layers: Sequence[DecoderLayer],
    cutting: Cutting,
    size: int,
) -> bool:
    embedding = embedding_to_leave(module, layers)
    if embedding is None:
        return False
    sample = cutting.sample
    batch = sample.batch if cutting.at_boundary else sample.first(size)
    return runner.only_layers_read(embedding, batch)


def _sizes(batch_size: int, cutting: Cutting) -> list[int]:
    if cutting.sizes is None:
        return micro_batch_sizes(batch_size)
    return sorted({min(size, batch_size) for size in cutting.sizes})


def _dtype(example: Example) -> Dtype:
    """What the user's precision multiplies in; one that plans do not know goes as float32."""
    dtype = example.surroundings.autocast_dtype or example.hidden.dtype
    name: Dtype
    for name in get_args(Dtype):
        if name == dtype_name(dtype):
            return name
    return "float32"
