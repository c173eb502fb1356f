"""Measures in this process: the coordinator's ends, and layers as they would run here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning_utilities.core.rank_zero import rank_zero_info

from ..errors import StageFailed
from ..pipeline.bench import Clock, Failed, Measurement, attempt
from ..planner.profile import EMBEDDING, HEAD, Timing
from ..planning.measuring import LayerJob, patience_seconds
from .benches import DeviceResult, Trials, run_here, timing_of
from .ends import Ends
from .sighting import Cutting, Sighting

Tick = Callable[[], None]


@dataclass(frozen=True)
class EndsResult:
    """What was measured of the coordinator's ends, and the largest micro-batch that fits if a
    larger one did not."""

    timings: list[Timing]
    largest_micro_batch: int | None = None


def measure_ends(
    sighting: Sighting, cutting: Cutting, budget_seconds: float, clock: Clock, tick: Tick
) -> EndsResult:
    """Embedding, head and loss at every size that memory and time allow; the smallest in any case.

    Raises:
        StageFailed: If the ends cannot be run.
    """
    sizes = sorted(sighting.subject.examples)
    patience = patience_seconds(budget_seconds, len(sizes))
    if cutting.at_boundary:
        return _measure_whole(sighting, cutting, patience, tick)
    timings: list[Timing] = []
    end_seconds, last_seconds = clock() + budget_seconds, 0.0
    for size in sizes:
        start = clock()
        # The next one is about twice as large.
        if timings and start + 2 * last_seconds > end_seconds:
            break
        found = _measure_batch(sighting, cutting.sample.first(size), patience)
        tick()
        if isinstance(found, Failed):
            _check_only_memory(found, size)
            return EndsResult(timings, max((t.micro_batch_size for t in timings), default=0))
        timings += _timings(sighting, size, found)
        last_seconds = clock() - start
    return EndsResult(timings)


def _measure_whole(
    sighting: Sighting, cutting: Cutting, patience_seconds: float, tick: Tick
) -> EndsResult:
    """The ends run once for a batch, so each micro-batch has its part of that."""
    found = _measure_batch(sighting, cutting.sample.batch, patience_seconds)
    tick()
    if isinstance(found, Failed):
        raise _failure(found, sighting.batch_size)
    timings = []
    for size in sorted(sighting.subject.examples):
        share = size / sighting.batch_size
        ends = Ends(_part(found.embedding, share), _part(found.head, share))
        timings += _timings(sighting, size, ends)
    return EndsResult(timings)


def _part(whole: Measurement, share: float) -> Measurement:
    return Measurement(
        whole.forward_seconds * share,
        whole.backward_seconds * share,
        round(whole.saved_bytes * share),
        round(whole.peak_bytes * share),
    )


def _measure_batch(sighting: Sighting, batch: object, patience_seconds: float) -> Ends | Failed:
    measure = partial(sighting.runner.measure, batch, patience_seconds)
    return attempt(measure, sighting.bench.device)


def _timings(sighting: Sighting, size: int, ends: Ends) -> list[Timing]:
    dtype = sighting.subject.dtype
    found = ((EMBEDDING, ends.embedding), (HEAD, ends.head))
    return [timing_of(LayerJob(dtype, size, part, False), taken) for part, taken in found]


def _check_only_memory(failed: Failed, size: int) -> None:
    if not failed.is_out_of_memory or size == 1:
        raise _failure(failed, size)
    rank_zero_info(f"the coordinator has not enough memory for its ends on {size} samples")


def _failure(failed: Failed, size: int) -> StageFailed:
    return StageFailed(
        f"The coordinator failed while it measured `training_step` on {size} samples: "
        f"{failed.reason}\n\n{failed.traceback}"
    )


def lead_trials(sighting: Sighting, trials: Trials, tick: Tick) -> DeviceResult:
    """Lead trials with this process's own bench."""
    try:
        trial = next(trials)
        while True:
            outcome = run_here(sighting.bench, trial)
            tick()
            trial = trials.send(outcome)
    except StopIteration as end:
        result: DeviceResult = end.value
        return result
