"""One training step as a pipeline: who runs what on which micro-batch, how long it takes, and what
the links carry; and bounds that no schedule beats.

The coordinator is stage 0. A stage may have several replicas, and then each micro-batch has a way
of its own. The coordinator may be a replica of the first or of the last stage; it runs that stage
inside its own actions.

`least_bottleneck` and `least_seconds` bound a step by the devices' speeds, memory, links and order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from ..errors import PlanError
from ..pipeline.placement import turns


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage for one micro-batch, and for its optimizer step."""

    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float = 0.0


@dataclass(frozen=True)
class Hop:
    """The transfer of one micro-batch over one boundary in one direction.

    Args:
        medium: Hops with the same medium wait for each other.
        busy_seconds: Seconds for which the hop occupies the medium.
        latency_seconds: Additional seconds until the data arrives.
    """

    medium: str
    busy_seconds: float
    latency_seconds: float = 0.0


HERE = -1
"""The route of a micro-batch through a stage that the coordinator runs in its own actions."""


@dataclass(frozen=True)
class Replicas:
    """What a pipeline with replicas has beside a line.

    Its stages are listed with an entry for each replica; "entry" is an index of this list.

    Args:
        numbers: For each entry the number of its stage: 0 for the coordinator's part, then from 1
            on in the order of the layers. Replicas have the same number.
        shares: For each entry how many micro-batches of a round it runs.
        forward_hops: Each hop of activations, by the entries at its two ends. Where the coordinator
            is at an end, that is entry 0, also if it has a replica there.
        backward_hops: Each hop of gradients, likewise.
        exchange_seconds: Seconds behind the last backward for which replicas exchange gradients and
            weights.
    """

    numbers: Sequence[int]
    shares: Sequence[int]
    forward_hops: Mapping[tuple[int, int], Hop]
    backward_hops: Mapping[tuple[int, int], Hop]
    exchange_seconds: float = 0.0


@dataclass(frozen=True)
class Pipeline:
    """One training step to simulate.

    Args:
        stages: The coordinator's part before the workers' layers, then the workers.
        loss_seconds: The coordinator's part behind the workers, forward and backward: its last
            layers, the head and the loss.
        forward_hops: The hop from each stage to the next; the last leads to the coordinator. Empty
            with ``replicas``.
        backward_hops: The hop from each stage to the previous one; the coordinator's, the first,
            leads to the last stage. Entry i leaves stage i, as in ``forward_hops``.
        num_microbatches: Pieces of the batch.
        max_in_flight: The bound of the plan.
        starts_first: Whether the coordinator starts micro-batches as early as possible, as it does
            without layers before those of the workers. See `choose`.
        max_started: The bound of the plan for the coordinator; None for ``max_in_flight``.
        processes: The number of each stage's process, as `Placement` numbers them; left out, each
            stage has a process of its own. A hop between two stages of one process takes no time.
        replicas: Which entries of ``stages`` are replicas, and the hops between them; None in a
            line. Only an entry of the first or the last stage may have process 0.

    Raises:
        PlanError: If the numbers of stages, hops and processes do not fit together.
    """

    stages: Sequence[StageTimes]
    loss_seconds: float
    forward_hops: Sequence[Hop]
    backward_hops: Sequence[Hop]
    num_microbatches: int
    max_in_flight: int
    starts_first: bool = False
    max_started: int | None = None
    processes: Sequence[int] = ()
    replicas: Replicas | None = None

    def __post_init__(self) -> None:
        if self.replicas is not None:
            _check_replicas(self, self.replicas)
            return
        if not len(self.stages) == len(self.forward_hops) == len(self.backward_hops):
            raise PlanError(
                f"A pipeline of {len(self.stages)} stages has {len(self.forward_hops)} forward and "
                f"{len(self.backward_hops)} backward hops; it needs one of each per stage."
            )
        if self.processes:
            self._check_processes()

    def _check_processes(self) -> None:
        first, *others = self.processes
        if len(self.processes) != len(self.stages) or first != 0 or 0 in others:
            raise PlanError(
                f"A pipeline of {len(self.stages)} stages has the processes {self.processes}; it "
                "needs one per stage, and 0 for the first stage alone."
            )
        for index, (one, other) in enumerate(pairwise(self.processes)):
            inside = self.forward_hops[index], self.backward_hops[index + 1]
            if one == other and any(hop.busy_seconds or hop.latency_seconds for hop in inside):
                raise PlanError(
                    f"Stages {index} and {index + 1} have the same process {one}, and a hop "
                    "between them takes time; give it 0 seconds."
                )

    @cached_property
    def process_of(self) -> Sequence[int]:
        """The number of each stage's process."""
        return self.processes or range(len(self.stages))

    @cached_property
    def num_processes(self) -> int:
        """The number of processes."""
        return max(self.process_of) + 1

    @cached_property
    def num_stages(self) -> int:
        """The number of stages, replicas of one counted once."""
        return len(self.stages) if self.replicas is None else max(self.replicas.numbers) + 1

    def limit(self, process: int) -> int:
        """The most micro-batches that a process may have in flight."""
        if process == 0 and self.max_started is not None:
            return self.max_started
        return self.max_in_flight

    def sums(self, of_stages: Sequence[float]) -> list[float]:
        """The sum of a number of each stage over the stages of each process."""
        found = [0.0] * self.num_processes
        for process, number in zip(self.process_of, of_stages, strict=True):
            found[process] += number
        return found

    @property
    def is_alone(self) -> bool:
        """Whether the coordinator is the only stage."""
        return len(self.stages) == 1

    @cached_property
    def hosted(self) -> int | None:
        """The stage of which the coordinator is a replica."""
        if self.replicas is None:
            return None
        pairs = zip(self.process_of, self.replicas.numbers, strict=True)
        return next((number for process, number in pairs if process == 0 and number), None)

    @cached_property
    def entries(self) -> Sequence[Sequence[int]]:
        """For each stage the index in ``stages`` of who runs each micro-batch; `HERE` for those of
        a stage that the coordinator runs inside its own actions."""
        if self.replicas is None:
            return [_same(index, self.num_microbatches) for index in range(len(self.stages))]
        found = []
        for number in range(self.num_stages):
            team = [entry for entry, of in enumerate(self.replicas.numbers) if of == number]
            shares = [self.replicas.shares[entry] for entry in team]
            here = [index for index, entry in enumerate(team) if number and self._is_here(entry)]
            # As in `PlacedStage.round`, which repeats.
            order = turns(shares, sum(shares), here[0] if here else None)
            entries = [HERE if index in here else team[index] for index in order]
            found.append([entries[k % len(entries)] for k in range(self.num_microbatches)])
        return found

    def _is_here(self, entry: int) -> bool:
        return self.process_of[entry] == 0

    @cached_property
    def counts(self) -> list[int]:
        """The number of micro-batches of each entry of ``stages``."""
        if self.replicas is None:
            return [self.num_microbatches] * len(self.stages)
        found = [0] * len(self.stages)
        for row in self.entries:
            for entry in row:
                found[entry if entry != HERE else self._hosted_entry] += 1
        return found

    @property
    def _hosted_entry(self) -> int:
        return self.process_of.index(0, 1)

    @cached_property
    def own_times(self) -> StageTimes:
        """The coordinator's replica of a stage; without time if there is none."""
        return StageTimes(0, 0) if self.hosted is None else self.stages[self._hosted_entry]

    @cached_property
    def hops(self) -> tuple[Mapping[tuple[int, int], Hop], Mapping[tuple[int, int], Hop]]:
        """The hops of activations and those of gradients, by the entries at their ends."""
        if self.replicas is not None:
            return self.replicas.forward_hops, self.replicas.backward_hops
        num = len(self.stages)
        there = {(index, (index + 1) % num): hop for index, hop in enumerate(self.forward_hops)}
        back = {(index, (index or num) - 1): hop for index, hop in enumerate(self.backward_hops)}
        return there, back

    def way(self, microbatch: int) -> tuple[int, ...]:
        """The entries that run a micro-batch, in the order of its forward, the coordinator's first
        one included."""
        found = (row[microbatch] for row in self.entries)
        return tuple(entry for entry in found if entry != HERE)

    @cached_property
    def ways(self) -> Mapping[tuple[int, ...], int]:
        """The ways of the micro-batches, and how many of them go each way."""
        return Counter(map(self.way, range(self.num_microbatches)))

    @property
    def media_seconds(self) -> dict[str, float]:
        """The mean seconds for which a micro-batch occupies each medium."""
        if self.replicas is None:
            return busy_seconds_of_media([*self.forward_hops, *self.backward_hops])
        found: dict[str, float] = {}
        for way, count in self.ways.items():
            for hop in self._hops_of(way):
                part = hop.busy_seconds * count / self.num_microbatches
                found[hop.medium] = found.get(hop.medium, 0.0) + part
        return found

    def _hops_of(self, way: tuple[int, ...]) -> Iterator[Hop]:
        there, back = self.hops
        for one, other in pairwise([*way, 0]):
            if self.process_of[one] != self.process_of[other]:
                yield there[one, other]
                yield back[other, one]

    @property
    def exchange_seconds(self) -> float:
        """Seconds behind the last backward for which replicas exchange gradients and weights."""
        return 0.0 if self.replicas is None else self.replicas.exchange_seconds


@lru_cache(maxsize=512)
def _same(index: int, count: int) -> list[int]:
    return [index] * count


def _check_replicas(pipeline: Pipeline, replicas: Replicas) -> None:
    numbers, processes = replicas.numbers, pipeline.processes
    sizes = {len(pipeline.stages), len(processes), len(numbers), len(replicas.shares)}
    if len(sizes) > 1 or sorted({*numbers}) != [*range(max(numbers) + 1)] or processes[0] != 0:
        raise PlanError(
            f"A pipeline of {len(pipeline.stages)} entries has the processes {processes}, the "
            f"stages {numbers} and the shares {replicas.shares}; it needs one of each per entry, "
            "the stages numbered from 0 on, and the coordinator first."
        )
    hosted = [number for number, of in zip(numbers, processes, strict=True) if of == 0][1:]
    if len(hosted) > 1 or hosted and hosted[0] not in (1, max(numbers)):
        raise PlanError(
            f"The coordinator is a replica of the stages {hosted} of {max(numbers)}; it can be one "
            "of the first or of the last of them only."
        )


_INSTANT = 1e-12


@dataclass(frozen=True)
class Speed:
    """The speed of a device, for bounds that divide layers freely.

    Args:
        layer_seconds: Forward and backward of one layer for one micro-batch.
        fixed_seconds: Other work for each micro-batch, such as the coordinator's ends.
        most_layers: Number of layers that fit into the memory.
    """

    layer_seconds: float
    fixed_seconds: float = 0.0
    most_layers: float = math.inf


def least_bottleneck(speeds: Sequence[Speed], num_layers: int) -> float:
    """The least seconds per micro-batch in which all devices together run all layers.

    This is the sum of speeds, limited by what each device can hold; infinite if the layers do not
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


def busy_seconds_of_media(hops: Iterable[Hop]) -> dict[str, float]:
    """The seconds for which one micro-batch occupies each medium."""
    busy: dict[str, float] = {}
    for hop in hops:
        busy[hop.medium] = busy.get(hop.medium, 0.0) + hop.busy_seconds
    return busy


def least_seconds(pipeline: Pipeline) -> float:
    """A lower bound of the step for every schedule of the pipeline.

    From each stage on, a process works off its part of all micro-batches. It cannot begin before
    the first micro-batch has passed the stages before it, and these still work after its last
    backward. This also holds for the coordinator's last part and everything before it. A medium
    carries all micro-batches. The number of micro-batches in flight is bounded from the first
    stage of each process on.
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
    # From the loss back to the first stage: what follows a point, and each process's work there.
    num, behind = len(stages), pipeline.loss_seconds
    whole = sum(own) + behind + sum(hop.busy_seconds + hop.latency_seconds for hop in hops)
    left = [0.0] * pipeline.num_processes
    left[0] = behind
    bounds.append(whole + (count - 1) * behind)
    for index in reversed(range(num)):
        there, back = pipeline.forward_hops[index], pipeline.backward_hops[(index + 1) % num]
        behind += sum(hop.busy_seconds + hop.latency_seconds for hop in (there, back)) + own[index]
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
        after = sum(hop.busy_seconds + hop.latency_seconds for hop in hops)
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
        # The least seconds before any loss and behind any loss.
        self._ahead = self._behind_loss = math.inf
        # By process, the least seconds before its first action and behind its last one.
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
                ahead += _seconds_through(there[entry, after])
                behind += _seconds_through(back[after, entry])
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
            *(count * busy for busy in pipeline.media_seconds.values()),
        ]
        for busy, first, last in zip(self._busy, self._first, self._last, strict=True):
            bounds += [first + busy + last] if math.isfinite(first) else []
        return max(bounds) + self._behind


def _seconds_through(hop: Hop) -> float:
    return hop.busy_seconds + hop.latency_seconds
