"""The simulator of one training step, with the rule of the runtime.

The simulation follows the runtime. The coordinator is stage 0 and starts the micro-batches. When a
micro-batch returns, the coordinator runs the rest of it as one action: its own last layers, the
head, the loss, and their backward. A process may have several stages. It runs one ready action at a
time, of any of its stages, and computes while its results travel. A link carries one transfer at a
time.

A window of several batches is played as one step. The coordinator gets a batch after all losses of
the batch before it. Their last backward may wait until the new batch has begun (`loss_waits`), so
the workers have a forward to run meanwhile.

A process takes the forwards of a stage in the order of its micro-batches, and so the backwards; the
coordinator takes losses in the order of all micro-batches. In a line they come in this order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..errors import PlanError
from ..pipeline.rule import Action, Key, choose
from .bounds import least_seconds_of_processes
from .step_model import HERE, Pipeline

MOST_PLAYED = 256
"""The most micro-batches that `predict` simulates."""

LEAST_PLAYED = 64
"""The least simulated micro-batches of a longer step; in a line, four times the number in flight
are enough."""

LOSS = 1
"""Visit of the coordinator's forward with the head and the loss. The runtime works without such a
number, because a micro-batch never has both forwards ready."""


class SimulatedSpan(NamedTuple):
    """An action and when it ran."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Args:
        spans: Every simulated action, in the order of their starts.
        busy_seconds: Seconds of computing of each process, its optimizer steps included.
        peak_in_flight: The most micro-batches in flight on each process.
        step_seconds: From the first action to the end of the slowest optimizer step.
    """

    spans: Sequence[SimulatedSpan]
    busy_seconds: Sequence[float]
    peak_in_flight: Sequence[int]
    step_seconds: float

    @property
    def busy_shares(self) -> list[float]:
        """The busy share of each process in the step."""
        return [busy / self.step_seconds if self.step_seconds else 0 for busy in self.busy_seconds]

    @property
    def bubble(self) -> float:
        """The idle share of all processes' time."""
        # The extrapolated end of a long step may be a hair below its busy seconds.
        return max(0.0, 1 - sum(self.busy_shares) / len(self.busy_seconds))


def simulate(pipeline: Pipeline) -> Simulation:
    """Simulate the whole step."""
    return SimulatedRun(pipeline).play()


def predict_below(pipeline: Pipeline, below: float) -> Simulation | None:
    """The prediction of `predict`, or None as soon as the step cannot be shorter than ``below``."""
    is_short = pipeline.num_microbatches <= MOST_PLAYED
    found = SimulatedRun(pipeline, below).play() if is_short else predict(pipeline)
    return found if found.step_seconds < below else None


def predict(pipeline: Pipeline) -> Simulation:
    """Simulate the step; extrapolate it beyond `MOST_PLAYED` micro-batches.

    Each additional micro-batch takes the mean time of a micro-batch of the second half.
    """
    if pipeline.num_microbatches <= MOST_PLAYED:
        return simulate(pipeline)
    half, whole = _parts(pipeline)
    num_half, num_whole = half.num_microbatches, whole.num_microbatches
    more = (pipeline.num_microbatches - num_whole) / (num_whole - num_half)
    return _continued(simulate(half), simulate(whole), more)


def _parts(pipeline: Pipeline) -> tuple[Pipeline, Pipeline]:
    """The first half of the simulated micro-batches, and all of them, in whole batches. Batches too
    large for this fill the pipeline by themselves, and count as one."""
    size = pipeline.microbatches_of_batch
    num_batches = MOST_PLAYED // 2 // size
    if num_batches:
        half, whole = (
            replace(pipeline, num_microbatches=count * size, num_batches=count)
            for count in (num_batches, 2 * num_batches)
        )
    else:
        # A line repeats itself as soon as it is full; turns of replicas have long rounds.
        enough = max(LEAST_PLAYED, 4 * pipeline.limit(0))
        most = MOST_PLAYED if pipeline.replicas is not None else min(MOST_PLAYED, enough)
        half, whole = (
            replace(pipeline, num_microbatches=count, num_batches=1) for count in (most // 2, most)
        )
    return half, whole


def _continued(half: Simulation, whole: Simulation, more: float) -> Simulation:
    """The simulation of a step that continues after ``whole``, ``more`` times its second half."""
    return Simulation(
        whole.spans,
        [b + more * (b - a) for a, b in zip(half.busy_seconds, whole.busy_seconds, strict=True)],
        whole.peak_in_flight,
        whole.step_seconds + more * (whole.step_seconds - half.step_seconds),
    )


class _Process:
    """The state of a process: ready actions of its stages, micro-batches in flight, and sums."""

    def __init__(self) -> None:
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


class SimulatedRun:
    """A running simulation. Events are arrivals of inputs and ends of actions.

    Args:
        pipeline: The step.
        below: Seconds at which the simulation ends early; the step is infinite then.
    """

    def __init__(self, pipeline: Pipeline, below: float = math.inf) -> None:
        self.pipeline = pipeline
        self._is_alone = pipeline.is_alone
        self._process_of = pipeline.process_of
        self._entries = pipeline.entries
        self._forward_hops, self._backward_hops = pipeline.hops
        self._actions = [
            _actions(number, pipeline.num_microbatches) for number in range(pipeline.num_stages)
        ]
        self._processes = [_Process() for _ in range(pipeline.num_processes)]
        self._most_idle = [math.inf] * len(self._processes)
        if below < math.inf:
            self._most_idle = [below - seconds for seconds in least_seconds_of_processes(pipeline)]
        self._media_free_at: dict[str, float] = {}
        self._events: list[tuple[float, int, bool, Action]] = []
        self._num_events = 0
        self._num_started = 0
        self._num_losses = 0
        self._spans: list[SimulatedSpan] = []
        self._left = _in_order(pipeline)

    def play(self) -> Simulation:
        """The step; it is infinite if the simulation has ended early, at the limit.

        Raises:
            PlanError: If the step never ends, because micro-batches in flight wait for others that
                may not start. A plan with this fault is not known.
        """
        self._offer_next_microbatch()
        self._begin_action(0, 0.0)
        now = 0.0
        while self._events:
            now = self._events[0][0]
            touched = set()
            # Take in all events of one moment before any process chooses.
            while self._events and self._events[0][0] == now:
                _, _, is_end, action = heapq.heappop(self._events)
                process = self._process_of[self._entry_of(action)]
                if is_end:
                    self._end_action(action, now)
                else:
                    self._processes[process].ready.append(action)
                touched.add(process)
            for number in touched:
                if not self._begin_action(number, now):
                    return self._result(math.inf)
        if any(process.in_flight for process in self._processes):
            raise PlanError(
                f"With {self.pipeline.max_in_flight} micro-batches in flight this plan never ends "
                "a step: a worker waits for a micro-batch that may not start on it, because others "
                "fill its places."
            )
        return self._result(now)

    def _result(self, end_seconds: float) -> Simulation:
        last = self.pipeline.sums([times.optimizer_seconds for times in self.pipeline.stages])
        busy = [p.busy_seconds + step for p, step in zip(self._processes, last, strict=True)]
        peaks = [process.peak_in_flight for process in self._processes]
        end_seconds += self.pipeline.exchange_seconds + max(last)
        return Simulation(self._spans, busy, peaks, end_seconds)

    def _offer_next_microbatch(self) -> None:
        # Only the oldest one not started, because the rule takes it before all others.
        if self._num_started < self._num_given:
            self._processes[0].ready.append(self._actions[0][0][self._num_started])

    @property
    def _num_given(self) -> int:
        """The micro-batches of the coordinator's batches up to now. Each batch comes after all
        losses of the batch before it."""
        pipeline, size = self.pipeline, self.pipeline.microbatches_of_batch
        if self._is_alone:
            return pipeline.num_microbatches
        return min(pipeline.num_microbatches, (self._num_losses // size + 1) * size)

    def _begin_action(self, number: int, now: float) -> bool:
        """Let a free process choose an action; False if it has been idle for too long."""
        process = self._processes[number]
        if process.is_busy or not process.ready:
            return True
        action = self._chosen(number, process)
        if action is None:
            return True
        process.ready.remove(action)
        if number == 0 and action.kind == "F" and action.key.visit != LOSS:
            self._num_started += 1
            self._offer_next_microbatch()
        # The backward of a loss that has waited is in no order.
        if not (action.kind == "B" and action.key.visit == LOSS):
            self.note_begun(action)
        process.in_flight.add(action.key.microbatch)
        process.peak_in_flight = max(process.peak_in_flight, len(process.in_flight))
        seconds = self.seconds_of(action)
        is_late = now - process.busy_seconds >= self._most_idle[number]
        process.is_busy = True
        process.busy_seconds += seconds
        self._spans.append(SimulatedSpan(action, now, now + seconds))
        self._add_event(now + seconds, True, action)
        return not is_late

    def _chosen(self, number: int, process: _Process) -> Action | None:
        waiting = None if number else self._waiting_loss(process.ready)
        if waiting is not None:
            return self._beside(waiting, process)
        ready = self.offered(process.ready)
        # The backward of a loss follows at once, even if the loss had to wait for earlier ones.
        losses = [] if number else [each for each in ready if each.key.visit == LOSS]
        if losses and self._following(losses[0]) is None:
            return losses[0]
        limit, starts_first = self.pipeline.limit(number), self.pipeline.starts_first
        starts_first &= number == 0
        first = self.pipeline.num_batches > 1
        return choose(ready, process.in_flight, limit, starts_first, forwards_first=first)

    def _waiting_loss(self, ready: Collection[Action]) -> Action | None:
        """The backward of the last loss of a batch that is not the last one of the window."""
        if self.pipeline.num_batches == 1:
            return None
        return next((a for a in ready if a.kind == "B" and a.key.visit == LOSS), None)

    def _beside(self, waiting: Action, process: _Process) -> Action:
        """The action before a loss's backward that waits: the first micro-batch of the next batch,
        if it may start and has not; otherwise this backward."""
        following = waiting.key.microbatch + 1
        has_room = len(process.in_flight) < self.pipeline.limit(0)
        if self._num_started == following and has_room:
            return self._actions[0][0][following]
        return waiting

    def _waits(self, action: Action) -> bool:
        """Whether the backward of a loss waits until the next batch has begun."""
        behind = action.key.microbatch + 1
        is_last = behind == self.pipeline.num_microbatches
        if is_last or not self.pipeline.loss_waits:
            return False
        return behind % self.pipeline.microbatches_of_batch == 0

    def offered(self, ready: Sequence[Action]) -> Collection[Action]:
        """The choice of a process: of each stage and kind the next action in the order of the
        process's micro-batches."""
        left, entries, found = self._left, self._entries, []
        for action in ready:
            microbatch, visit = action.key
            entry = entries[action.stage_index][microbatch]
            if left[entry, action.kind, visit][-1] == microbatch:
                found.append(action)
        return found

    def note_begun(self, action: Action) -> None:
        """Remove an action from the order of its kind."""
        self._left[self._entry_of(action), action.kind, action.key.visit].pop()

    def _entry_of(self, action: Action) -> int:
        """The entry of an action in the pipeline's stages."""
        return self._entries[action.stage_index][action.key.microbatch]

    def _end_action(self, action: Action, now: float) -> None:
        number = self._process_of[self._entry_of(action)]
        process = self._processes[number]
        process.is_busy = False
        if action.key.visit == LOSS and action.kind == "F":
            self._note_loss()
        following = self._following(action)
        if following is not None:
            self._send(action, following, now)
        if self._ends_here(action, following, number):
            process.in_flight.discard(action.key.microbatch)

    def _note_loss(self) -> None:
        """Count a loss; the last one of a batch lets the next batch begin."""
        self._num_losses += 1
        if self._num_losses % self.pipeline.microbatches_of_batch == 0:
            self._offer_next_microbatch()

    def _ends_here(self, action: Action, following: Action | None, number: int) -> bool:
        """Whether this was the last action of the process for the micro-batch."""
        if following is None or action.kind == "F" or number == 0:
            return following is None
        before = (self._entries[i][action.key.microbatch] for i in range(1, action.stage_index))
        return all(entry == HERE or self._process_of[entry] != number for entry in before)

    def _send(self, action: Action, following: Action, now: float) -> None:
        here, there = self._entry_of(action), self._entry_of(following)
        if self._process_of[here] == self._process_of[there]:
            self._add_event(now, False, following)
            return
        hop = (self._backward_hops if following.kind == "B" else self._forward_hops)[here, there]
        free_at = max(now, self._media_free_at.get(hop.medium, 0.0)) + hop.busy_seconds
        self._media_free_at[hop.medium] = free_at
        self._add_event(free_at + hop.latency_seconds, False, following)

    def _following(self, action: Action) -> Action | None:
        """The next action of the micro-batch; it becomes ready when the result has arrived."""
        index, (microbatch, visit) = action.stage_index, action.key
        if self._is_alone or (index == 0 and action.kind == "B" and visit != LOSS):
            return None
        if visit == LOSS and action.kind == "F" and self._waits(action):
            return Action(index, "B", action.key)
        forwards, backwards, losses = range(3)
        if visit == LOSS:
            last = self._before(len(self._actions), action)
            return self._actions[last][backwards][microbatch] if last else None
        if action.kind == "B":
            return self._actions[self._before(index, action)][backwards][microbatch]
        behind = index + 1
        if behind < len(self._actions) and self._entries[behind][microbatch] == HERE:
            behind += 1
        if behind == len(self._actions):
            return self._actions[0][losses][microbatch]
        return self._actions[behind][forwards][microbatch]

    def _before(self, index: int, action: Action) -> int:
        """The stage that runs the action's micro-batch before a stage."""
        is_here = self._entries[index - 1][action.key.microbatch] == HERE
        return index - 2 if is_here else index - 1

    def seconds_of(self, action: Action) -> float:
        """The duration of an action."""
        times = self.pipeline.stages[self._entry_of(action)]
        if self._is_alone:
            return times.forward_seconds + self.pipeline.loss_seconds + times.backward_seconds
        if action.stage_index == 0 and action.key.visit == LOSS:
            return self._loss_seconds(action)
        more = self._hosted_seconds(action) if action.stage_index == 0 else 0.0
        if action.kind == "B":
            return times.backward_seconds + more
        return times.forward_seconds + more

    def _loss_seconds(self, action: Action) -> float:
        """The duration of a loss with its backward, or of one of them if the backward waits."""
        forward, backward = self._hosted_loss_seconds(action)
        backward += self.pipeline.loss_backward_seconds
        forward += self.pipeline.loss_seconds - self.pipeline.loss_backward_seconds
        if action.kind == "B":
            return backward
        return forward if self._waits(action) else forward + backward

    def _hosted_seconds(self, action: Action) -> float:
        """The seconds of the coordinator's replica of a stage inside an action before the workers'
        layers."""
        if not self._is_hosted(action) or self.pipeline.hosted != 1:
            return 0.0
        own = self.pipeline.own_times
        return own.backward_seconds if action.kind == "B" else own.forward_seconds

    def _hosted_loss_seconds(self, action: Action) -> tuple[float, float]:
        """The seconds of the coordinator's replica of a stage inside a loss and inside its
        backward."""
        last = len(self._actions) - 1
        if not self._is_hosted(action) or self.pipeline.hosted != last:
            return 0.0, 0.0
        own, first = self.pipeline.own_times, self.pipeline.stages[0]
        if last == 1:
            # The micro-batch stayed here, so its whole backward follows the loss.
            return 0.0, own.backward_seconds + first.backward_seconds
        return own.forward_seconds, own.backward_seconds

    def _is_hosted(self, action: Action) -> bool:
        hosted = self.pipeline.hosted
        return hosted is not None and self._entries[hosted][action.key.microbatch] == HERE

    def _add_event(self, seconds: float, is_end: bool, action: Action) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (seconds, self._num_events, is_end, action))


def _in_order(pipeline: Pipeline) -> dict[tuple[int, str, int], list[int]]:
    """For each entry, kind and visit of a pipeline the micro-batches, the last one first."""
    found: dict[tuple[int, str, int], list[int]] = {}
    for microbatch in reversed(range(pipeline.num_microbatches)):
        found.setdefault((0, "F", LOSS), []).append(microbatch)
        way = pipeline.way(microbatch)
        for entry in way:
            found.setdefault((entry, "F", 0), []).append(microbatch)
        for entry in way if len(way) > 1 else []:
            found.setdefault((entry, "B", 0), []).append(microbatch)
    return found
