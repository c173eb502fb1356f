"""The recorder: a process's work while steps run, as sums and, if wanted, as spans.

It always sums up the seconds of the process's own actions. Switched on, it also records a span for
each action, message and wait, and adds the spans of a training step up. A span costs microseconds.

One thread at a time runs the stage. Its spans do not overlap, except for spans inside a span.
Channels send from threads of their own; their spans run beside the others.

The device takes the moments at which an action begins and ends, because a call may return before
the device has done its work. The process waits for these moments only when sums or spans are taken.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from msgspec.structs import replace

from ..devices.device import Clock, Moment, device_for
from ..protocol.fields import ACTIONS, Span, SpanKind, Totals
from .rule import Key

APPLY = "ApplyOptimizer"
"""The message at the end of an optimizer's step; its span ends the step."""

EXCHANGED = "ReplicaTensors"
"""The message with gradients or weights from another replica of a stage."""

MOST_SPANS = 2**15
"""Spans kept for one fetch; a long step has fewer."""

# Spans noted before they are added up in the middle of a step.
_MOST_OPEN = 2**12

ActionKind = Literal["forward", "backward", "loss", "layers"]
"""With ``layers`` the coordinator runs the layers of a micro-batch as a replica, between the
forward before them and the loss."""


@dataclass(frozen=True)
class Laps:
    """The seconds and the number of actions, by their kind."""

    seconds: Counter[ActionKind] = field(default_factory=Counter)
    counts: Counter[ActionKind] = field(default_factory=Counter)


@dataclass
class _Step:
    """Sums over the spans of a step before its end.

    After its optimizer has stepped, a stage waits for the next step. This wait belongs to neither.
    So spans after an optimizer's step are held in ``behind``, until an action shows that the step
    goes on.
    """

    start_seconds: float
    end_seconds: float
    seconds: Counter[SpanKind] = field(default_factory=Counter)
    counts: Counter[SpanKind] = field(default_factory=Counter)
    behind: Counter[SpanKind] = field(default_factory=Counter)
    is_training: bool = False
    has_stepped: bool = False
    num_steps: int = 0
    num_tokens: int = 0
    num_microbatches: int = 0
    num_ready: int = 0
    num_choices: int = 0
    received_bytes: int = 0
    from_replicas_bytes: int = 0

    def add(self, span: Span, seconds: float) -> None:
        if self.has_stepped and span.kind not in ACTIONS:
            self.behind[span.kind] += seconds  # type: ignore[assignment]
            return
        self.seconds.update(self.behind)
        self.behind.clear()
        self.seconds[span.kind] += seconds  # type: ignore[assignment]
        self.counts[span.kind] += 1
        self.end_seconds = span.end_seconds
        self.has_stepped = span.message == APPLY
        self.num_steps += self.has_stepped
        # A warm spare does not run micro-batches, and steps with the other replicas.
        self.is_training |= self.has_stepped
        if span.kind == "take":
            self.received_bytes += span.num_bytes
        if span.message == EXCHANGED:
            self.from_replicas_bytes += span.num_bytes


@dataclass(frozen=True)
class _NotedSpan:
    """An ended span.

    Args:
        span: With the moments of the host's clock.
        depth: How many spans it is inside.
        inside_seconds: Seconds of the spans inside it.
        moments: Its begin and end on the device; None if the host's clock gives them.
    """

    span: Span
    depth: int
    inside_seconds: float
    moments: tuple[Moment, Moment] | None


class Recorder:
    """Sums up actions, and records spans while it is switched on.

    Args:
        torch_device: Computes the actions.
        clock: Returns seconds; they only grow.

    Attributes:
        nothing: A span that is not recorded.
        is_on: Whether spans are recorded.
        training_seconds: From the first action to the latest `take_laps`.
        busy_seconds: Seconds of the actions in that time.
    """

    nothing: AbstractContextManager[None] = nullcontext()

    def __init__(self, torch_device: torch.device, clock: Clock | None = None) -> None:
        self.device = device_for(torch_device)
        # Looked up at each call: all spans of a process are on the clock that it reports to its
        # peers.
        self._clock: Clock = clock or (lambda: time.perf_counter())
        self.is_on = False
        self.training_seconds = self.busy_seconds = 0.0
        self._began_seconds: float | None = None
        self._laps = Laps()
        self._keeps_spans = False
        self._totals = Totals()
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._num_dropped = 0
        self._noted: list[_NotedSpan] = []
        # The ended actions, with their begins and ends on the device.
        self._timed: list[tuple[ActionKind, Moment, Moment]] = []
        self._sent: deque[Span] = deque(maxlen=MOST_SPANS)
        self._step: _Step | None = None
        self._depth = 0
        self._inside_seconds = 0.0
        self._free_seconds = 0.0
        self._base: tuple[float, Moment] | None = None

    def action(
        self, kind: ActionKind, key: Key, num_ready: int = 0, stage: int = 0
    ) -> AbstractContextManager[None]:
        """Inside, an action of a stage runs, chosen among ``num_ready``; after an error it is not
        summed."""
        if self._began_seconds is None:
            self._began_seconds = self._clock()
        if not self.is_on:
            return self._timing(kind)
        if self._step is not None:
            self._step.num_ready += num_ready
            self._step.num_choices += 1
        shown: SpanKind = "forward" if kind == "layers" else kind
        return self._open(Span(shown, 0.0, 0.0, *key, stage=stage), kind)

    def take_laps(self) -> Laps:
        """The sums over the actions since the last call; waits for the end of the last action."""
        self._add_up()
        laps, self._laps = self._laps, Laps()
        if self._began_seconds is not None:
            self.training_seconds = self._clock() - self._began_seconds
            self.busy_seconds += laps.seconds.total()
        return laps

    def switch(self, is_on: bool, keeps_spans: bool) -> None:
        """Record from the next step on, or stop recording; the totals stay."""
        if self.is_on and not is_on:
            self._end_step()
        self._add_up()  # spans noted so far belong to the time before
        self.is_on, self._keeps_spans = is_on, keeps_spans
        if not keeps_spans:
            self._spans.clear()
            self._num_dropped = 0

    def begin_step(self) -> None:
        """A step begins, so the one before has ended."""
        if not self.is_on:
            return
        self._end_step()
        self._base = self._common_moment()
        now = self._clock()
        self._depth, self._inside_seconds, self._free_seconds = 0, 0.0, now
        self._step = _Step(now, now)

    def span(
        self,
        kind: SpanKind,
        key: Key | None = None,
        message: str = "",
        num_bytes: int = 0,
        peer: int | None = None,
        arrived_seconds: float | None = None,
        stage: int = 0,
    ) -> AbstractContextManager[None]:
        """Inside, the process does the span's work; after an error the span is not recorded."""
        if not self.is_on:
            return self.nothing
        microbatch, visit = (None, 0) if key is None else key
        return self._open(
            Span(
                kind, 0.0, 0.0, microbatch, visit, message, num_bytes, peer, arrived_seconds, stage
            )
        )

    def note_training(self, num_tokens: int = 0) -> None:
        """Count a micro-batch of a training step; a step without any is left out of the totals."""
        if self._step is not None:
            self._step.is_training = True
            self._step.num_tokens += num_tokens
            self._step.num_microbatches += 1

    def note_sent(
        self,
        peer: int,
        key: Key | None,
        message: str,
        num_bytes: int,
        start_seconds: float,
        stage: int,
    ) -> None:
        """Record a message sent by a channel; any thread may call this."""
        end = self._clock()
        microbatch, visit = (None, 0) if key is None else key
        self._sent.append(
            Span(
                *("send", start_seconds, end, microbatch, visit, message, num_bytes, peer),
                stage=stage,
            )
        )

    def record(self, with_spans: bool) -> tuple[Totals, list[Span], int]:
        """The totals and, if wanted, the spans since the last call and the number of dropped ones.

        This ends the step.
        """
        self._end_step()
        if not with_spans:
            return self._totals, [], 0
        spans, dropped = list(self._spans), self._num_dropped
        self._spans.clear()
        self._num_dropped = 0
        return self._totals, spans, dropped

    def now(self) -> float:
        """Seconds on the clock of the spans."""
        return self._clock()

    def _end_step(self) -> None:
        self._add_up()
        step, self._step = self._step, None
        sent = [self._sent.popleft() for _ in range(len(self._sent))]
        if step is not None and step.is_training:
            for span in sent:
                self._keep(span)
            self._totals = self._totals_with(step, sent)

    def _totals_with(self, step: _Step, sent: list[Span]) -> Totals:
        before = self._totals
        sending_seconds = sum(span.end_seconds - span.start_seconds for span in sent)
        return replace(
            before,
            step_seconds=before.step_seconds + step.end_seconds - step.start_seconds,
            seconds=dict(Counter(before.seconds) + step.seconds),
            counts=dict(Counter(before.counts) + step.counts),
            sending_seconds=before.sending_seconds + sending_seconds,
            sent_bytes=before.sent_bytes + sum(span.num_bytes for span in sent),
            received_bytes=before.received_bytes + step.received_bytes,
            from_replicas_bytes=before.from_replicas_bytes + step.from_replicas_bytes,
            num_steps=before.num_steps + step.num_steps,
            num_microbatches=before.num_microbatches + step.num_microbatches,
            num_tokens=before.num_tokens + step.num_tokens,
            num_ready=before.num_ready + step.num_ready,
            num_choices=before.num_choices + step.num_choices,
        )

    def _add_up(self) -> None:
        """Add the noted spans to the sums, actions with the moments of the device."""
        timed, self._timed = self._timed, []
        for kind, start, end in timed:
            self._laps.seconds[kind] += end.seconds_after(start)  # type: ignore[assignment]
            self._laps.counts[kind] += 1
        noted, self._noted = self._noted, []
        for each in noted if self.is_on else ():
            span = self._placed(each)
            seconds = span.end_seconds - span.start_seconds - each.inside_seconds
            if self._step is not None:
                self._step.add(span, max(0.0, seconds))
            self._keep(span)

    def _placed(self, noted: _NotedSpan) -> Span:
        """The span at its place in time.

        A call may give the device work for later: the next span of the stage begins after this
        work.
        """
        start, end = noted.span.start_seconds, noted.span.end_seconds
        if noted.moments is not None and self._base is not None:
            host_seconds, base = self._base
            start, end = (host_seconds + each.seconds_after(base) for each in noted.moments)
        if noted.depth == 0:
            start = max(start, self._free_seconds)
            end = self._free_seconds = max(end, start)
        return replace(noted.span, start_seconds=start, end_seconds=end)

    def _keep(self, span: Span) -> None:
        if self._keeps_spans:
            self._num_dropped += len(self._spans) == MOST_SPANS
            self._spans.append(span)

    @contextmanager
    def _timing(self, kind: ActionKind) -> Iterator[None]:
        """Inside, an action runs while no spans are recorded; see `_open`."""
        first = self._moment()
        yield
        self._timed.append((kind, first, self._moment()))
        if len(self._timed) >= _MOST_OPEN:
            self._add_up()

    @contextmanager
    def _open(self, span: Span, lap: ActionKind | None = None) -> Iterator[None]:
        """Inside, a span or an action runs; afterwards it is noted, unless it has raised."""
        inside_before, self._inside_seconds = self._inside_seconds, 0.0
        self._depth += 1
        first = self._moment() if span.kind in ACTIONS else None
        start = self._clock()
        try:
            yield
        finally:
            end = self._clock()
            inside, self._inside_seconds = self._inside_seconds, inside_before
            self._depth = max(0, self._depth - 1)
        self._inside_seconds += end - start
        moments = None if first is None else (first, self._moment())
        if lap is not None and moments is not None:
            self._timed.append((lap, *moments))
        if self.is_on:
            span = replace(span, start_seconds=start, end_seconds=end)
            self._noted.append(_NotedSpan(span, self._depth, inside, moments))
        if len(self._noted) >= _MOST_OPEN:
            self._add_up()

    def _moment(self) -> Moment:
        return self.device.moment(self._clock)

    def _common_moment(self) -> tuple[float, Moment]:
        """A moment on both clocks, the host's and the device's."""
        moment = self._moment()
        moment.seconds_after(moment)  # waits until the device has reached it
        return self._clock(), moment
