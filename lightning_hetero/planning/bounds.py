"""What no plan can beat: bounds from the devices' speeds, from memory, from links, from order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .simulation import Hop, Pipeline

_INSTANT = 1e-12


@dataclass(frozen=True)
class Speed:
    """How a device would take its share of the layers, if layers could be divided.

    Args:
        layer_seconds: One layer, forward and backward, of one micro-batch.
        fixed_seconds: What it does for each micro-batch besides, as the coordinator does.
        most_layers: So many fit into its memory.
    """

    layer_seconds: float
    fixed_seconds: float = 0.0
    most_layers: float = math.inf


def least_bottleneck(speeds: Sequence[Speed], num_layers: int) -> float:
    """The least time per micro-batch in which all devices together do all layers.

    The sum of speeds, with a cap on what each can hold; infinite where the layers do not fit.
    """
    fixed = np.array([speed.fixed_seconds for speed in speeds])
    each = np.array([max(speed.layer_seconds, _INSTANT) for speed in speeds])
    most = np.array([speed.most_layers for speed in speeds])
    if most.sum() < num_layers or np.isinf(fixed).any():
        return math.inf

    def is_enough(seconds: float) -> bool:
        layers = np.clip((seconds - fixed) / each, 0, most).sum()
        return bool(layers >= num_layers * (1 - 1e-12))

    low = float(fixed.max())
    if is_enough(low):
        return low
    high = max(2 * low, _INSTANT)
    while not is_enough(high):
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low


def busy_seconds_of_media(hops: Iterable[Hop]) -> dict[str, float]:
    """How long each medium is taken by one micro-batch."""
    busy: dict[str, float] = {}
    for hop in hops:
        busy[hop.medium] = busy.get(hop.medium, 0.0) + hop.busy_seconds
    return busy


def least_seconds(pipeline: Pipeline) -> float:
    """A time that no schedule of the pipeline can beat.

    A stage is idle until the first micro-batch has come through those before it, and those
    before it work on after its last backward; the same is true of the coordinator's last part and
    all that is before that; a medium carries all micro-batches; and only so many micro-batches are
    under way at once, from any stage on.
    """
    count = pipeline.num_microbatches
    stages, loss = pipeline.stages, pipeline.loss_seconds
    own = [times.forward_seconds + times.backward_seconds for times in stages]
    optimizer = max(times.optimizer_seconds for times in stages)
    if pipeline.is_alone:
        return count * (own[0] + loss) + optimizer
    hops = [*pipeline.forward_hops, *pipeline.backward_hops]
    travel = sum(hop.busy_seconds + hop.latency_seconds for hop in hops)
    way = sum(own) + loss + travel
    bounds = [math.ceil(count / pipeline.limit(0)) * way, count * (own[0] + loss)]
    bounds.append(way + (count - 1) * loss)
    bounds += [count * busy for busy in busy_seconds_of_media(hops).values()]
    before = 0.0
    for index in range(1, len(stages)):
        there, back = pipeline.forward_hops[index - 1], pipeline.backward_hops[index]
        before += own[index - 1] + sum(h.busy_seconds + h.latency_seconds for h in (there, back))
        bounds.append(math.ceil(count / pipeline.limit(index)) * (way - before))
        bounds.append(before + count * own[index])
    return max(bounds) + optimizer
