"""The model of a training step: actions of processes on micro-batches, their times, and the links.

The coordinator is stage 0. A stage may have several replicas, and then each micro-batch has a way
of its own. The coordinator may be a replica of the first or of the last stage; it runs this stage
inside its own actions. `simulation` plays such a step, and `bounds` gives lower bounds for all
schedules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

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
        busy_seconds: Seconds of the hop on the medium.
        latency_seconds: Additional seconds until the data arrives.
    """

    medium: str
    busy_seconds: float
    latency_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds from the first byte until the data has arrived."""
        return self.busy_seconds + self.latency_seconds


HERE = -1
"""The entry of a micro-batch at a stage if the coordinator runs it in its own actions."""


def busy_seconds_of_media(hops: Iterable[Hop]) -> dict[str, float]:
    """The seconds of one micro-batch on each medium."""
    busy: dict[str, float] = {}
    for hop in hops:
        busy[hop.medium] = busy.get(hop.medium, 0.0) + hop.busy_seconds
    return busy


@dataclass(frozen=True)
class Replicas:
    """The additional parts of a pipeline with replicas, compared with a line.

    Its stages are listed with an entry for each replica; "entry" is an index of this list.

    Args:
        numbers: For each entry the number of its stage: 0 for the coordinator's part, then from 1
            on in the order of the layers. Replicas have the same number.
        shares: For each entry how many micro-batches of a round it runs.
        forward_hops: Each hop of activations, by the entries at its two ends. The coordinator is
            entry 0 at an end, also with a replica there.
        backward_hops: Each hop of gradients, likewise.
        exchange_seconds: Seconds of the exchange of gradients and weights, after the last backward.
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
        loss_seconds: The coordinator's part after the workers, forward and backward: its last
            layers, the head and the loss.
        forward_hops: The hop from each stage to the next; the last leads to the coordinator. Empty
            with ``replicas``.
        backward_hops: The hop from each stage to the previous one; the coordinator's, the first,
            leads to the last stage. Entry i leaves stage i, as in ``forward_hops``.
        num_microbatches: Pieces of all batches of the accumulation window.
        max_in_flight: The bound of the plan.
        starts_first: Whether the coordinator starts micro-batches as early as possible; see
            `starts_first_with`.
        max_started: The bound of the plan for the coordinator; None for ``max_in_flight``.
        processes: The number of each stage's process, as `Placement` numbers them; left out, each
            stage has a process of its own. A hop between two stages of one process takes 0 seconds.
        replicas: Which entries of ``stages`` are replicas, and the hops between them; None in a
            line. Only an entry of the first or the last stage may have process 0.
        num_batches: The batches of the window, with equally many micro-batches. A batch begins
            after all losses of the batch before it; backwards may still run.
        loss_backward_seconds: The backward in ``loss_seconds``.
        loss_waits: Whether this backward waits between two batches until the next one has begun.
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
    num_batches: int = 1
    loss_backward_seconds: float = 0.0
    loss_waits: bool = True

    @cached_property
    def process_of(self) -> Sequence[int]:
        """The number of each stage's process."""
        return self.processes or range(len(self.stages))

    @property
    def microbatches_of_batch(self) -> int:
        """The micro-batches of one batch of the window."""
        return self.num_microbatches // self.num_batches

    @property
    def least_seconds_of_losses(self) -> float:
        """The coordinator's seconds for all losses of a batch, without a backward that waits for
        the next batch."""
        later = self.loss_backward_seconds if self.loss_waits else 0.0
        return self.microbatches_of_batch * self.loss_seconds - later

    @cached_property
    def num_processes(self) -> int:
        """The number of processes."""
        return max(self.process_of) + 1

    @cached_property
    def num_stages(self) -> int:
        """The number of stages; replicas count once."""
        return len(self.stages) if self.replicas is None else max(self.replicas.numbers) + 1

    def limit(self, process: int) -> int:
        """The most micro-batches in flight on a process."""
        if process == 0 and self.max_started is not None:
            return self.max_started
        return self.max_in_flight

    def sums(self, of_stages: Sequence[float]) -> list[float]:
        """For each process, the sum of ``of_stages`` over its stages."""
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
        """The number of the stage with the coordinator as a replica."""
        if self.replicas is None:
            return None
        pairs = zip(self.process_of, self.replicas.numbers, strict=True)
        return next((number for process, number in pairs if process == 0 and number), None)

    @cached_property
    def entries(self) -> Sequence[Sequence[int]]:
        """For each stage the entry of each micro-batch; `HERE` if the coordinator runs it inside
        its own actions."""
        if self.replicas is None:
            return [_same(index, self.num_microbatches) for index in range(len(self.stages))]
        found = []
        for number in range(self.num_stages):
            team = [entry for entry, of in enumerate(self.replicas.numbers) if of == number]
            shares = [self.replicas.shares[entry] for entry in team]
            here = [
                index for index, entry in enumerate(team) if number and not self.process_of[entry]
            ]
            # As in `PlacedStage.round`, which repeats.
            order = turns(shares, sum(shares), here[0] if here else None)
            entries = [HERE if index in here else team[index] for index in order]
            found.append([entries[k % len(entries)] for k in range(self.num_microbatches)])
        return found

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
        """The times of the coordinator's replica of a stage; 0 without one."""
        return StageTimes(0, 0) if self.hosted is None else self.stages[self._hosted_entry]

    @cached_property
    def hops(self) -> tuple[Mapping[tuple[int, int], Hop], Mapping[tuple[int, int], Hop]]:
        """The hops of activations and the hops of gradients, by the entries at their ends."""
        if self.replicas is not None:
            return self.replicas.forward_hops, self.replicas.backward_hops
        num = len(self.stages)
        there = {(index, (index + 1) % num): hop for index, hop in enumerate(self.forward_hops)}
        back = {(index, (index or num) - 1): hop for index, hop in enumerate(self.backward_hops)}
        return there, back

    def way(self, microbatch: int) -> tuple[int, ...]:
        """The entries of a micro-batch in the order of its forward, with the coordinator's first
        one."""
        found = (row[microbatch] for row in self.entries)
        return tuple(entry for entry in found if entry != HERE)

    @cached_property
    def ways(self) -> Mapping[tuple[int, ...], int]:
        """The ways of the micro-batches, and how many of them go each way."""
        return Counter(map(self.way, range(self.num_microbatches)))

    @property
    def media_seconds(self) -> dict[str, float]:
        """The mean seconds of a micro-batch on each medium."""
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
        """Seconds of the exchange of gradients and weights, after the last backward."""
        return 0.0 if self.replicas is None else self.replicas.exchange_seconds


@lru_cache(maxsize=512)
def _same(index: int, count: int) -> list[int]:
    return [index] * count


@dataclass(frozen=True)
class Speed:
    """The speed of a device, for bounds that divide layers freely.

    Args:
        layer_seconds: Forward and backward of one layer for one micro-batch.
        fixed_seconds: Other work for each micro-batch, such as the coordinator's ends.
        most_layers: The most layers that fit into its memory.
    """

    layer_seconds: float
    fixed_seconds: float = 0.0
    most_layers: float = math.inf
