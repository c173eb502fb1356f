"""Lower bounds of a step for all schedules, by the devices' speeds, memory, links and order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .step_model import Pipeline, Speed, busy_seconds_of_media

_INSTANT = 1e-12


def least_bottleneck(speeds: Sequence[Speed], num_layers: int) -> float:
    """The least seconds per micro-batch in which all devices together run all layers.

    This adds up the speeds, limited by the memory of each device; infinite if the layers do not
    fit.
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


def least_seconds(pipeline: Pipeline) -> float:
    """A lower bound of the step for every schedule of the pipeline.

    From each stage on, a process works off its part of all micro-batches. It cannot begin before
    the first micro-batch has passed the stages before it, and these still work after its last
    backward. This also holds for the coordinator's last part and everything before it. A medium
    carries all micro-batches. The number of micro-batches in flight is bounded from the first
    stage of each process on. A batch of the window begins after the losses of the batch before it.
    """
    if pipeline.replicas is not None:
        return _Ways(pipeline).least_seconds
    count = pipeline.num_microbatches
    stages, processes = pipeline.stages, pipeline.process_of
    own = [times.forward_seconds + times.backward_seconds for times in stages]
    optimizer = max(pipeline.sums([times.optimizer_seconds for times in stages]))
    if pipeline.is_alone:
        return count * (own[0] + pipeline.loss_seconds) + optimizer
    hops = [*pipeline.forward_hops, *pipeline.backward_hops]
    bounds = [count * busy for busy in busy_seconds_of_media(hops).values()]
    # From the loss back to the first stage: the seconds after a point, and each process's work in
    # them.
    num, behind = len(stages), pipeline.loss_seconds
    whole = sum(own) + behind + sum(hop.seconds for hop in hops)
    left = [0.0] * pipeline.num_processes
    left[0] = behind
    bounds.append(whole + (count - 1) * behind)
    # Each batch waits for the losses of the batch before it.
    ahead = sum(times.forward_seconds for times in stages)
    ahead += sum(hop.seconds for hop in pipeline.forward_hops)
    ahead += pipeline.least_seconds_of_losses
    bounds.append(whole + (pipeline.num_batches - 1) * ahead)
    for index in reversed(range(num)):
        there, back = pipeline.forward_hops[index], pipeline.backward_hops[(index + 1) % num]
        behind += sum(hop.seconds for hop in (there, back)) + own[index]
        process = processes[index]
        left[process] += own[index]
        bounds.append(whole - behind + count * left[process])
        if index == processes.index(process):
            bounds.append(math.ceil(count / pipeline.limit(process)) * behind)
    return max(bounds) + optimizer


def least_seconds_of_processes(pipeline: Pipeline) -> list[float]:
    """For each process, the least seconds from its first action to the end of the step."""
    if pipeline.replicas is not None:
        return _Ways(pipeline).least_seconds_of_processes
    count, stages = pipeline.num_microbatches, pipeline.stages
    own = [times.forward_seconds + times.backward_seconds for times in stages]
    own[0] += pipeline.loss_seconds
    last = max(pipeline.sums([times.optimizer_seconds for times in stages]))
    found = []
    for process, busy in enumerate(pipeline.sums(own)):
        first = pipeline.process_of.index(process)
        hops = pipeline.backward_hops[1 : first + 1]
        after = sum(hop.seconds for hop in hops)
        after += sum(times.backward_seconds for times in stages[:first])
        found.append(count * busy + after + last)
    return found


class _Ways:
    """The ways of the micro-batches through a pipeline with replicas, for bounds."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._counts = pipeline.ways
        last = pipeline.sums([times.optimizer_seconds for times in pipeline.stages])
        self._behind = pipeline.exchange_seconds + max(last)
        each = [times.forward_seconds + times.backward_seconds for times in pipeline.stages]
        self._busy = pipeline.sums(
            [seconds * count for seconds, count in zip(each, pipeline.counts, strict=True)]
        )
        self._busy[0] += pipeline.num_microbatches * pipeline.loss_seconds
        # The least seconds before any loss and after any loss.
        self._ahead = self._behind_loss = math.inf
        # By process, the least seconds before its first action and after its last one.
        self._first = [math.inf] * pipeline.num_processes
        self._last = [math.inf] * pipeline.num_processes
        self._passing = {way: self._walk(way) for way in self._counts}

    def _walk(self, way: tuple[int, ...]) -> float:
        """Note when the processes of a way begin and end at best; the seconds of the whole way."""
        pipeline = self._pipeline
        there, back = pipeline.hops
        ahead = behind = 0.0
        for entry, after in zip(way, [*way[1:], 0], strict=True):
            process, times = pipeline.process_of[entry], pipeline.stages[entry]
            self._first[process] = min(self._first[process], ahead)
            self._last[process] = min(self._last[process], behind)
            ahead += times.forward_seconds
            behind += times.backward_seconds
            if process != pipeline.process_of[after]:
                ahead += there[entry, after].seconds
                behind += back[after, entry].seconds
        if len(way) < pipeline.num_stages:
            ahead += pipeline.own_times.forward_seconds
            behind += pipeline.own_times.backward_seconds
        self._ahead, self._behind_loss = min(self._ahead, ahead), min(self._behind_loss, behind)
        return ahead + pipeline.loss_seconds + behind

    @property
    def least_seconds_of_processes(self) -> list[float]:
        """For each process, the least seconds from its first action to the end of the step."""
        pairs = zip(self._busy, self._last, strict=True)
        return [busy + last + self._behind if math.isfinite(last) else 0.0 for busy, last in pairs]

    @property
    def least_seconds(self) -> float:
        """A lower bound of the step."""
        pipeline = self._pipeline
        count = pipeline.num_microbatches
        in_all = sum(number * self._passing[way] for way, number in self._counts.items())
        bounds = [
            in_all / pipeline.limit(0),
            self._ahead + count * pipeline.loss_seconds + self._behind_loss,
            max(self._passing.values()),
            pipeline.num_batches * (self._ahead + pipeline.least_seconds_of_losses),
            *(count * busy for busy in pipeline.media_seconds.values()),
        ]
        for busy, first, last in zip(self._busy, self._first, self._last, strict=True):
            bounds += [first + busy + last] if math.isfinite(first) else []
        return max(bounds) + self._behind
