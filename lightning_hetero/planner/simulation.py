"""The simulator of one training step, with the rule of the runtime; and bounds that no plan beats.

The simulation follows the runtime. The coordinator is stage 0 and starts the micro-batches. When a
micro-batch returns, the coordinator runs the rest of it as one action: its own last layers, the
head, the loss, and their backward. A process may have several stages. It runs one action at a time,
of those that are ready in all its stages, and computes while its results travel. A link carries one
transfer at a time.

`least_bottleneck` and `least_seconds` bound a step by the devices' speeds, memory, links and order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import PlanError
from ..pipeline.rule import Action, Key, choose

MOST_PLAYED = 256
"""Micro-batches that `predict` simulates."""

LOSS = 1
"""Visit of the coordinator's forward that ends with the head and the loss. The runtime needs no
such number, because a micro-batch never has both forwards ready."""


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


@dataclass(frozen=True)
class Pipeline:
    """One training step to simulate.

    Args:
        stages: The coordinator's part before the workers' layers, then the workers.
        loss_seconds: The coordinator's part behind the workers, forward and backward: its last
            layers, the head and the loss.
        forward_hops: The hop from each stage to the next; the last leads to the coordinator.
        backward_hops: The hop from each stage to the previous one; the coordinator's, the first,
            leads to the last stage. Entry i leaves stage i, as in ``forward_hops``.
        num_microbatches: Pieces of the batch.
        max_in_flight: The bound of the plan.
        starts_first: Whether the coordinator starts micro-batches as early as possible, as it does
            without layers before those of the workers. See `choose`.
        max_started: The bound of the plan for the coordinator; None for ``max_in_flight``.
        processes: The number of each stage's process, as `Placement` numbers them; left out, each
            stage has a process of its own. A hop between two stages of one process takes no time.

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

    def __post_init__(self) -> None:
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


class Span(NamedTuple):
    """An action and when it ran."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Args:
        spans: Every simulated action, in the order of their starts.
        busy_seconds: Seconds for which each process computed, its optimizer steps included.
        peak_in_flight: The most micro-batches that each process had in flight.
        step_seconds: From the first action to the end of the slowest optimizer step.
    """

    spans: Sequence[Span]
    busy_seconds: Sequence[float]
    peak_in_flight: Sequence[int]
    step_seconds: float

    @property
    def busy_shares(self) -> list[float]:
        """The share of the step for which each process computed."""
        return [busy / self.step_seconds if self.step_seconds else 0 for busy in self.busy_seconds]

    @property
    def bubble(self) -> float:
        """The idle share of all processes' time."""
        return 1 - sum(self.busy_shares) / len(self.busy_seconds)


def simulate(pipeline: Pipeline) -> Simulation:
    """Simulate the whole step."""
    return _Run(pipeline).play()


def predict_below(pipeline: Pipeline, below: float) -> Simulation | None:
    """The prediction of `predict`, or None as soon as the step cannot be shorter than ``below``."""
    is_short = pipeline.num_microbatches <= MOST_PLAYED
    found = _Run(pipeline, below).play() if is_short else predict(pipeline)
    return found if found.step_seconds < below else None


def predict(pipeline: Pipeline) -> Simulation:
    """Simulate the step; extrapolate it beyond `MOST_PLAYED` micro-batches.

    Each additional micro-batch takes the mean time of those of the second half.
    """
    missing = pipeline.num_microbatches - MOST_PLAYED
    if missing <= 0:
        return simulate(pipeline)
    half = simulate(replace(pipeline, num_microbatches=MOST_PLAYED // 2))
    whole = simulate(replace(pipeline, num_microbatches=MOST_PLAYED))
    more = missing / (MOST_PLAYED - MOST_PLAYED // 2)
    return Simulation(
        whole.spans,
        [b + more * (b - a) for a, b in zip(half.busy_seconds, whole.busy_seconds, strict=True)],
        whole.peak_in_flight,
        whole.step_seconds + more * (whole.step_seconds - half.step_seconds),
    )


class _Process:
    """The state of a process: ready actions of its stages, micro-batches in flight, and sums."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.first_stage = stages[0]
        self.ready: list[Action] = []
        self.in_flight: set[int] = set()
        self.peak_in_flight = 0
        self.busy_seconds = 0.0
        self.is_busy = False


# A search simulates thousands of steps with the same actions.
@lru_cache(maxsize=512)
def _actions(index: int, num_microbatches: int) -> tuple[list[Action], list[Action], list[Action]]:
    """The forwards and backwards of a stage, and the coordinator's losses, by micro-batch."""
    keys = [Key(microbatch) for microbatch in range(num_microbatches)]
    return (
        [Action(index, "F", key) for key in keys],
        [Action(index, "B", key) for key in keys],
        [Action(index, "F", Key(key.microbatch, LOSS)) for key in keys if index == 0],
    )


def _first_ones(ready: Sequence[Action]) -> Collection[Action]:
    """Of each stage and kind the first action, as a worker offers them to the rule."""
    first: dict[tuple[int, str], Action] = {}
    for action in ready:
        first.setdefault((action.stage_index, action.kind), action)
    return first.values()


class _Run:
    """A running simulation. Events are arrivals of inputs and ends of actions."""

    def __init__(self, pipeline: Pipeline, below: float = math.inf) -> None:
        self._pipeline = pipeline
        self._is_alone = pipeline.is_alone
        self._process_of = pipeline.process_of
        self._actions = [
            _actions(index, pipeline.num_microbatches) for index in range(len(pipeline.stages))
        ]
        self._processes = [
            _Process([i for i, other in enumerate(self._process_of) if other == process])
            for process in range(pipeline.num_processes)
        ]
        self._most_idle = [math.inf] * len(self._processes)
        if below < math.inf:
            self._most_idle = [below - seconds for seconds in _least_seconds_of(pipeline)]
        self._media_free_at: dict[str, float] = {}
        self._events: list[tuple[float, int, bool, Action]] = []
        self._num_events = 0
        self._num_started = 0
        self._spans: list[Span] = []

    def play(self) -> Simulation:
        """The step; it is infinite if the simulation has ended early, at the limit."""
        self._offer_next_microbatch()
        self._begin_action(0, 0.0)
        now = 0.0
        while self._events:
            now = self._events[0][0]
            touched = set()
            # Take in all events of one moment before any process chooses.
            while self._events and self._events[0][0] == now:
                _, _, is_end, action = heapq.heappop(self._events)
                process = self._process_of[action.stage_index]
                if is_end:
                    self._end_action(action, now)
                else:
                    self._processes[process].ready.append(action)
                touched.add(process)
            for number in touched:
                if not self._begin_action(number, now):
                    return self._result(math.inf)
        return self._result(now)

    def _result(self, end_seconds: float) -> Simulation:
        last = self._pipeline.sums([times.optimizer_seconds for times in self._pipeline.stages])
        busy = [p.busy_seconds + step for p, step in zip(self._processes, last, strict=True)]
        peaks = [process.peak_in_flight for process in self._processes]
        return Simulation(self._spans, busy, peaks, end_seconds + max(last))

    def _offer_next_microbatch(self) -> None:
        # Only the oldest one not started, because the rule takes it before all others.
        if self._num_started < self._pipeline.num_microbatches:
            self._processes[0].ready.append(self._actions[0][0][self._num_started])

    def _begin_action(self, number: int, now: float) -> bool:
        """Let a process that is free choose an action; False if it has been idle for too long."""
        process = self._processes[number]
        if process.is_busy or not process.ready:
            return True
        pipeline = self._pipeline
        starts_first = pipeline.starts_first and number == 0
        ready = _first_ones(process.ready) if number else process.ready
        action = choose(ready, process.in_flight, pipeline.limit(number), starts_first)
        if action is None:
            return True
        process.ready.remove(action)
        if number == 0 and action.kind == "F" and action.key.visit != LOSS:
            self._num_started += 1
            self._offer_next_microbatch()
        process.in_flight.add(action.key.microbatch)
        process.peak_in_flight = max(process.peak_in_flight, len(process.in_flight))
        seconds = self._seconds_of(action)
        is_late = now - process.busy_seconds >= self._most_idle[number]
        process.is_busy = True
        process.busy_seconds += seconds
        self._spans.append(Span(action, now, now + seconds))
        self._add_event(now + seconds, True, action)
        return not is_late

    def _end_action(self, action: Action, now: float) -> None:
        process = self._processes[self._process_of[action.stage_index]]
        process.is_busy = False
        if self._is_alone or action.kind == "B" and action.stage_index == process.first_stage:
            process.in_flight.discard(action.key.microbatch)
        following = self._following(action)
        if following is not None:
            self._send(action, following, now)

    def _send(self, action: Action, following: Action, now: float) -> None:
        is_backward = following.kind == "B"
        hops = self._pipeline.backward_hops if is_backward else self._pipeline.forward_hops
        hop = hops[action.stage_index]
        if self._process_of[action.stage_index] == self._process_of[following.stage_index]:
            self._add_event(now, False, following)
            return
        free_at = max(now, self._media_free_at.get(hop.medium, 0.0)) + hop.busy_seconds
        self._media_free_at[hop.medium] = free_at
        self._add_event(free_at + hop.latency_seconds, False, following)

    def _following(self, action: Action) -> Action | None:
        """The action of another stage that becomes ready when the result has arrived."""
        index, (microbatch, visit) = action.stage_index, action.key
        if self._is_alone or (index == 0 and action.kind == "B"):
            return None
        forwards, backwards, losses = range(3)
        if action.kind == "B":
            return self._actions[index - 1][backwards][microbatch]
        if index == 0 and visit == LOSS:
            return self._actions[-1][backwards][microbatch]
        if index == len(self._actions) - 1:
            return self._actions[0][losses][microbatch]
        return self._actions[index + 1][forwards][microbatch]

    def _seconds_of(self, action: Action) -> float:
        times = self._pipeline.stages[action.stage_index]
        if self._is_alone:
            return times.forward_seconds + self._pipeline.loss_seconds + times.backward_seconds
        if action.kind == "B":
            return times.backward_seconds
        if action.key.visit == LOSS:
            return self._pipeline.loss_seconds
        return times.forward_seconds

    def _add_event(self, seconds: float, is_end: bool, action: Action) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (seconds, self._num_events, is_end, action))


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


def _least_seconds_of(pipeline: Pipeline) -> list[float]:
    """For each process, the least seconds from its first action to the end of the step."""
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
