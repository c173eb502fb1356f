"""The trials of a device: the layers that it runs next, and the outcome of the last trial.

The schedule is a rule without a clock and a device. One conversation leads the trials of the
coordinator's own device and of a worker:

    trials(…) ── Trial ───▶ the bench here, or a message to a worker
              ◀── Outcome ──
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product, starmap

from lightning_utilities.core.rank_zero import rank_zero_info
from msgspec import structs

from ..coordinator.connections import Connections
from ..errors import RemoteProtocolError, StageFailed
from ..pipeline.bench import Bench, Clock, LayerTrial, OptimizerTrial, attempt
from ..plan import Dtype
from ..planner.profile import Timing
from ..protocol import messages as m
from .model_view import LayerJob, Subject

Trial = LayerTrial | OptimizerTrial
Outcome = m.LayerMeasured | m.OptimizerMeasured | m.NotMeasured
Tick = Callable[[], None]

_MOST_PATIENCE_SECONDS = 0.6
# The other runs warm up and measure the memory.
_SHARE_OF_TIMED_RUNS = 0.5
# A larger change of a device's speed makes its plan doubtful.
_MOST_CHANGE = 0.25
# A shorter measurement varies too much on a busy machine.
_LEAST_PATIENCE_SECONDS = 0.1
# The share of a device's time in which its first trial may run again.
_MOST_SHARE_OF_REPEAT = 0.1
# The least number of runs of a trial, timed and untimed.
_RUNS_OF_TRIAL = 5


def dtypes_to_measure(wanted: Dtype, offered: Sequence[Dtype]) -> list[Dtype]:
    """The user's precision, and float32, which is more precise and sometimes faster.

    A device that is slow in the user's precision is measured in all its other dtypes.
    """
    if wanted not in offered:
        return list(offered)
    return [wanted, *(dtype for dtype in offered if dtype == "float32" != wanted)]


def patience_seconds(budget_seconds: float, num_jobs: int) -> float:
    """The time for the timed runs of each job."""
    share = _SHARE_OF_TIMED_RUNS * budget_seconds / max(num_jobs, 1)
    return min(_MOST_PATIENCE_SECONDS, share)


def is_worth_repeating(first: Timing, patience_seconds: float, budget_seconds: float) -> bool:
    """Whether a device's first trial may run again after all others."""
    run_seconds = _RUNS_OF_TRIAL * (first.forward_seconds + first.backward_seconds)
    is_telling = patience_seconds >= _LEAST_PATIENCE_SECONDS
    return is_telling and run_seconds <= _MOST_SHARE_OF_REPEAT * budget_seconds


def change_of_speed(name: str, first: Timing, again: Timing) -> str | None:
    """The warning for a device whose first trial takes another time at the end; None if the times
    are about the same."""
    before, after = (one.forward_seconds + one.backward_seconds for one in (first, again))
    least, most = sorted((before, after))
    if most <= (1 + _MOST_CHANGE) * least:
        return None
    samples = "1 sample" if first.micro_batch_size == 1 else f"{first.micro_batch_size} samples"
    return (
        f"{name} took {1000 * before:.3g} ms for a {first.part} on {samples} when its measuring "
        f"began, and {1000 * after:.3g} ms at its end: its speed changed meanwhile, because of "
        "another program, a quota or heat, so a plan by these figures may be far from the best. "
        "Measure again on idle machines, by `PipelineProfiler(force=True)` or `lightning-hetero "
        "profile CONFIG --force`."
    )


@dataclass
class LayerSchedule:
    """Orders the jobs of a device: small micro-batches first, the first dtype before others.

    Args:
        jobs: All of them in their order; see `layer_jobs`.
        end_seconds: When to stop, on the clock of `next`. The first job of every kind runs even
            later: without it there is no plan.
        most_peak_bytes: Jobs that need more are skipped, because running out of memory may end the
            process.

    Attributes:
        timings: What has been measured.
        largest_micro_batch: The largest that fits, if a larger one did not.
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
        """The next job; None if no job or no time is left."""
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
        """Skip the other jobs in a dtype that the device cannot run."""
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
    """What was measured on one device."""

    timings: list[Timing] = field(default_factory=list)
    optimizers: dict[str, m.OptimizerMeasured] = field(default_factory=dict)
    largest_micro_batch: int | None = None


Trials = Generator[Trial, Outcome, DeviceResult]


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


def first_again(subject: Subject, first: Timing, patience_seconds: float) -> Trials:
    """Yield a device's first trial again; the result has no timing if it fails."""
    job = job_of(first)
    outcome = yield subject.layer_trial(job, patience_seconds)
    return DeviceResult([timing_of(job, outcome)] if isinstance(outcome, m.LayerMeasured) else [])


def job_of(timing: Timing) -> LayerJob:
    """The job that a timing is for."""
    return LayerJob(timing.dtype, timing.micro_batch_size, timing.part, timing.recompute)


def timing_of(job: LayerJob, found: m.LayerMeasured) -> Timing:
    """The timing of a job in the profile."""
    measured = {**structs.asdict(found), "spread": round(found.spread, 2)}
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
    return StageFailed(f"{what}: {answer.reason}\n\nThe traceback there:\n{answer.traceback}")


def lead_here(bench: Bench, trials: Trials, tick: Tick) -> DeviceResult:
    """Lead trials on this process's bench."""
    try:
        trial = next(trials)
        while True:
            outcome = run_here(bench, trial)
            tick()
            trial = trials.send(outcome)
    except StopIteration as end:
        result: DeviceResult = end.value
        return result


def run_here(bench: Bench, trial: Trial) -> Outcome:
    """Run a trial in this process."""
    if isinstance(trial, LayerTrial):
        return attempt(partial(bench.measure_layer, trial), bench.device)
    return attempt(partial(bench.measure_optimizer, trial), bench.device)


def lead_on_workers(
    connections: Connections, trials_of: Mapping[str, Trials], tick: Tick
) -> dict[str, DeviceResult]:
    """Lead the trials of several workers at the same time.

    Raises:
        RemoteProtocolError: If a worker answers with something else than an outcome.
    """
    running = {name: next(trials) for name, trials in trials_of.items()}
    for name, trial in running.items():
        _tell(connections, name, trial)
    results: dict[str, DeviceResult] = {}
    while len(results) < len(trials_of):
        worker, frame = connections.receive()
        name = worker.name
        tick()
        try:
            trial = trials_of[name].send(outcome_of(running[name], frame.message))
        except StopIteration as end:
            results[name] = end.value
        else:
            running[name] = trial
            _tell(connections, name, trial)
    return results


def _tell(connections: Connections, name: str, trial: Trial) -> None:
    message, tensors = trial.encode()
    connections.send(connections.named(name), message, *tensors)


def outcome_of(trial: Trial, answer: m.Message) -> Outcome:
    """The answer to a trial.

    Raises:
        RemoteProtocolError: If it answers something else.
    """
    if isinstance(answer, (trial.answer, m.NotMeasured)):
        return answer  # type: ignore[return-value]
    raise RemoteProtocolError(f"{answer} does not answer {type(trial).__name__}.")
