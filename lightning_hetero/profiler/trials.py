"""The trials of a device: the next layers to run, and the outcome of the last trial.

The schedule is a rule without a clock and a device. One conversation leads the trials of the
coordinator's own device and of a worker:

    trials(…) ── Trial ───▶ the bench here, or a message to a worker
              ◀── Outcome ──

`doubtful` is a rule too: it finds timings in contradiction to other timings of the same device, as
on a busy device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, permutations, product, starmap
from typing import TYPE_CHECKING, cast

from lightning_utilities.core.rank_zero import rank_zero_info
from msgspec import structs

from ..coordinator.connections import Connections
from ..coordinator.requests import Answer
from ..errors import StageFailed
from ..model.layers import LOGITS_LAYER
from ..pipeline.bench import MOST_SPREAD, Bench, Clock, LayerTrial, OptimizerTrial, attempt
from ..plan import Dtype
from ..planner.profile import ENDS, HEAD, DeviceProfile, ModelProfile, Timing, WeightReading
from ..protocol import messages as m
from ..protocol.frames import Content
from .measured_model import LayerJob

if TYPE_CHECKING:
    from .leaving_head import HeadSample
    from .measured_model import Subject

Trial = LayerTrial | OptimizerTrial
Outcome = m.LayerMeasured | m.OptimizerMeasured | m.NotMeasured
Tick = Callable[[], None]

_MOST_PATIENCE_SECONDS = 0.6
# The other runs warm up and measure the memory.
_SHARE_OF_TIMED_RUNS = 0.5
# A larger change of a device's speed makes the plan doubtful.
_MOST_CHANGE = 0.25
# A shorter measurement varies too much on a busy machine.
_LEAST_PATIENCE_SECONDS = 0.1
# The largest share of a device's time for a repetition of its first trial.
_MOST_SHARE_OF_REPEAT = 0.1
# The least number of runs of a trial, timed and untimed.
_RUNS_OF_TRIAL = 5
# The largest share of a device's time for measuring doubtful timings again.
_MOST_SHARE_OF_DOUBT = 0.5
# Equal work may take so many times as long before one of two timings is doubtful. The factor allows
# for caches, for attention with a growing mask, and for kernels with a preferred size.
_MOST_TIMES = 3.0
# Shorter work is unimportant for a plan, and always varies.
_LEAST_SECONDS = 0.001
# Less work, such as a smaller micro-batch, may take at most so many times as long as more work.
_MOST_TIMES_OF_LARGER = 2.0
# An end has no attention, but its loss reads all logits several times.
_MOST_TIMES_OF_END = 4.0


def dtypes_to_measure(wanted: Dtype, offered: Sequence[Dtype]) -> list[Dtype]:
    """The user's precision, and float32: it is more precise and sometimes faster.

    If a device is slow in the user's precision, all its other dtypes are measured.
    """
    if wanted not in offered:
        return list(offered)
    return [wanted, *(dtype for dtype in offered if dtype == "float32" != wanted)]


def patience_seconds(budget_seconds: float, num_jobs: int) -> float:
    """The time for the timed runs of each job."""
    share = _SHARE_OF_TIMED_RUNS * budget_seconds / max(num_jobs, 1)
    return min(_MOST_PATIENCE_SECONDS, share)


def seconds_of(timing: Timing) -> float:
    """Forward and backward of a timing."""
    return timing.forward_seconds + timing.backward_seconds


def is_telling(patience_seconds: float) -> bool:
    """Whether a change within so short a time is significant."""
    return patience_seconds >= _LEAST_PATIENCE_SECONDS


def is_worth_repeating(first: Timing, patience_seconds: float, budget_seconds: float) -> bool:
    """Whether a device's first trial may run again after all others."""
    run_seconds = _RUNS_OF_TRIAL * seconds_of(first)
    return is_telling(patience_seconds) and run_seconds <= _MOST_SHARE_OF_REPEAT * budget_seconds


def change_of_speed(name: str, first: Timing, again: Timing) -> str | None:
    """The warning for a device if its first trial takes another time at the end."""
    before, after = seconds_of(first), seconds_of(again)
    if _agree(before, after):
        return None
    return (
        f"{name} took {1000 * before:.3g} ms for {_job_text(first)} when its measuring "
        f"began, and {1000 * after:.3g} ms at its end: its speed changed meanwhile, because of "
        "another program, a quota or heat, so a plan by these figures may be far from the best. "
        f"{MEASURE_AGAIN}"
    )


MEASURE_AGAIN = (
    "Measure again on idle machines, by `PipelineProfiler(force=True)` or `lightning-hetero "
    "profile CONFIG --force`."
)
"""The remedy for figures of a busy machine."""


def _agree(one: float, other: float) -> bool:
    least, most = sorted((one, other))
    return most <= (1 + _MOST_CHANGE) * least


def _job_text(timing: Timing) -> str:
    size = timing.micro_batch_size
    article = "an" if timing.part[:1].upper() in "AEIOU" else "a"
    return f"{article} {timing.part} on {'1 sample' if size == 1 else f'{size} samples'}"


def is_calmer(first: Timing, again: Timing) -> bool:
    """Whether a device is faster at the end of its measuring than at the beginning: then other
    programs used it before.
    """
    return seconds_of(again) < seconds_of(first) and not _agree(
        seconds_of(first), seconds_of(again)
    )


def doubtful(model: ModelProfile, timings: Sequence[Timing]) -> list[Timing]:
    """The timings of one device that should be measured again.

    Their repeated runs differ, or other timings of the device contradict them: a smaller
    micro-batch takes longer, a larger one far longer than in proportion, recomputation far longer
    than a second forward, a layer far longer than a layer of another kind with equal parameters,
    or an end far longer than the layers in proportion to its parameters.

    Args:
        model: Has the parts of the timings.
        timings: All timings of the device; the ends of the coordinator are among them.
    """
    rules = (_against_sizes, _against_recomputation, _against_alike, _against_layers)
    limits = (limit for rule in rules for limit in rule(model, timings))
    contradicted = (timing for timing, most_seconds in limits if seconds_of(timing) > most_seconds)
    doubted = {*map(job_of, _varying(timings)), *map(job_of, contradicted)}
    return [timing for timing in timings if job_of(timing) in doubted]


# Timings, each with the most seconds that the other timings of its device explain.
_Limits = Iterator[tuple[Timing, float]]


def _varying(timings: Sequence[Timing]) -> list[Timing]:
    return [
        timing
        for timing in timings
        if timing.spread > MOST_SPREAD and seconds_of(timing) >= _LEAST_SECONDS
    ]


def _against_sizes(_model: ModelProfile, timings: Sequence[Timing]) -> _Limits:
    in_order = sorted(timings, key=lambda t: (t.dtype, t.part, t.recompute, t.micro_batch_size))
    for small, large in pairwise(in_order):
        if job_of(small)._replace(micro_batch_size=large.micro_batch_size) != job_of(large):
            continue
        growth = large.micro_batch_size / small.micro_batch_size
        yield small, _MOST_TIMES_OF_LARGER * seconds_of(large)
        yield large, _MOST_TIMES * growth * seconds_of(small)


def _against_recomputation(_model: ModelProfile, timings: Sequence[Timing]) -> _Limits:
    plain_of = {job_of(timing): timing for timing in timings if not timing.recompute}
    for again in timings:
        plain = plain_of.get(job_of(again)._replace(recompute=False))
        if not again.recompute or plain is None:
            continue
        yield plain, _MOST_TIMES_OF_LARGER * seconds_of(again)
        yield again, _MOST_TIMES * (seconds_of(plain) + plain.forward_seconds)


def _against_alike(model: ModelProfile, timings: Sequence[Timing]) -> _Limits:
    for kind, other in permutations(model.kinds, 2):
        part, like = model.part(kind), model.part(other)
        if part.parameter_bytes == 0 or structs.replace(part, name=other) != like:
            continue
        seconds = {job_of(t): seconds_of(t) for t in timings if t.part == other}
        for timing in timings:
            if timing.part == kind:
                alike = seconds.get(job_of(timing)._replace(kind=other), math.inf)
                yield timing, _MOST_TIMES * alike


def _against_layers(model: ModelProfile, timings: Sequence[Timing]) -> _Limits:
    # A head tied to the embedding does not have parameters of its own.
    most_bytes = max(model.part(end).parameter_bytes for end in ENDS)
    for timing in timings:
        layers = [
            (seconds_of(other), max(1, model.part(other.part).parameter_bytes))
            for other in timings
            if other.part not in ENDS and job_of(other) == job_of(timing)._replace(kind=other.part)
        ]
        if timing.part not in ENDS or not layers:
            continue
        seconds, layer_bytes = max(layers)
        yield timing, _MOST_TIMES_OF_END * max(1.0, most_bytes / layer_bytes) * seconds


def affordable(
    timings: Sequence[Timing], patience_seconds: float, budget_seconds: float
) -> list[Timing]:
    """The first of some timings, as many as fit in half of a device's time for a repetition."""
    found, left = [], _MOST_SHARE_OF_DOUBT * budget_seconds
    for timing in timings:
        left -= patience_seconds + _RUNS_OF_TRIAL * seconds_of(timing)
        if left >= 0:
            found.append(timing)
    return found


def with_shorter(first: Sequence[Timing], again: Sequence[Timing]) -> list[Timing]:
    """Timings, each replaced by the second timing of its job if the second is shorter: other
    programs make work slower, never faster.
    """
    second = {job_of(timing): timing for timing in again}
    return [min(timing, second.get(job_of(timing), timing), key=seconds_of) for timing in first]


def correction(name: str, first: Sequence[Timing], again: Sequence[Timing]) -> str | None:
    """A sentence on timings shortened by more than a quarter in a second measurement, if any, with
    the figures of the largest change.
    """
    pairs = [
        (seconds_of(before), seconds_of(after), before)
        for before, after in zip(first, with_shorter(first, again), strict=True)
    ]
    shortened = [pair for pair in pairs if not _agree(*pair[:2])]
    if not shortened:
        return None
    before, after, most = max(shortened, key=lambda pair: pair[0] / pair[1])
    others = len(shortened) - 1
    return (
        f"{name} took {1000 * before:.3g} ms for {_job_text(most)}, a doubtful time, and "
        f"{1000 * after:.3g} ms in a second measurement; the shorter time is kept"
        + (f", and so are the times of {others} more of its {len(first)} timings" if others else "")
    )


def still_varying(name: str, timings: Sequence[Timing]) -> str | None:
    """A sentence on a device if its repeated runs differ in the end too."""
    varying = _varying(timings)
    if not varying:
        return None
    most = max(varying, key=lambda timing: timing.spread)
    return (
        f"{name} took very different times for equal runs: for {_job_text(most)} the median is "
        f"{most.spread:.0%} above the fastest, and {len(varying)} of its {len(timings)} timings "
        "differ by more than a quarter. Something else uses the device, so a plan by these figures "
        f"may be far from the best. {MEASURE_AGAIN}"
    )


@dataclass
class LayerSchedule:
    """Orders the jobs of a device: small micro-batches first, the first dtype before others.

    Args:
        jobs: All of them in their order; see `layer_jobs`.
        end_seconds: When to stop, on the clock of `next`. The first job of every kind runs even
            later: a plan needs it.
        most_peak_bytes: The memory limit of a job. Larger jobs are skipped, because running out of
            memory may end the process.

    Attributes:
        timings: The measured timings.
        largest_micro_batch: The largest fitting size, if a larger one did not fit.
    """

    jobs: Sequence[LayerJob]
    end_seconds: float
    most_peak_bytes: float = math.inf
    timings: list[Timing] = field(default_factory=list)
    largest_micro_batch: int | None = None
    _next: int = 0
    _seconds: dict[tuple[Dtype, str, bool], tuple[int, float]] = field(default_factory=dict)
    _limits: dict[Dtype, int] = field(default_factory=dict)
    _skipped: set[Dtype] = field(default_factory=set)

    def next(self, now_seconds: float) -> LayerJob | None:
        """The next job; None after the last job, or when the time is over."""
        while self._next < len(self.jobs):
            job = self.jobs[self._next]
            self._next += 1
            if self._is_worth_it(job, now_seconds):
                return job
        return None

    def note_timing(self, timing: Timing, seconds: float) -> None:
        """Note the timing of a job, and the seconds that the job took in all."""
        self.timings.append(timing)
        key = timing.dtype, timing.part, timing.recompute
        self._seconds[key] = timing.micro_batch_size, seconds

    def note_out_of_memory(self, job: LayerJob) -> None:
        """Note that a job did not fit: larger ones will not fit either."""
        self._limits[job.dtype] = job.micro_batch_size
        if job.dtype == self.jobs[0].dtype:
            sizes = {other.micro_batch_size for other in self.jobs}
            smaller = (size for size in sizes if size < job.micro_batch_size)
            self.largest_micro_batch = max(smaller, default=0)

    def skip(self, dtype: Dtype) -> None:
        """Skip the other jobs in a dtype after a failure."""
        self._skipped.add(dtype)

    def _is_worth_it(self, job: LayerJob, now_seconds: float) -> bool:
        if job.dtype in self._skipped or self._is_too_large(job):
            return False
        if job.recompute and job._replace(recompute=False) not in map(job_of, self.timings):
            return False
        is_first = job.micro_batch_size == self.jobs[0].micro_batch_size and not job.recompute
        if is_first and job.dtype == self.jobs[0].dtype:
            return True
        return now_seconds + self._predicted_seconds(job) <= self.end_seconds

    def _is_too_large(self, job: LayerJob) -> bool:
        dtypes = {job.dtype, self.jobs[0].dtype}
        if any(job.micro_batch_size >= self._limits.get(dtype, math.inf) for dtype in dtypes):
            return True
        if job.recompute:
            return False
        peaks = [
            (timing.micro_batch_size, timing.peak_bytes)
            for timing in self.timings
            if (timing.part, timing.dtype, timing.recompute) == (job.kind, job.dtype, False)
        ]
        size, peak_bytes = max(peaks, default=(1, 0))
        if peak_bytes * job.micro_batch_size / size <= self.most_peak_bytes:
            return False
        self.note_out_of_memory(job)
        return True

    def _predicted_seconds(self, job: LayerJob) -> float:
        """In proportion to the largest finished job of its kind; 0 without one."""
        size, seconds = self._seconds.get((job.dtype, job.kind, job.recompute), (1, 0.0))
        return seconds * job.micro_batch_size / size


def layer_jobs(
    kinds: Iterable[str], sizes: Iterable[int], dtypes: Iterable[Dtype]
) -> list[LayerJob]:
    """Every kind at every size in every dtype, without and with recomputation."""
    return list(starmap(LayerJob, product(dtypes, sizes, kinds, (False, True))))


@dataclass
class DeviceResult:
    """The measurements of one device."""

    timings: list[Timing] = field(default_factory=list)
    optimizers: dict[str, m.OptimizerMeasured] = field(default_factory=dict)
    largest_micro_batch: int | None = None
    software_seconds: float | None = None

    def profile(self, name: str, described: m.DeviceDescribed, memory_bytes: int) -> DeviceProfile:
        """The profile of the device, for a process with so much of its memory."""
        return DeviceProfile(
            name=name,
            device=described.device,
            memory_bytes=memory_bytes,
            base_bytes=described.base_bytes,
            timings=self.timings,
            optimizer_seconds={k: found.step_seconds for k, found in self.optimizers.items()},
            optimizer_bytes={k: found.state_bytes for k, found in self.optimizers.items()},
            software_seconds=self.software_seconds,
            largest_micro_batch=self.largest_micro_batch,
            weights={
                place: WeightReading(found.bytes_per_second, found.most_bytes)
                for place, found in described.weights.items()
            },
            versions=described.versions,
        )


Trials = Generator[Trial, Outcome, DeviceResult]


@dataclass(frozen=True)
class HeadPreparation:
    """Has a worker build the head."""

    content: Content

    def encode(self) -> Content:
        """The message and its tensors."""
        return self.content


HeadTrials = Generator[Trial | HeadPreparation, Outcome | m.Done, DeviceResult]


def trials(
    subject: Subject, schedule: LayerSchedule, patience_seconds: float, clock: Clock, where: str
) -> Trials:
    """Yield the trials of one device, as long as its schedule has jobs.

    Args:
        subject: The model.
        schedule: The jobs.
        patience_seconds: The time for each trial.
        clock: The clock of the schedule.
        where: The name of the device's process.

    Raises:
        StageFailed: If a layer cannot be run in the user's precision.
    """
    result = DeviceResult()
    while (job := schedule.next(clock())) is not None:
        start = clock()
        outcome = yield subject.layer_trial(job, patience_seconds)
        if isinstance(outcome, m.LayerMeasured):
            schedule.note_timing(timing_of(job, outcome), clock() - start)
            if job.kind not in result.optimizers:
                yield from _optimizer_trial(subject, job, patience_seconds, where, result)
        elif isinstance(outcome, m.NotMeasured):
            _note_failure(subject, schedule, job, outcome, where)
    result.timings = schedule.timings
    result.largest_micro_batch = schedule.largest_micro_batch
    return result


def head_trials(
    subject: Subject,
    head: HeadSample,
    most_bytes: float,
    budget_seconds: float,
    clock: Clock,
    where: str,
) -> HeadTrials:
    """Yield the trials of the head on a worker: forward and backward at every size, small ones
    first, as far as memory and time allow, and the optimizer's step over the output embedding.
    Without a success there is no timing.

    Args:
        subject: The model.
        head: Its head.
        most_bytes: The memory limit of a trial.
        budget_seconds: The time to spend; the smallest size runs in any case.
        clock: Returns seconds.
        where: The name of the worker.
    """
    result, end_seconds = DeviceResult(), clock() + budget_seconds
    patience = patience_seconds(budget_seconds, len(head.trials))
    outcome = yield HeadPreparation(head.content)
    for size, trial in sorted(head.trials.items()):
        if isinstance(outcome, m.NotMeasured):
            rank_zero_info(f"{where} cannot run the head: {outcome.reason}")
            break
        is_late = result.timings and clock() >= end_seconds
        if head.bytes_at(size) > most_bytes or is_late:
            break
        outcome = yield replace(trial, patience_seconds=patience)
        if isinstance(outcome, m.LayerMeasured):
            job = LayerJob(subject.dtype, size, HEAD, False)
            result.timings.append(timing_of(job, outcome))
    used = subject.optimizer
    if result.timings and used is not None and head.bytes_of_optimizer <= most_bytes:
        outcome = yield OptimizerTrial(
            LOGITS_LAYER, used.class_name, used.defaults, used.options, patience
        )
        if isinstance(outcome, m.OptimizerMeasured):
            result.optimizers[HEAD] = outcome
        elif isinstance(outcome, m.NotMeasured):
            rank_zero_info(f"{where} cannot train the head: {outcome.reason}")
            return DeviceResult()
    return result


def with_head(layers: DeviceResult, head: DeviceResult) -> DeviceResult:
    """A worker's results, with the head."""
    optimizers = layers.optimizers | head.optimizers
    return replace(layers, timings=[*layers.timings, *head.timings], optimizers=optimizers)


def again(subject: Subject, timings: Sequence[Timing], patience_seconds: float) -> Trials:
    """Yield the trials of some timings again; failing ones are left out of the result."""
    result = DeviceResult()
    for job in map(job_of, timings):
        outcome = yield subject.layer_trial(job, patience_seconds)
        if isinstance(outcome, m.LayerMeasured):
            result.timings.append(timing_of(job, outcome))
    return result


def job_of(timing: Timing) -> LayerJob:
    """The job of a timing."""
    return LayerJob(timing.dtype, timing.micro_batch_size, timing.part, timing.recompute)


def timing_of(job: LayerJob, found: m.LayerMeasured) -> Timing:
    """The timing of a job in the profile."""
    measured = {**structs.asdict(found), "spread": round(found.spread, 2)}
    del measured["request"]
    return Timing(
        job.kind, job.micro_batch_size, dtype=job.dtype, recompute=job.recompute, **measured
    )


def _optimizer_trial(
    subject: Subject, job: LayerJob, patience_seconds: float, where: str, result: DeviceResult
) -> Generator[Trial, Outcome, None]:
    trial = subject.optimizer_trial(job.kind, patience_seconds)
    if trial is None:
        return
    outcome = yield trial
    if isinstance(outcome, m.OptimizerMeasured):
        result.optimizers[job.kind] = outcome
    elif isinstance(outcome, m.NotMeasured):
        what = f"the step of {trial.class_name} over a {job.kind} (layer {trial.number})"
        raise failure(f"{where} failed while it measured {what}", outcome)


def _note_failure(
    subject: Subject, schedule: LayerSchedule, job: LayerJob, outcome: m.NotMeasured, where: str
) -> None:
    number = subject.blueprint.number_of(job.kind)
    what = f"a {job.kind} (layer {number}) on {job.micro_batch_size} samples in {job.dtype}" + (
        " with recomputation" if job.recompute else ""
    )
    if outcome.is_out_of_memory:
        schedule.note_out_of_memory(job)
        rank_zero_info(f"{where} has not enough memory for {what}; it goes on with smaller ones")
    elif job.dtype != subject.dtype:
        schedule.skip(job.dtype)
        rank_zero_info(f"{where} cannot run {what}: {outcome.reason}")
    else:
        raise failure(f"{where} failed while it measured {what}", outcome)


def failure(what: str, answer: m.NotMeasured) -> StageFailed:
    """The error for a failed measurement; ``what`` begins its sentence."""
    return StageFailed.with_traceback_there(f"{what}: {answer.reason}", answer.traceback)


def lead(trials: Trials, run: Callable[[Trial], Outcome]) -> DeviceResult:
    """Lead the trials of one device; ``run`` returns the outcome of a trial."""
    try:
        trial = next(trials)
        while True:
            trial = trials.send(run(trial))
    except StopIteration as end:
        result: DeviceResult = end.value
        return result


def lead_here(bench: Bench, trials: Trials, tick: Tick) -> DeviceResult:
    """Lead trials on this process's bench."""

    def run(trial: Trial) -> Outcome:
        if isinstance(trial, LayerTrial):
            outcome: Outcome = attempt(partial(bench.measure_layer, trial), bench.device)
        else:
            outcome = attempt(partial(bench.measure_optimizer, trial), bench.device)
        tick()
        return outcome

    return lead(trials, run)


def lead_on_workers(
    connections: Connections, trials_of: Mapping[str, Trials | HeadTrials], tick: Tick
) -> dict[str, DeviceResult]:
    """Lead the trials of several workers at the same time."""
    asked = {name: _ask(connections, name, next(trials)) for name, trials in trials_of.items()}
    results: dict[str, DeviceResult] = {}
    while asked:
        connections.hear()
        for name in [name for name, answer in asked.items() if answer.is_over]:
            tick()
            outcome = cast("Outcome", asked.pop(name).result(m.Message))
            try:
                asked[name] = _ask(connections, name, trials_of[name].send(outcome))
            except StopIteration as end:
                results[name] = end.value
    return results


def _ask(connections: Connections, name: str, trial: Trial | HeadPreparation) -> Answer:
    message, tensors = trial.encode()
    return connections.requests.send(connections.named(name), message, *tensors)
