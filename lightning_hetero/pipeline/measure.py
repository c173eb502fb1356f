"""Measures what a stage's forward and backward take: seconds, saved bytes, peak bytes.

It is the stage's own code that runs. Seconds are medians of blocks of runs: a block is long enough
that a processor which works in turns, by a quota or a scheduler, has several of them in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .activation import Activation, Gradients
from .memory import metering, synchronize
from .rule import Key
from .stage import Stage, Surroundings

Clock = Callable[[], float]

_NUM_BLOCKS = 3
_MOST_RUNS_OF_BLOCK = 100
_KEY = Key(0)


@dataclass(frozen=True)
class Measurement:
    """What one forward and one backward took."""

    forward_seconds: float
    backward_seconds: float
    saved_bytes: int
    peak_bytes: int


def measure_stage(
    stage: Stage, hidden: Tensor, surroundings: Surroundings, patience_seconds: float, clock: Clock
) -> Measurement:
    """Run a stage on one micro-batch, first to warm up and for its memory, then for the time.

    Args:
        stage: With weights on its device; afterwards it has gradients.
        hidden: What comes into it, on its device.
        surroundings: How its layers are called.
        patience_seconds: The time to spend on runs; at least three take place.
        clock: Seconds that only grow.
    """

    def run() -> tuple[float, float]:
        return _run(stage, hidden, surroundings, clock)

    run()
    saved_bytes, peak_bytes = _memory(stage, hidden, surroundings)
    forward_seconds, backward_seconds = median_of_blocks(run, patience_seconds)
    return Measurement(forward_seconds, backward_seconds, saved_bytes, peak_bytes)


def median_of_blocks(run: Callable[[], Sequence[float]], patience_seconds: float) -> list[float]:
    """The median over blocks of runs of each of the seconds that a run returns."""
    blocks = [_block(run, patience_seconds / _NUM_BLOCKS) for _ in range(_NUM_BLOCKS)]
    return [statistics.median(column) for column in zip(*blocks, strict=True)]


def _block(run: Callable[[], Sequence[float]], block_seconds: float) -> list[float]:
    """The means of as many runs as fit into the block, one at least."""
    runs = [run()]
    while sum(map(sum, runs)) < block_seconds and len(runs) < _MOST_RUNS_OF_BLOCK:
        runs.append(run())
    return [statistics.fmean(column) for column in zip(*runs, strict=True)]


def _run(
    stage: Stage, hidden: Tensor, surroundings: Surroundings, clock: Clock
) -> tuple[float, float]:
    synchronize(stage.device)
    start = clock()
    outgoing = stage.forward(_KEY, Activation(hidden), surroundings)
    synchronize(stage.device)
    middle = clock()
    stage.backward(_KEY, gradients_like(outgoing))
    synchronize(stage.device)
    return middle - start, clock() - middle


def _memory(stage: Stage, hidden: Tensor, surroundings: Surroundings) -> tuple[int, int]:
    """What is kept between forward and backward, and the most that is taken at once."""
    input_bytes = hidden.nbytes
    with metering(stage.device) as meter:
        outgoing = stage.forward(_KEY, Activation(hidden), surroundings)
        # The output is the next layer's input, and counts there.
        output_bytes = sum(tensor.nbytes for tensor in outgoing.tensors)
        taken_bytes = meter.taken_bytes()
        if not outgoing.requires_grad:
            return 0, input_bytes + meter.peak_bytes()
        stage.backward(_KEY, gradients_like(outgoing))
        saved_bytes = input_bytes + max(0, taken_bytes - output_bytes)
        return saved_bytes, input_bytes + meter.peak_bytes()


def gradients_like(outgoing: Activation) -> Gradients:
    """Gradients such as come from downstream."""
    tensors = outgoing.tensors
    return Gradients(tuple(torch.ones_like(t) if t.requires_grad else None for t in tensors))
