"""A device's part of measuring: which trial is next, and what came of the last one.

The same conversation is led with the coordinator's own device and with a worker:

    trials(…) ── LayerTrial ──▶ bench here, or message to a worker
              ◀── Outcome ─────
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial

from lightning_utilities.core.rank_zero import rank_zero_info

from ..errors import StageFailed
from ..pipeline.bench import (
    Bench,
    Clock,
    Failed,
    LayerTrial,
    Measurement,
    OptimizerMeasurement,
    attempt,
)
from ..planner.profile import Timing
from .model_view import Subject
from .schedule import LayerJob, LayerSchedule
from .trial_codec import Outcome, Trial


@dataclass
class DeviceResult:
    """What was measured on one device."""

    timings: list[Timing] = field(default_factory=list)
    optimizers: dict[str, OptimizerMeasurement] = field(default_factory=dict)
    largest_micro_batch: int | None = None


Trials = Generator[Trial, Outcome, DeviceResult]


def trials(
    subject: Subject, schedule: LayerSchedule, patience_seconds: float, clock: Clock, where: str
) -> Trials:
    """The trials of one device one after the other, as long as its schedule has jobs.

    Args:
        subject: What is measured.
        schedule: The jobs.
        patience_seconds: To be spent on each.
        clock: That of the schedule's end.
        where: The device's process, for errors.

    Raises:
        StageFailed: If a layer cannot be run in the user's precision.
    """
    result = DeviceResult()
    while (job := schedule.next(clock())) is not None:
        start = clock()
        outcome = yield subject.layer_trial(job, patience_seconds)
        if isinstance(outcome, Measurement):
            schedule.note_timing(timing_of(job, outcome), clock() - start)
            if job.kind not in result.optimizers:
                yield from _optimizer_trial(subject, job, patience_seconds, where, result)
        else:
            _note_failure(subject, schedule, job, outcome, where)
    result.timings = schedule.timings
    result.largest_micro_batch = schedule.largest_micro_batch
    return result


def first_again(subject: Subject, first: Timing, patience_seconds: float) -> Trials:
    """A device's first trial once more; no timing comes of it where it fails now."""
    job = LayerJob(first.dtype, first.micro_batch_size, first.part, first.recompute)
    outcome = yield subject.layer_trial(job, patience_seconds)
    return DeviceResult([timing_of(job, outcome)] if isinstance(outcome, Measurement) else [])


def timing_of(job: LayerJob, found: Measurement) -> Timing:
    """A measurement as the profile has it."""
    return Timing(
        part=job.kind,
        micro_batch_size=job.micro_batch_size,
        forward_seconds=found.forward_seconds,
        backward_seconds=found.backward_seconds,
        saved_bytes=found.saved_bytes,
        peak_bytes=found.peak_bytes,
        dtype=job.dtype,
        recompute=job.recompute,
    )


def _optimizer_trial(
    subject: Subject, job: LayerJob, patience_seconds: float, where: str, result: DeviceResult
) -> Generator[Trial, Outcome, None]:
    trial = subject.optimizer_trial(job.kind, patience_seconds)
    if trial is None:
        return
    outcome = yield trial
    if isinstance(outcome, OptimizerMeasurement):
        result.optimizers[job.kind] = outcome
    elif isinstance(outcome, Failed):
        what = f"the step of {trial.class_name} over a {job.kind} (layer {trial.number})"
        raise _failure(outcome, where, what)


def _note_failure(
    subject: Subject, schedule: LayerSchedule, job: LayerJob, outcome: Outcome, where: str
) -> None:
    if not isinstance(outcome, Failed):
        raise TypeError(f"{outcome} is no answer to {job}.")
    number = subject.blueprint.number_of(job.kind)
    what = f"a {job.kind} (layer {number}) on {job.micro_batch_size} samples in {job.dtype}" + (
        " with recomputation" if job.recompute else ""
    )
    if outcome.is_out_of_memory:
        schedule.note_out_of_memory(job)
        rank_zero_info(f"{where} has not enough memory for {what}; it goes on with smaller ones")
    elif job.dtype != subject.dtype:
        schedule.leave_out(job.dtype)
        rank_zero_info(f"{where} cannot run {what}: {outcome.reason}")
    else:
        raise _failure(outcome, where, what)


def _failure(outcome: Failed, where: str, what: str) -> StageFailed:
    return StageFailed(
        f"{where} failed while it measured {what}: {outcome.reason}\n\n"
        f"The traceback there:\n{outcome.traceback}"
    )


def run_here(bench: Bench, trial: Trial) -> Outcome:
    """Carry out a trial in this process."""
    if isinstance(trial, LayerTrial):
        return attempt(partial(bench.measure_layer, trial), bench.device)
    return attempt(partial(bench.measure_optimizer, trial), bench.device)
