"""Records what one stage does while steps run: microseconds for each span, nothing while off.

One thread at a time runs the stage, and its spans do not overlap, except those inside others; what
channels send goes on beside them, from their own threads.

Measures what actions take while a step runs, without making the device wait for it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from msgspec.structs import replace

from ..protocol.fields import ACTIONS, Span, SpanKind, Totals
from .rule import Key

# What somebody fetches at the end of a step, and more than a long step has.
MOST_SPANS = 2**15
# Of one step; where a step is longer, its spans are added up before its end.
_MOST_OPEN = 2**12

Clock = Callable[[], float]


@dataclass
class _Step:
    """A step that has not ended. What follows the optimizer belongs to it only if it goes on.

    After its optimizer has stepped, a stage waits for the next step: that is no part of this one.
    """

    start_seconds: float
    end_seconds: float
    seconds: Counter[SpanKind] = field(default_factory=Counter)
    counts: Counter[SpanKind] = field(default_factory=Counter)
    behind: Counter[SpanKind] = field(default_factory=Counter)
    is_training: bool = False
    has_stepped: bool = False
    num_steps: int = 0
    received_bytes: int = 0

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
        if span.kind == "take":
            self.received_bytes += span.num_bytes


APPLY = "ApplyOptimizer"
"""The message whose span ends an optimizer's step."""


@dataclass(frozen=True)
class _Recorded:
    """A span as it was noted: how deep inside others, and what those inside it took."""

    span: Span
    depth: int
    inside_seconds: float
    marks: tuple[Any, Any] | None


class Recorder:
    """Records spans and adds them up, from `switch` on until it is switched off.

    Args:
        device: Where actions compute. CUDA marks their moments itself, since a function returns
            before the device has done what it asks for.
        clock: Seconds that only grow.

    Attributes:
        nothing: A span that is not recorded.
    """

    nothing: AbstractContextManager[None] = nullcontext()

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        self.device = device
        # Looked up at each call, so that all of a process's spans are on the clock that it tells.
        self._clock: Clock = clock or (lambda: time.perf_counter())
        self.is_on = False
        self._keeps_spans = False
        self._totals = Totals()
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._num_dropped = 0
        self._open: list[_Recorded] = []
        self._sent: deque[Span] = deque(maxlen=MOST_SPANS)
        self._step: _Step | None = None
        self._tokens = self._microbatches = self._ready = self._choices = 0
        self._depth = 0
        self._inside_seconds = 0.0
        self._free_seconds = 0.0
        self._base: tuple[float, Any] | None = None

    def switch(self, is_on: bool, keeps_spans: bool) -> None:
        """Record from the next step on, or no longer; sums stay."""
        if self.is_on and not is_on:
            self._end_step()
        self._add_up()  # what is noted already belongs to before
        self.is_on, self._keeps_spans = is_on, keeps_spans
        if not keeps_spans:
            self._spans.clear()
            self._num_dropped = 0

    def begin_step(self) -> None:
        """A step begins; that of before, if there is one, has ended."""
        if not self.is_on:
            return
        self._end_step()
        self._base = self._marked_moment()
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
    ) -> AbstractContextManager[None]:
        """Inside, something is done; what raises is not recorded."""
        if not self.is_on:
            return self.nothing
        microbatch, visit = (None, 0) if key is None else key
        found = Span(kind, 0.0, 0.0, microbatch, visit, message, num_bytes, peer, arrived_seconds)
        return _Open(self, found)

    def note_training(self, num_tokens: int = 0) -> None:
        """A forward of a training step; steps that have none do not count."""
        if self._step is not None:
            self._step.is_training = True
            self._tokens += num_tokens
            self._microbatches += 1

    def note_choice(self, num_ready: int) -> None:
        """An action was chosen among so many."""
        if self.is_on:
            self._ready += num_ready
            self._choices += 1

    def note_sent(
        self, peer: int, key: Key, message: str, num_bytes: int, start_seconds: float
    ) -> None:
        """A channel has sent something; any thread may say so."""
        end = self._clock()
        self._sent.append(Span("send", start_seconds, end, *key, message, num_bytes, peer))

    def record(self, with_spans: bool) -> tuple[Totals, list[Span], int]:
        """The sums until now and, if wanted, the spans since the last time with the number of
        those that were dropped."""
        self._end_step()
        if not with_spans:
            return self._totals, [], 0
        spans, dropped = list(self._spans), self._num_dropped
        self._spans.clear()
        self._num_dropped = 0
        return self._totals, spans, dropped

    def now(self) -> float:
        """What the clock of the spans shows."""
        return self._clock()

    def _end_step(self) -> None:
        self._add_up()
        step, self._step = self._step, None
        sent = [self._sent.popleft() for _ in range(len(self._sent))]
        if step is not None and step.is_training:
            for span in sent:
                self._keep(span)
            self._totals = self._with(step, sent)
        self._tokens = self._microbatches = self._ready = self._choices = 0

    def _with(self, step: _Step, sent: list[Span]) -> Totals:
        before = self._totals
        return replace(
            before,
            step_seconds=before.step_seconds + step.end_seconds - step.start_seconds,
            seconds=dict(Counter(before.seconds) + step.seconds),
            counts=dict(Counter(before.counts) + step.counts),
            sending_seconds=before.sending_seconds
            + sum(span.end_seconds - span.start_seconds for span in sent),
            sent_bytes=before.sent_bytes + sum(span.num_bytes for span in sent),
            received_bytes=before.received_bytes + step.received_bytes,
            num_steps=before.num_steps + step.num_steps,
            num_microbatches=before.num_microbatches + self._microbatches,
            num_tokens=before.num_tokens + self._tokens,
            num_ready=before.num_ready + self._ready,
            num_choices=before.num_choices + self._choices,
        )

    def _add_up(self) -> None:
        """Take the noted spans into the step, those of the device with its own moments."""
        noted, self._open = self._open, []
        for each in noted:
            span = self._placed(each)
            seconds = span.end_seconds - span.start_seconds - each.inside_seconds
            if self._step is not None:
                self._step.add(span, max(0.0, seconds))
            self._keep(span)

    def _placed(self, noted: _Recorded) -> Span:
        """The span where it was. A function that packs what the device has yet to compute begins,
        as far as this stage goes, when that is there."""
        span = noted.span
        if noted.marks is not None and self._base is not None:
            host, base = self._base
            noted.marks[1].synchronize()
            start, end = (host + base.elapsed_time(mark) / 1000 for mark in noted.marks)
            span = replace(span, start_seconds=start, end_seconds=end)
        if noted.depth == 0:
            start = max(span.start_seconds, self._free_seconds)
            end = max(span.end_seconds, start)
            self._free_seconds = end
            if (start, end) != (span.start_seconds, span.end_seconds):
                span = replace(span, start_seconds=start, end_seconds=end)
        return span

    def _keep(self, span: Span) -> None:
        if self._keeps_spans:
            self._num_dropped += len(self._spans) == MOST_SPANS
            self._spans.append(span)

    def _note(self, recorded: _Recorded) -> None:
        self._open.append(recorded)
        if len(self._open) >= _MOST_OPEN:
            self._add_up()

    def _marked_moment(self) -> tuple[float, Any] | None:
        """A moment that both clocks know, the device's and ours."""
        if self.device.type != "cuda":
            return None
        mark = self._mark()
        mark.synchronize()
        return self._clock(), mark

    def _mark(self) -> Any:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self.device))
        return mark


class _Open(AbstractContextManager[None]):
    """A span that has not ended."""

    __slots__ = ("_inside_before", "_mark", "_recorder", "_span", "_start")

    def __init__(self, recorder: Recorder, span: Span) -> None:
        self._recorder = recorder
        self._span = span

    def __enter__(self) -> None:
        recorder = self._recorder
        self._inside_before, recorder._inside_seconds = recorder._inside_seconds, 0.0
        recorder._depth += 1
        on_device = recorder._base is not None and self._span.kind in ACTIONS
        self._mark = recorder._mark() if on_device else None
        self._start = recorder._clock()

    def __exit__(self, kind: Any, *_: Any) -> None:
        recorder, end = self._recorder, self._recorder._clock()
        inside, recorder._inside_seconds = recorder._inside_seconds, self._inside_before
        recorder._depth = max(0, recorder._depth - 1)
        if kind is not None:
            return
        recorder._inside_seconds += end - self._start
        marks = None if self._mark is None else (self._mark, recorder._mark())
        span = replace(self._span, start_seconds=self._start, end_seconds=end)
        recorder._note(_Recorded(span, recorder._depth, inside, marks))


Kind = Literal["forward", "backward", "loss"]


@dataclass(frozen=True)
class Laps:
    """The seconds of each action that was measured, by its kind."""

    found: Mapping[Kind, Sequence[float]] = field(default_factory=dict)

    def seconds(self, kind: Kind) -> float:
        """All actions of a kind together."""
        return sum(self.found.get(kind, ()))

    def count(self, kind: Kind) -> int:
        """How many actions of a kind there were."""
        return len(self.found.get(kind, ()))


class Stopwatch:
    """Adds up what actions take until `take`.

    On CUDA the device marks the moments itself, since a function returns before the device has
    done what it asks for; elsewhere it is the clock's word.

    Args:
        device: Where the actions compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[tuple[Kind, Callable[[], float]]] = []

    @contextmanager
    def measuring(self, kind: Kind) -> Iterator[None]:
        """Inside, an action runs; one that raises does not count."""
        end = _cuda_lap(self._device) if self._device.type == "cuda" else _clock_lap()
        yield
        self._laps.append((kind, end()))

    def take(self) -> Laps:
        """What was measured since the last call. On CUDA it waits for the last action's end."""
        laps, self._laps = self._laps, []
        found: dict[Kind, list[float]] = {}
        for kind, seconds in laps:
            found.setdefault(kind, []).append(seconds())
        return Laps(found)


def _clock_lap() -> Callable[[], Callable[[], float]]:
    """Begin a lap; what is returned ends it, and what that returns knows its seconds."""
    start = time.perf_counter()

    def end() -> Callable[[], float]:
        seconds = time.perf_counter() - start
        return lambda: seconds

    return end


def _cuda_lap(device: torch.device) -> Callable[[], Callable[[], float]]:
    """The same by events in the device's stream."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(torch.cuda.current_stream(device))

    def seconds() -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000

    def end() -> Callable[[], float]:
        stop.record(torch.cuda.current_stream(device))
        return seconds

    return end
