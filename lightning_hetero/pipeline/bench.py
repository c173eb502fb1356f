"""The bench: it measures layers with made-up values on one device.

It runs the code of `Stage` and measures seconds, saved bytes and peak bytes of one forward and one
backward. Seconds are medians over blocks of runs. A block is long enough for several time slices of
a processor under a quota or a scheduler. Differing blocks are repeated.
"""

from __future__ import annotations

import logging
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..devices.device import Clock as Clock
from ..devices.device import device_for, is_out_of_memory
from ..errors import ModelError
from ..model.allowed_imports import Allowed
from ..model.stored import multiply_in
from ..model.tensors import dtypes_on_stage, fill_with_made_up_values
from ..plan import HEAD_LAYERS
from ..protocol import messages as m
from ..protocol.frames import Content
from ..protocol.tensor_bytes import DTYPES, TensorSpec, dtype_name
from ..protocol.values import KeptConstants, Packer, unpack
from .boundary import Activation, Collected, Gradients, Surroundings
from .codec import decode_arguments, encode_arguments
from .optimizer import Group, StageOptimizer, is_paged
from .rule import Key
from .stage import Stage

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

# Characters of an error's text, and as many of its traceback.
_MOST_TEXT = 2**16
# Any number of a remote stage; the coordinator's is 0.
_STAGE_INDEX = 1
_NUM_BLOCKS = 3
# Differing blocks are followed by others, up to this number and this multiple of the patience.
_MOST_BLOCKS = 6
_MOST_PATIENCE = 2.0
_MOST_RUNS_OF_BLOCK = 100
_KEY = Key(0)


def measure_stage(
    stage: Stage, hidden: Tensor, surroundings: Surroundings, patience_seconds: float, clock: Clock
) -> m.LayerMeasured:
    """Run a stage on one micro-batch: to warm up, for its memory, then for its time.

    Args:
        stage: Has its weights on its device; afterwards it has gradients.
        hidden: Its input, on its device.
        surroundings: The arguments of its layers.
        patience_seconds: The time to spend on runs; at least three runs take place.
        clock: Returns seconds that only grow.
    """
    run = partial(_run, stage, hidden, surroundings, clock)
    run()
    saved_bytes, peak_bytes = _memory(stage, hidden, surroundings)
    found = median_of_blocks(run, patience_seconds)
    forward_seconds, backward_seconds = found.seconds
    return m.LayerMeasured(forward_seconds, backward_seconds, saved_bytes, peak_bytes, found.spread)


MOST_SPREAD = 0.25
"""The share by which equal runs may differ on an otherwise idle device."""


@dataclass(frozen=True)
class Repeats:
    """The seconds of repeated runs.

    Args:
        seconds: The median of each of a run's seconds.
        spread: The share by which the median block took longer than the fastest block.
    """

    seconds: list[float]
    spread: float


def spread_of(blocks: Sequence[float]) -> float:
    """The share by which the median of these seconds is longer than the least of them."""
    least = min(blocks)
    return statistics.median(blocks) / least - 1 if least > 0 else 0.0


def median_of_blocks(run: Callable[[], Sequence[float]], patience_seconds: float) -> Repeats:
    """Measure in three blocks of runs, and in up to three more while the blocks differ.

    Args:
        run: Returns the seconds of its parts.
        patience_seconds: The time for the three blocks. While all blocks together have taken
            less than twice as long, another may follow. At least three runs take place.
    """
    blocks = [_block(run, patience_seconds / _NUM_BLOCKS) for _ in range(_NUM_BLOCKS)]
    while _is_worth_repeating(blocks, patience_seconds):
        blocks.append(_block(run, patience_seconds / _NUM_BLOCKS))
    means = [[statistics.fmean(part) for part in zip(*runs, strict=True)] for runs in blocks]
    seconds = [statistics.median(part) for part in zip(*means, strict=True)]
    return Repeats(seconds, spread_of([sum(parts) for parts in means]))


Block = list[Sequence[float]]


def _block(run: Callable[[], Sequence[float]], block_seconds: float) -> Block:
    """As many runs as fit into the block, at least one."""
    runs = [run()]
    while sum(map(sum, runs)) < block_seconds and len(runs) < _MOST_RUNS_OF_BLOCK:
        runs.append(run())
    return runs


def _is_worth_repeating(blocks: Sequence[Block], patience_seconds: float) -> bool:
    taken = [sum(map(sum, runs)) for runs in blocks]
    if len(blocks) >= _MOST_BLOCKS or sum(taken) >= _MOST_PATIENCE * patience_seconds:
        return False
    each = [seconds / len(runs) for seconds, runs in zip(taken, blocks, strict=True)]
    return spread_of(each) > MOST_SPREAD


def _run(
    stage: Stage, hidden: Tensor, surroundings: Surroundings, clock: Clock
) -> tuple[float, float]:
    device_for(stage.device).synchronize()
    start = clock()
    outgoing = stage.forward(_KEY, Activation(hidden), surroundings)
    device_for(stage.device).synchronize()
    middle = clock()
    stage.backward(_KEY, gradients_like(outgoing))
    device_for(stage.device).synchronize()
    return middle - start, clock() - middle


def _memory(stage: Stage, hidden: Tensor, surroundings: Surroundings) -> tuple[int, int]:
    """Bytes saved between forward and backward, and the most bytes taken at once."""
    input_bytes = hidden.nbytes
    with device_for(stage.device).metering() as meter:
        outgoing = stage.forward(_KEY, Activation(hidden), surroundings)
        # The output counts as the next layer's input.
        output_bytes = sum(tensor.nbytes for tensor in outgoing.tensors)
        taken_bytes = meter.taken_bytes()
        if not outgoing.requires_grad:
            return 0, input_bytes + meter.peak_bytes()
        stage.backward(_KEY, gradients_like(outgoing))
        saved_bytes = input_bytes + max(0, taken_bytes - output_bytes)
        return saved_bytes, input_bytes + meter.peak_bytes()


def gradients_like(outgoing: Activation) -> Gradients:
    """Gradients of ones for an activation, as downstream would send them."""
    tensors = outgoing.tensors
    return Gradients(tuple(torch.ones_like(t) if t.requires_grad else None for t in tensors))


def attempt(measure: Callable[[], Found], device: torch.device) -> Found | m.NotMeasured:
    """Return a measurement, or why it has failed; a failed one frees its memory."""
    try:
        return measure()
    except Exception as error:
        logger.debug("A measurement has failed.", exc_info=True)
        reason = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
        trace = traceback.format_exc()[-_MOST_TEXT:]
        failed = m.NotMeasured(reason, trace, is_out_of_memory(error))
    device_for(device).free_cache()
    return failed


@dataclass(frozen=True)
class LayerTrial:
    """A layer to measure, or the head; `m.MeasureLayer` carries it to a worker.

    Args:
        hidden_shape: The shape of its hidden states.
        hidden_dtype: The dtype of its hidden states.
        wants_gradient: Whether the hidden states have a backward.
        surroundings: How the model calls the layer, or the parts of the head.
        recompute: Whether the backward runs the forward again, as in a plan.
        dtype: The compute dtype, as in a plan.
        converts_weights: Whether the weights get this dtype too.
        patience_seconds: The time to spend.
    """

    hidden_shape: tuple[int, ...]
    hidden_dtype: torch.dtype
    wants_gradient: bool
    surroundings: Surroundings
    recompute: bool = False
    dtype: torch.dtype | None = None
    converts_weights: bool = True
    patience_seconds: float = 0.0

    @property
    def numbers(self) -> list[int]:
        """The numbers of all called layers."""
        return [call.layer_index for call in self.surroundings.calls]

    def encode(self) -> Content:
        """The message and its tensors.

        Raises:
            LocalProtocolError: If an argument of the layer cannot be sent.
        """
        arguments, tensors = encode_arguments(0, Key(0), self.surroundings, self.numbers, Packer())
        message = m.MeasureLayer(
            arguments,
            TensorSpec(dtype_name(self.hidden_dtype), list(self.hidden_shape)),
            self.wants_gradient,
            self.recompute,
            None if self.dtype is None else dtype_name(self.dtype),  # type: ignore[arg-type]
            self.converts_weights,
            self.patience_seconds,
        )
        return message, tensors

    @classmethod
    def decode(cls, message: m.MeasureLayer, tensors: tuple[Tensor, ...]) -> LayerTrial:
        """The trial of a message; its tensors are on their device.

        Raises:
            RemoteProtocolError: If the message breaks a rule.
            ModelError: If it is neither for one layer nor for the head.
        """
        around = decode_arguments(message.arguments, tensors, KeptConstants())
        numbers = [call.layer_index for call in around.calls]
        if len(numbers) != 1 and numbers != [*HEAD_LAYERS]:
            raise ModelError(f"One layer is measured at a time, not {len(numbers)}.")
        return cls(
            hidden_shape=tuple(message.hidden.shape),
            hidden_dtype=message.hidden.torch_dtype,
            wants_gradient=message.wants_gradient,
            surroundings=around,
            recompute=message.recompute,
            dtype=None if message.dtype is None else DTYPES[message.dtype],
            converts_weights=message.converts_weights,
            patience_seconds=message.patience_seconds,
        )


@dataclass(frozen=True)
class OptimizerTrial:
    """An optimizer to step over one layer; `m.MeasureOptimizer` carries it to a worker.

    Args:
        number: The layer's number.
        class_name: The optimizer's class, as `StageOptimizer` knows it.
        defaults: The optimizer's own options.
        options: The options of the layer's parameter group.
        patience_seconds: The time to spend.
    """

    number: int
    class_name: str
    defaults: Mapping[str, Any]
    options: Mapping[str, Any]
    patience_seconds: float

    def encode(self) -> Content:
        """The message and its tensors.

        Raises:
            LocalProtocolError: If an option cannot be sent.
        """
        packer = Packer()
        defaults = packer.pack(dict(self.defaults), "An optimizer default")
        options = packer.pack(dict(self.options), "An optimizer option")
        message = m.MeasureOptimizer(
            self.number, self.class_name, defaults, options, self.patience_seconds
        )
        return message, packer.tensors

    @classmethod
    def decode(cls, message: m.MeasureOptimizer, tensors: tuple[Tensor, ...]) -> OptimizerTrial:
        """The trial of a message."""
        return cls(
            message.layer_index,
            message.class_name,
            unpack(message.defaults, tensors),
            unpack(message.options, tensors),
            message.patience_seconds,
        )


@dataclass
class Bench:
    """Builds layers for each dtype, and measures one at a time.

    Args:
        device: Computes the layers.
        build: Returns the layers on ``meta``, by number.
        buffers: Values of buffers, by name; missing ones are made up.
        clock: Returns seconds; they only grow.
        allowed: The allowed classes of optimizers besides the libraries' classes.
    """

    device: torch.device
    build: Callable[[], nn.ModuleDict]
    buffers: Mapping[str, Tensor]
    clock: Clock = time.perf_counter
    allowed: Allowed = Allowed()
    _layers: nn.ModuleDict = field(default_factory=nn.ModuleDict)
    _dtype: torch.dtype | None = None

    def measure_layer(self, trial: LayerTrial) -> m.LayerMeasured:
        """Measure one forward and one backward; afterwards the layer has gradients.

        Raises:
            ModelError: If the layer is missing.
        """
        hidden = torch.randn(trial.hidden_shape, device=self.device).to(trial.hidden_dtype)
        hidden.requires_grad_(trial.wants_gradient and trial.surroundings.grad_enabled)
        stage, around = self._stage(trial), trial.surroundings
        return measure_stage(stage, hidden, around, trial.patience_seconds, self.clock)

    def collected(self, trial: LayerTrial) -> Sequence[Collected]:
        """The collected outputs of one forward of a layer."""
        hidden = torch.randn(trial.hidden_shape, device=self.device).to(trial.hidden_dtype)
        around = replace(trial.surroundings, grad_enabled=False)
        with torch.no_grad():
            return self._stage(trial).forward(Key(0), Activation(hidden), around).outputs

    def measure_optimizer(self, trial: OptimizerTrial) -> m.OptimizerMeasured:
        """Measure an optimizer's step over a layer."""
        layer = self._filled(trial.number, self._dtype, converts_weights=True)
        trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
        if not trained:
            return m.OptimizerMeasured(0.0, 0)
        for parameter in trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        group = Group(list(trained), trial.options)
        name, allowed = trial.class_name, self.allowed
        optimizer = StageOptimizer(name, trial.defaults, [group], trained, allowed)

        def step() -> list[float]:
            device_for(self.device).synchronize()
            start = self.clock()
            optimizer.step([trial.options])
            device_for(self.device).synchronize()
            return [self.clock() - start]

        step()
        [seconds] = median_of_blocks(step, trial.patience_seconds).seconds
        return m.OptimizerMeasured(seconds, state_bytes(optimizer.state().values()))

    def forget(self) -> None:
        """Drop all layers, and return their memory."""
        self._layers = nn.ModuleDict()
        device_for(self.device).free_cache()

    def _stage(self, trial: LayerTrial) -> Stage:
        dtype, converts_weights = trial.dtype, trial.converts_weights
        found = {str(n): self._filled(n, dtype, converts_weights) for n in trial.numbers}
        layers = nn.ModuleDict(found)
        return Stage(layers, self.device, _STAGE_INDEX, trial.recompute, dtype=trial.dtype)

    def _filled(self, number: int, dtype: torch.dtype | None, converts_weights: bool) -> nn.Module:
        """A layer with made-up values in a dtype; layers in another dtype are dropped."""
        if not self._layers or dtype != self._dtype:
            self.forget()
            self._layers, self._dtype = self.build(), dtype
            if dtype is not None:
                multiply_in(self._layers, dtype)
        if str(number) not in self._layers:
            raise ModelError(
                f"Layer {number} is not among the layers to be measured, which are "
                f"{sorted(map(int, self._layers))}."
            )
        layer = self._layers[str(number)]
        dtypes = dtypes_on_stage({number: layer}, dtype if converts_weights else None)
        fill_with_made_up_values({number: layer}, dtypes, self.buffers, self.device)
        return layer


def state_bytes(states: Iterable[Mapping[str, Any]]) -> int:
    """The bytes of the tensors in optimizer states, without those paged to main memory."""
    values = [value for state in states for value in state.values() if not is_paged(value)]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
