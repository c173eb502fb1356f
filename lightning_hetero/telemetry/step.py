"""One training step as it happened: what every stage did when, on the coordinator's clock.

Two clocks become one: the midpoint of the ping with the least round trip, from time to time.

A peer that is asked at ``asked`` and heard at ``heard`` has told its time somewhere between; that
it was the midpoint is wrong by half the round trip at most. Clocks drift against each other, by
some milliseconds a minute, so each stretch of time has its own best ping, and between two of them
the offset goes straight.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from ..errors import ChannelError
from ..plan import COORDINATOR, Plan
from ..protocol.fields import ACTIONS, Span, SpanKind
from ..transport.link_probe import ClockSample

WINDOW_SECONDS = 1.0
"""Pings of so short a time are of one offset: clocks of bad machines drift by 0.1 ms in it."""


@dataclass(frozen=True)
class Knot:
    """What one ping says: at this moment of the peer's clock, how much it is ahead of ours."""

    moment_seconds: float
    offset_seconds: float
    error_seconds: float

    @classmethod
    def of(cls, sample: ClockSample) -> Knot:
        """The midpoint, and how wrong it can be."""
        middle = (sample.asked_seconds + sample.heard_seconds) / 2
        error = (sample.heard_seconds - sample.asked_seconds) / 2
        return cls(sample.told_seconds, sample.told_seconds - middle, error)


@dataclass(frozen=True)
class ClockMap:
    """Turns a peer's moments into ours."""

    knots: Sequence[Knot]

    def ours(self, moment_seconds: float) -> float:
        """The same moment on our clock."""
        return moment_seconds - self.offset_at(moment_seconds)

    def offset_at(self, moment_seconds: float) -> float:
        """How much the peer's clock is ahead of ours when it shows this."""
        behind = bisect(self.knots, moment_seconds, key=lambda knot: knot.moment_seconds)
        if behind == 0 or behind == len(self.knots):
            return self.knots[max(0, behind - 1)].offset_seconds
        start, end = self.knots[behind - 1], self.knots[behind]
        share = (moment_seconds - start.moment_seconds) / (
            end.moment_seconds - start.moment_seconds
        )
        return start.offset_seconds + share * (end.offset_seconds - start.offset_seconds)

    @property
    def error_seconds(self) -> float:
        """How wrong the worst of its pings can be."""
        return max(knot.error_seconds for knot in self.knots)


SAME_CLOCK = ClockMap([Knot(0.0, 0.0, 0.0)])


def align(samples: Iterable[ClockSample], window_seconds: float = WINDOW_SECONDS) -> ClockMap:
    """The map that pings give.

    Raises:
        ChannelError: If there are none.
    """
    groups: list[list[Knot]] = []
    for knot in sorted(map(Knot.of, samples), key=lambda knot: knot.moment_seconds):
        if not groups or knot.moment_seconds - groups[-1][0].moment_seconds > window_seconds:
            groups.append([])
        groups[-1].append(knot)
    if not groups:
        raise ChannelError(
            "A worker has not told what its clock shows, so its times cannot be put beside those "
            "of others; is its connection alive?"
        )
    return ClockMap([min(group, key=lambda knot: knot.error_seconds) for group in groups])


_LETTERS: dict[SpanKind, str] = {"forward": "F", "backward": "B", "loss": "L"}


@dataclass(frozen=True)
class StageSpans:
    """What one stage did in a step.

    Args:
        stage: Its number; 0 is the coordinator.
        worker: Who serves it.
        layers: Half-open range.
        spans: In the order of their starts.
        clock: What has put them on the coordinator's clock.
    """

    stage: int
    worker: str
    layers: tuple[int, int]
    spans: Sequence[Span]
    clock: ClockMap = SAME_CLOCK

    @property
    def actions(self) -> list[Span]:
        """What it computed."""
        return [span for span in self.spans if span.kind in ACTIONS]

    def seconds(self, *kinds: SpanKind) -> float:
        """All spans of these kinds together, what is inside others counted once."""
        total, free = 0.0, float("-inf")
        for span in self.spans:
            if span.kind in kinds:
                total += max(0.0, span.end_seconds - max(span.start_seconds, free))
                free = max(free, span.end_seconds)
        return total

    @property
    def computing_seconds(self) -> float:
        """Its actions, without what they waited for and packed on the way."""
        inside = (span for span in self.spans if span.kind in ("wait", "pack"))
        actions = self.actions
        lost = sum(_seconds(span) for span in inside if any(_is_in(span, a) for a in actions))
        return self.seconds(*ACTIONS) - lost

    def name_of(self, span: Span) -> str:
        """As plans of work call it: ``2F0`` is the forward of stage 2 on micro-batch 0."""
        if span.microbatch is None or span.kind not in _LETTERS:
            return span.message or span.kind
        visit = f".{span.visit}" if span.visit else ""
        return f"{self.stage}{_LETTERS[span.kind]}{span.microbatch}{visit}"


@dataclass(frozen=True)
class RecordedStep:
    """A step.

    Args:
        step: Optimizer steps before it.
        start_seconds: When Lightning began with its first batch.
        stages: The coordinator first.
        num_dropped: Spans that were too many to be kept.
    """

    step: int
    start_seconds: float
    stages: Sequence[StageSpans]
    num_dropped: int = 0

    @cached_property
    def end_seconds(self) -> float:
        """When the last stage's optimizer had stepped."""
        ends = [span.end_seconds for stage in self.stages for span in stage.actions]
        return max(ends, default=self.start_seconds)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.start_seconds

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they computed nothing."""
        busy = sum(stage.computing_seconds for stage in self.stages)
        return 1 - busy / (len(self.stages) * self.seconds) if self.seconds > 0 else 0.0


def recorded_step(
    step: int,
    start_seconds: float,
    plan: Plan,
    spans: Mapping[int, Iterable[Span]],
    clocks: Mapping[int, ClockMap],
    num_dropped: int = 0,
) -> RecordedStep:
    """A step from what the stages said, each on its own clock.

    Args:
        spans: By the stages' numbers; what is before or behind the step is left out.
        clocks: Of the workers, by the same numbers.
    """
    local = next((stage for stage in plan.stages if stage.is_local), None)
    stages = [StageSpans(0, COORDINATOR, local.layers if local else (0, 0), [*spans[0]])]
    for number, stage in enumerate(plan.remote_stages, start=1):
        clock = clocks[number]
        ours = [_on_our_clock(span, clock) for span in spans[number]]
        stages.append(StageSpans(number, stage.worker, stage.layers, ours, clock))
    whole = RecordedStep(step, start_seconds, stages, num_dropped)
    cut = [_within(stage, start_seconds, whole.end_seconds) for stage in stages]
    return RecordedStep(step, start_seconds, cut, num_dropped)


def _on_our_clock(span: Span, clock: ClockMap) -> Span:
    arrived = span.arrived_seconds
    return replace(
        span,
        start_seconds=clock.ours(span.start_seconds),
        end_seconds=clock.ours(span.end_seconds),
        arrived_seconds=None if arrived is None else clock.ours(arrived),
    )


def _within(stage: StageSpans, start: float, end: float) -> StageSpans:
    """Waiting that began before the step, or ends behind it, counts as far as it is in it."""
    cut = [
        replace(
            span,
            start_seconds=max(span.start_seconds, start),
            end_seconds=min(span.end_seconds, end),
        )
        for span in stage.spans
        if span.end_seconds > start and span.start_seconds < end
    ]
    ordered = sorted(cut, key=lambda span: (span.start_seconds, -span.end_seconds))
    return StageSpans(stage.stage, stage.worker, stage.layers, ordered, stage.clock)


def _seconds(span: Span) -> float:
    return span.end_seconds - span.start_seconds


def _is_in(span: Span, other: Span) -> bool:
    return other.start_seconds <= span.start_seconds and span.end_seconds <= other.end_seconds
