"""The simulator: plays one training step of a pipeline, action by action, with the runtime's rule.

As in the runtime: the coordinator is stage 0, starts the micro-batches, and when one returns runs
all that is left of it, its own last layers if it has those, the head, the loss, and their backward
at once; a stage runs one action at a time; what it sends travels while it goes on; a link carries
one thing at a time.

What no plan can beat: bounds from the devices' speeds, from memory, from links, from order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..errors import PlanError
from ..pipeline.rule import Action, Key, choose

MOST_PLAYED = 256
"""Micro-batches that `predict` plays."""

LOSS = 1
"""Visit of the coordinator's forward that ends with the head and the loss; the runtime needs no
such number, since no micro-batch has both forwards ready."""


@dataclass(frozen=True)
class StageTimes:
    """What one stage takes for one micro-batch, and for its optimizer's step at the end."""

    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float = 0.0


@dataclass(frozen=True)
class Hop:
    """One boundary in one direction, for one micro-batch.

    Args:
        medium: Hops of one medium wait for each other.
        busy_seconds: How long the medium is taken.
        latency_seconds: How long it travels besides.
    """

    medium: str
    busy_seconds: float
    latency_seconds: float = 0.0


@dataclass(frozen=True)
class Pipeline:
    """One training step to be played.

    Args:
        stages: The coordinator's own part first, as far as it comes before the workers' layers.
        loss_seconds: What the coordinator does behind those, forward and backward: the head and
            the loss, and the last layers where it has them.
        forward_hops: From each stage to the next one, and from the last back to the coordinator.
        backward_hops: From each stage to the one before, and from the coordinator (first) to the
            last stage. Entry i leaves stage i, as in ``forward_hops``.
        num_microbatches: Pieces of the batch.
        max_in_flight: As in the plan.
        max_started: As in the plan; None for ``max_in_flight``.
        starts_first: Whether the coordinator begins micro-batches as early as it may: in the
            runtime, where it has no layers before the workers'. See `choose`.
    """

    stages: Sequence[StageTimes]
    loss_seconds: float
    forward_hops: Sequence[Hop]
    backward_hops: Sequence[Hop]
    num_microbatches: int
    max_in_flight: int
    starts_first: bool = False
    max_started: int | None = None

    def __post_init__(self) -> None:
        if not len(self.stages) == len(self.forward_hops) == len(self.backward_hops):
            raise PlanError(
                f"A pipeline of {len(self.stages)} stages has {len(self.forward_hops)} forward and "
                f"{len(self.backward_hops)} backward hops; it needs one of each per stage."
            )

    def limit(self, index: int) -> int:
        """How many micro-batches a stage may have in flight."""
        if index == 0 and self.max_started is not None:
            return self.max_started
        return self.max_in_flight

    @property
    def is_alone(self) -> bool:
        """Whether the coordinator has no other stage, so that nothing is handed over."""
        return len(self.stages) == 1


class Span(NamedTuple):
    """An action and when it ran."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Simulation:
    """What a step would be like.

    Args:
        spans: Every action that was played, in the order of their starts.
        busy_seconds: How long each stage computed, its optimizer's step included.
        peak_in_flight: The most micro-batches that each stage had in flight.
        step_seconds: From the first action to the end of the slowest optimizer's step.
    """

    spans: Sequence[Span]
    busy_seconds: Sequence[float]
    peak_in_flight: Sequence[int]
    step_seconds: float

    @property
    def busy_shares(self) -> list[float]:
        """How much of the step each stage computed."""
        return [busy / self.step_seconds if self.step_seconds else 0 for busy in self.busy_seconds]

    @property
    def bubble(self) -> float:
        """The idle share of all stages' time."""
        return 1 - sum(self.busy_shares) / len(self.busy_seconds)


def simulate(pipeline: Pipeline) -> Simulation:
    """Play the step."""
    return _Run(pipeline).play()


def predict(pipeline: Pipeline) -> Simulation:
    """Play the step; of a long one the beginning, since it goes on as it went.

    Beyond `MOST_PLAYED` micro-batches each one more takes what those of the second half took.
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


class _Stage:
    """What a stage could do now, and what it has done."""

    def __init__(self, index: int, num_microbatches: int) -> None:
        keys = [Key(microbatch) for microbatch in range(num_microbatches)]
        self.forwards = [Action(index, "F", key) for key in keys]
        self.backwards = [Action(index, "B", key) for key in keys]
        # Only the coordinator has them, and thousands of stages are made in a search.
        self.losses = [Action(index, "F", Key(key.microbatch, LOSS)) for key in keys if index == 0]
        self.ready: list[Action] = []
        self.in_flight: set[int] = set()
        self.peak_in_flight = 0
        self.busy_seconds = 0.0
        self.is_busy = False


class _Run:
    """A step that is being played. Events are arrivals of inputs and ends of actions."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._is_alone = pipeline.is_alone
        self._stages = [
            _Stage(index, pipeline.num_microbatches) for index in range(len(pipeline.stages))
        ]
        self._media_free_at: dict[str, float] = {}
        self._events: list[tuple[float, int, bool, Action]] = []
        self._num_events = 0
        self._num_started = 0
        self._spans: list[Span] = []

    def play(self) -> Simulation:
        self._offer_next_microbatch()
        self._begin_action(0, 0.0)
        now = 0.0
        while self._events:
            now = self._events[0][0]
            touched = set()
            # All that happens at one moment is known before anyone chooses.
            while self._events and self._events[0][0] == now:
                _, _, is_end, action = heapq.heappop(self._events)
                if is_end:
                    self._end_action(action, now)
                else:
                    self._stages[action.stage_index].ready.append(action)
                touched.add(action.stage_index)
            for index in touched:
                self._begin_action(index, now)
        return self._result(now)

    def _result(self, end_seconds: float) -> Simulation:
        last = [times.optimizer_seconds for times in self._pipeline.stages]
        busy = [s.busy_seconds + step for s, step in zip(self._stages, last, strict=True)]
        peaks = [stage.peak_in_flight for stage in self._stages]
        return Simulation(self._spans, busy, peaks, end_seconds + max(last))

    def _offer_next_microbatch(self) -> None:
        # Only the oldest that has not begun: the rule would take none of the others before it.
        if self._num_started < self._pipeline.num_microbatches:
            self._stages[0].ready.append(self._stages[0].forwards[self._num_started])

    def _begin_action(self, index: int, now: float) -> None:
        stage = self._stages[index]
        if stage.is_busy or not stage.ready:
            return
        pipeline = self._pipeline
        starts_first = pipeline.starts_first and index == 0
        action = choose(stage.ready, stage.in_flight, pipeline.limit(index), starts_first)
        if action is None:
            return
        stage.ready.remove(action)
        if index == 0 and action.kind == "F" and action.key.visit != LOSS:
            self._num_started += 1
            self._offer_next_microbatch()
        stage.in_flight.add(action.key.microbatch)
        stage.peak_in_flight = max(stage.peak_in_flight, len(stage.in_flight))
        seconds = self._seconds_of(action)
        stage.is_busy = True
        stage.busy_seconds += seconds
        self._spans.append(Span(action, now, now + seconds))
        self._add_event(now + seconds, True, action)

    def _end_action(self, action: Action, now: float) -> None:
        stage = self._stages[action.stage_index]
        stage.is_busy = False
        if action.kind == "B" or self._is_alone:
            stage.in_flight.discard(action.key.microbatch)
        following = self._following(action)
        if following is not None:
            self._send(action, following, now)

    def _send(self, action: Action, following: Action, now: float) -> None:
        is_backward = following.kind == "B"
        hops = self._pipeline.backward_hops if is_backward else self._pipeline.forward_hops
        hop = hops[action.stage_index]
        free_at = max(now, self._media_free_at.get(hop.medium, 0.0)) + hop.busy_seconds
        self._media_free_at[hop.medium] = free_at
        self._add_event(free_at + hop.latency_seconds, False, following)

    def _following(self, action: Action) -> Action | None:
        """What becomes possible elsewhere when the action's result has arrived."""
        index, (microbatch, visit) = action.stage_index, action.key
        if self._is_alone or (index == 0 and action.kind == "B"):
            return None
        if action.kind == "B":
            return self._stages[index - 1].backwards[microbatch]
        if index == 0 and visit == LOSS:
            return self._stages[-1].backwards[microbatch]
        if index == len(self._stages) - 1:
            return self._stages[0].losses[microbatch]
        return self._stages[index + 1].forwards[microbatch]

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
