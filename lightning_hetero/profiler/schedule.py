"""What to measure next on a device, and when to stop: the rules, without a clock and a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..plan import Dtype
from ..planner.profile import Timing

_MOST_PATIENCE_SECONDS = 0.6
# Beside the runs that are timed there are those that warm up and those that count memory.
_SHARE_OF_TIMED_RUNS = 0.5
# A speed that changes by more while it is measured makes plans that are off by as much.
_MOST_CHANGE = 0.25
# A shorter measurement is off by that much on a busy machine, whatever its speed.
_LEAST_PATIENCE_SECONDS = 0.1
# The first trial is run again in so much of the time that the device had for all.
_MOST_SHARE_OF_REPEAT = 0.1
# A trial's runs that are not for the time, and those that take place in any case.
_RUNS_OF_TRIAL = 5


class LayerJob(NamedTuple):
    """One kind of layer, to be run forward and backward in one way."""

    dtype: Dtype
    micro_batch_size: int
    kind: str
    recompute: bool


def micro_batch_sizes(batch_size: int) -> list[int]:
    """1, 2, 4, … and the whole batch."""
    powers = [2**exponent for exponent in range(batch_size.bit_length())]
    return sorted({*powers, batch_size})


def dtypes_to_measure(wanted: Dtype, offered: Sequence[Dtype]) -> list[Dtype]:
    """The user's precision, and float32, which loses nothing where it is faster.

    A device that does not do the user's precision at a reasonable speed is measured in all others.
    """
    if wanted not in offered:
        return list(offered)
    return [wanted, *(dtype for dtype in offered if dtype == "float32" != wanted)]


def patience_seconds(budget_seconds: float, num_jobs: int) -> float:
    """The time to spend on the timed runs of each job."""
    share = _SHARE_OF_TIMED_RUNS * budget_seconds / max(num_jobs, 1)
    return min(_MOST_PATIENCE_SECONDS, share)


def is_worth_repeating(first: Timing, patience_seconds: float, budget_seconds: float) -> bool:
    """Whether a device's first trial may be run once more when all others are done."""
    run_seconds = _RUNS_OF_TRIAL * (first.forward_seconds + first.backward_seconds)
    is_telling = patience_seconds >= _LEAST_PATIENCE_SECONDS
    return is_telling and run_seconds <= _MOST_SHARE_OF_REPEAT * budget_seconds


def change_of_speed(name: str, first: Timing, again: Timing) -> str | None:
    """What to say of a device that took so long at first, and so long for the same when all was
    measured; None of one whose speed has not changed much."""
    before, after = (one.forward_seconds + one.backward_seconds for one in (first, again))
    least, most = sorted((before, after))
    if most <= (1 + _MOST_CHANGE) * least:
        return None
    samples = "1 sample" if first.micro_batch_size == 1 else f"{first.micro_batch_size} samples"
    return (
        f"{name} took {1000 * before:.3g} ms for a {first.part} on {samples} when its measuring "
        f"began, and {1000 * after:.3g} ms when all was measured: its speed changed meanwhile, by "
        "another program, a quota or heat, and a plan by these figures may be far from the best. "
        "Measure again on calm machines, by `PipelineProfiler(force=True)` or `lightning-hetero "
        "profile CONFIG --force`."
    )


@dataclass
class LayerSchedule:
    """The jobs of one device: small micro-batches before large ones, the first dtype before others.

    Args:
        jobs: All of them in their order; see `layer_jobs`.
        end_seconds: When to stop, on the clock of `next`. The first job of every kind is done in
            any case: without it there is no plan.
        most_peak_bytes: A job that would take more is not tried, where running out of memory would
            be the end of the process.

    Attributes:
        timings: What has been measured.
        largest_micro_batch: The largest that fits, if a larger one did not.
    """

    jobs: Sequence[LayerJob]
    end_seconds: float
    most_peak_bytes: int | None = None
    timings: list[Timing] = field(default_factory=list)
    largest_micro_batch: int | None = None
    _next: int = 0
    _seconds: dict[tuple[Dtype, str, bool], tuple[int, float]] = field(default_factory=dict)
    _limits: dict[Dtype, int] = field(default_factory=dict)
    _left_out: set[Dtype] = field(default_factory=set)

    def next(self, now_seconds: float) -> LayerJob | None:
        """The next job; None when there is none left, or no time."""
        while self._next < len(self.jobs):
            job = self.jobs[self._next]
            self._next += 1
            if self._is_worth_it(job, now_seconds):
                return job
        return None

    def note_timing(self, timing: Timing, seconds: float) -> None:
        """A job was done, and took so many seconds in all."""
        self.timings.append(timing)
        key = timing.dtype, timing.part, timing.recompute
        self._seconds[key] = timing.micro_batch_size, seconds

    def note_out_of_memory(self, job: LayerJob) -> None:
        """A job did not fit: neither will larger ones."""
        self._limits[job.dtype] = job.micro_batch_size
        if job.dtype == self.jobs[0].dtype:
            smaller = [j.micro_batch_size for j in self.jobs]
            below = [size for size in smaller if size < job.micro_batch_size]
            self.largest_micro_batch = max(below, default=0)

    def leave_out(self, dtype: Dtype) -> None:
        """The device cannot do this dtype."""
        self._left_out.add(dtype)

    @property
    def num_left(self) -> int:
        """Jobs that have not been looked at."""
        return len(self.jobs) - self._next

    def _is_worth_it(self, job: LayerJob, now_seconds: float) -> bool:
        if job.dtype in self._left_out or self._is_too_large(job):
            return False
        if job.recompute and self._timing(job._replace(recompute=False)) is None:
            return False
        is_first = job.micro_batch_size == self.jobs[0].micro_batch_size and not job.recompute
        if is_first and job.dtype == self.jobs[0].dtype:
            return True
        return now_seconds + self._predicted_seconds(job) <= self.end_seconds

    def _is_too_large(self, job: LayerJob) -> bool:
        limits = [self._limits.get(dtype) for dtype in {job.dtype, self.jobs[0].dtype}]
        if any(limit is not None and job.micro_batch_size >= limit for limit in limits):
            return True
        if self.most_peak_bytes is None or job.recompute:
            return False
        peaks = [
            (timing.micro_batch_size, timing.peak_bytes)
            for timing in self.timings
            if (timing.part, timing.dtype, timing.recompute) == (job.kind, job.dtype, False)
        ]
        if not peaks:
            return False
        size, peak_bytes = max(peaks)
        if peak_bytes * job.micro_batch_size / size <= self.most_peak_bytes:
            return False
        self.note_out_of_memory(job)
        return True

    def _timing(self, job: LayerJob) -> Timing | None:
        for timing in self.timings:
            found = timing.dtype, timing.micro_batch_size, timing.part, timing.recompute
            if found == tuple(job):
                return timing
        return None

    def _predicted_seconds(self, job: LayerJob) -> float:
        """In proportion to the largest that was done; nothing where none was."""
        size, seconds = self._seconds.get((job.dtype, job.kind, job.recompute), (1, 0.0))
        return seconds * job.micro_batch_size / size


def layer_jobs(
    kinds: Iterable[str], sizes: Iterable[int], dtypes: Iterable[Dtype]
) -> list[LayerJob]:
    """Every kind at every size in every dtype, without and with recomputation."""
    kinds, sizes = list(kinds), list(sizes)
    return [
        LayerJob(dtype, size, kind, recompute)
        for dtype in dtypes
        for size in sizes
        for kind in kinds
        for recompute in (False, True)
    ]
