"""A recorded training step: the work of every process over time, on the coordinator's clock.

Pings put the workers' times on this clock. The coordinator asks at ``asked`` and hears the answer
at ``heard``; the peer read its clock somewhere between. The midpoint is wrong by at most half the
round trip. Clocks drift against each other by some milliseconds a minute, so each second has its
own best ping (the one with the shortest round trip), and the offset between two of them is
interpolated linearly.

The planner's simulator predicts a step from the same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace
from numpy import interp

from ..errors import ChannelError, PlanError
from ..pipeline.placement import Placement
from ..pipeline.rule import Action
from ..plan import Plan
from ..planner.bounds import least_bottleneck
from ..planner.candidates import Costs
from ..planner.feasibility import as_measured, candidate_of
from ..planner.profile import Profile
from ..planner.search import speeds_of
from ..planner.simulation import LOSS
from ..planner.step_model import Speed
from ..protocol.fields import ACTIONS, ClockSample, Span, SpanKind
from .layer_ranges import Ranges, ranges_of

WINDOW_SECONDS = 1.0
"""Pings within this time share one offset: even a bad clock drifts by only 0.1 ms in it."""


@dataclass(frozen=True)
class Knot:
    """One ping: the peer's clock at ``moment_seconds`` is ``offset_seconds`` ahead of ours."""

    moment_seconds: float
    offset_seconds: float
    error_seconds: float

    @classmethod
    def of(cls, sample: ClockSample) -> Knot:
        """The knot at the midpoint of a ping, with its largest possible error."""
        middle = (sample.asked_seconds + sample.heard_seconds) / 2
        error = (sample.heard_seconds - sample.asked_seconds) / 2
        return cls(sample.told_seconds, sample.told_seconds - middle, error)


@dataclass(frozen=True)
class ClockMap:
    """Converts times of a peer's clock to our clock."""

    knots: Sequence[Knot]

    def ours(self, moment_seconds: float) -> float:
        """The same moment on our clock."""
        return moment_seconds - self.offset_at(moment_seconds)

    def offset_at(self, moment_seconds: float) -> float:
        """How far the peer's clock is ahead of ours when it shows this moment."""
        moments = [knot.moment_seconds for knot in self.knots]
        return float(interp(moment_seconds, moments, [knot.offset_seconds for knot in self.knots]))

    @property
    def error_seconds(self) -> float:
        """The largest possible error of any of its pings."""
        return max(knot.error_seconds for knot in self.knots)


SAME_CLOCK = ClockMap([Knot(0.0, 0.0, 0.0)])


def align(samples: Iterable[ClockSample]) -> ClockMap:
    """The clock map from the pings of one peer.

    Raises:
        ChannelError: If the pings are missing.
    """
    groups: list[list[Knot]] = []
    for knot in sorted(map(Knot.of, samples), key=lambda knot: knot.moment_seconds):
        if not groups or knot.moment_seconds - groups[-1][0].moment_seconds > WINDOW_SECONDS:
            groups.append([])
        groups[-1].append(knot)
    if not groups:
        raise ChannelError(
            "A worker has not answered any ping, so its times cannot be compared with the "
            "others' times; check whether its connection is alive."
        )
    return ClockMap([min(group, key=lambda knot: knot.error_seconds) for group in groups])


_LETTERS: dict[SpanKind, str] = {"forward": "F", "backward": "B", "loss": "L"}


@dataclass(frozen=True)
class ProcessSpans:
    """The work of one process in a step, in all its stages.

    Args:
        number: The number of the process; 0 is the coordinator. A worker keeps it when layers move.
        name: The name of the process in the plan.
        ranges: Its layers.
        spans: The spans, ordered by their starts.
        clock: The map of their times to the coordinator's clock.
    """

    number: int
    name: str
    ranges: Ranges
    spans: Sequence[Span]
    clock: ClockMap = SAME_CLOCK

    @property
    def actions(self) -> list[Span]:
        """The spans of computation."""
        return [span for span in self.spans if span.kind in ACTIONS]

    def seconds(self, *kinds: SpanKind) -> float:
        """The time of all spans of these kinds; time in which spans overlap counts once."""
        total, free = 0.0, float("-inf")
        for span in self.spans:
            if span.kind in kinds:
                total += max(0.0, span.end_seconds - max(span.start_seconds, free))
                free = max(free, span.end_seconds)
        return total

    @property
    def computing_seconds(self) -> float:
        """The time of its actions, without the waiting and packing inside them."""
        inside = (span for span in self.spans if span.kind in ("wait", "pack"))
        actions = self.actions
        lost = sum(_seconds(span) for span in inside if any(_is_in(span, a) for a in actions))
        return self.seconds(*ACTIONS) - lost


def name_of(span: Span) -> str:
    """The short name of an action: ``2F0`` is the forward of stage 2 on micro-batch 0."""
    if span.microbatch is None or span.kind not in _LETTERS:
        return span.message or span.kind
    visit = f".{span.visit}" if span.visit else ""
    return f"{span.stage}{_LETTERS[span.kind]}{span.microbatch}{visit}"


@dataclass(frozen=True)
class Absence:
    """The time from the loss of a worker until another process had caught up in its place.

    Args:
        number: The number of the worker.
        start_seconds: When the loss was noted.
        restored_seconds: When another process had the layers and began to repeat; the end, if this
            never happened.
        end_seconds: When the other process had caught up, or was lost too.
        reason: Why the worker was lost.
        repeated: The repeated work, in words.
    """

    number: int
    start_seconds: float
    restored_seconds: float
    end_seconds: float
    reason: str
    repeated: str


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step.

    Args:
        step: The number of optimizer steps before it.
        start_seconds: When Lightning started its first batch.
        processes: The coordinator, then the workers with layers.
        num_dropped: How many spans the recorders dropped because their memory was full.
        absences: When workers were lost in the step, and replaced.
        num_batches: The batches of its accumulation window.
    """

    step: int
    start_seconds: float
    processes: Sequence[ProcessSpans]
    num_dropped: int = 0
    absences: Sequence[Absence] = ()
    num_batches: int = 1

    @property
    def first_action_seconds(self) -> float:
        """When the first action of any process started."""
        starts = [span.start_seconds for each in self.processes for span in each.actions]
        return min(starts, default=self.start_seconds)

    @cached_property
    def end_seconds(self) -> float:
        """When the last action of any process ended."""
        ends = [span.end_seconds for each in self.processes for span in each.actions]
        return max(ends, default=self.start_seconds)

    def with_absences(self, absences: Iterable[Absence]) -> RecordedStep:
        """The step with its absences, cut to the step; other absences are dropped.

        Repeated work does not belong to the step, so the spans of a process until it has caught up
        are dropped too.
        """
        start, end = self.start_seconds, self.end_seconds
        cut = [
            dataclasses.replace(
                each,
                start_seconds=max(each.start_seconds, start),
                restored_seconds=min(max(each.restored_seconds, start), end),
                end_seconds=min(each.end_seconds, end),
            )
            for each in absences
            if each.end_seconds > start and each.start_seconds < end
        ]
        back_at = {each.number: each.end_seconds for each in cut}
        processes = [
            dataclasses.replace(
                process,
                spans=[
                    span
                    for span in process.spans
                    if span.start_seconds >= back_at.get(process.number, start)
                ],
            )
            for process in self.processes
        ]
        return dataclasses.replace(self, processes=processes, absences=cut)

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return self.end_seconds - self.start_seconds

    @property
    def bubble(self) -> float:
        """The idle share of all processes' time."""
        busy = sum(each.computing_seconds for each in self.processes)
        return 1 - busy / (len(self.processes) * self.seconds) if self.seconds > 0 else 0.0


def recorded_step(
    step: int,
    start_seconds: float,
    plan: Plan,
    names: Mapping[int, str],
    spans: Mapping[int, Iterable[Span]],
    clocks: Mapping[int, ClockMap],
    num_dropped: int = 0,
    num_batches: int = 1,
) -> RecordedStep:
    """A step from the spans of its processes, each on the clock of its process.

    Args:
        names: The names of the processes by their numbers.
        spans: The spans by the number of the process; spans outside the step are dropped.
        clocks: The workers' clocks by the number of the process.
    """
    ranges = ranges_of(plan)
    found = []
    for number, name in sorted(names.items()):
        clock = clocks[number] if number else SAME_CLOCK
        ours = [_on_our_clock(span, clock) for span in spans[number]]
        found.append(ProcessSpans(number, name, ranges[name], ours, clock))
    whole = RecordedStep(step, start_seconds, found, num_dropped)
    cut = [_within(each, start_seconds, whole.end_seconds) for each in found]
    return RecordedStep(step, start_seconds, cut, num_dropped, num_batches=num_batches)


def _on_our_clock(span: Span, clock: ClockMap) -> Span:
    if clock is SAME_CLOCK:
        return span
    arrived = span.arrived_seconds
    return replace(
        span,
        start_seconds=clock.ours(span.start_seconds),
        end_seconds=clock.ours(span.end_seconds),
        arrived_seconds=None if arrived is None else clock.ours(arrived),
    )


def _within(process: ProcessSpans, start: float, end: float) -> ProcessSpans:
    """The process with its spans cut to the step; a wait may start before it or end after it."""
    cut = [
        replace(
            span,
            start_seconds=max(span.start_seconds, start),
            end_seconds=min(span.end_seconds, end),
        )
        for span in process.spans
        if span.end_seconds > start and span.start_seconds < end
    ]
    ordered = sorted(cut, key=lambda span: (span.start_seconds, -span.end_seconds))
    return dataclasses.replace(process, spans=ordered)


def _seconds(span: Span) -> float:
    return span.end_seconds - span.start_seconds


def _is_in(span: Span, other: Span) -> bool:
    return other.start_seconds <= span.start_seconds and span.end_seconds <= other.end_seconds


@dataclass(frozen=True)
class Prediction:
    """A step as the simulator predicts it from the profile measured before the run.

    Args:
        seconds: The duration of the step.
        bubble: The idle share of all processes' time.
        processes: The actions of each process, including the optimizer's step. Their seconds count
            from the start of the first action.
    """

    seconds: float
    bubble: float
    processes: Sequence[ProcessSpans]


def prediction_of(step: RecordedStep, plan: Plan, profile: Profile | None) -> Prediction | None:
    """The prediction of a step; None without a profile, or if the plan does not fit it."""
    if profile is None:
        return None
    try:
        candidate = candidate_of(plan, replace(profile, accumulate_grad_batches=step.num_batches))
    except PlanError:
        return None
    pipeline, played = candidate.pipeline, candidate.simulation
    end = max((span.end_seconds for span in played.spans), default=0.0) + pipeline.exchange_seconds
    names = Placement.of(plan).processes
    spans: dict[str, list[Span]] = {name: [] for name in names}
    for action, start_seconds, end_seconds in played.spans:
        microbatch, stage = action.key.microbatch, action.stage_index
        name = names[pipeline.process_of[pipeline.entries[stage][microbatch]]]
        kind, visit = _shown(action)
        spans[name].append(
            Span(kind, start_seconds, end_seconds, microbatch, visit=visit, stage=stage)
        )
    last = pipeline.sums([times.optimizer_seconds for times in pipeline.stages])
    for name, seconds in zip(names, last, strict=True):
        if seconds > 0:
            spans[name].append(Span("optimizer", end, end + seconds))
    found = [
        dataclasses.replace(process, spans=spans[process.name], clock=SAME_CLOCK)
        for process in step.processes
    ]
    return Prediction(played.step_seconds, played.bubble, found)


def _shown(action: Action) -> tuple[SpanKind, int]:
    """The kind and the visit of an action in the runtime's records."""
    if action.stage_index == 0 and action.key.visit == LOSS:
        return ("loss", 0) if action.kind == "F" else ("backward", LOSS)
    return ("backward" if action.kind == "B" else "forward"), 0


def bound_seconds(plan: Plan, profile: Profile) -> float:
    """The duration of the step if the speeds of all measured devices added up."""
    profile = profile.of_one_batch
    costs, plan = Costs(profile, {}), as_measured(plan, profile)
    speeds = speeds_of(costs, profile.workers, plan.micro_batches)
    endless = [Speed(speed.layer_seconds, speed.fixed_seconds) for speed in speeds]
    return plan.micro_batches * least_bottleneck(endless, len(profile.model.layers))
