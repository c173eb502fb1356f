from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_hetero.planner.profile import Timing
from lightning_hetero.profiler.model_view import micro_batch_sizes
from lightning_hetero.profiler.sample_layers import LayerJob
from lightning_hetero.profiler.trials import (
    LayerSchedule,
    change_of_speed,
    dtypes_to_measure,
    is_worth_repeating,
    layer_jobs,
    patience_seconds,
)


def timing(job: LayerJob, peak_bytes: int = 0) -> Timing:
    return Timing(
        part=job.kind,
        micro_batch_size=job.micro_batch_size,
        forward_seconds=1.0,
        backward_seconds=2.0,
        peak_bytes=peak_bytes,
        dtype=job.dtype,
        recompute=job.recompute,
    )


def short(job: LayerJob) -> str:
    """Such as ``float32 dense 4 again``."""
    again = " again" if job.recompute else ""
    return f"{job.dtype} {job.kind} {job.micro_batch_size}{again}"


def lead(
    schedule: LayerSchedule,
    seconds_per_sample: float = 0.0,
    fits: Callable[[LayerJob], bool] = lambda job: True,
) -> list[str]:
    """Follow a schedule on a device of that speed, and list the trials."""
    now, tried = 0.0, []
    while (job := schedule.next(now)) is not None:
        tried.append(short(job))
        seconds = seconds_per_sample * job.micro_batch_size
        now += seconds
        if fits(job):
            schedule.note_timing(timing(job, 100 * job.micro_batch_size), seconds)
        else:
            schedule.note_out_of_memory(job)
    return tried


def taking(seconds: float, size: int = 1) -> Timing:
    return Timing("layer", size, forward_seconds=seconds / 4, backward_seconds=3 * seconds / 4)


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        (0.01, 0.01, False),
        (0.01, 0.012, False),
        (0.012, 0.01, False),
        (0.01, 0.013, True),
        (0.013, 0.01, True),
        (0.01, 0.02, True),
        (0.0, 0.0, False),
        (0.0, 0.01, True),
    ],
)
def test_a_change_of_over_a_quarter_either_way_is_told(
    before: float, after: float, changed: bool
) -> None:
    assert (change_of_speed("local-1", taking(before), taking(after)) is not None) is changed


def test_a_changed_device_is_named_with_both_figures_and_the_remedy() -> None:
    told = change_of_speed("old-tower:9", taking(0.0123, 2), taking(0.02468, 2))
    assert told is not None
    assert "old-tower:9 took 12.3 ms for a layer on 2 samples" in told
    assert "and 24.7 ms" in told
    assert "--force" in told


@pytest.mark.parametrize(
    ("seconds", "patience", "expected"),
    [(0.001, 0.6, True), (0.001, 0.05, False), (0.48, 0.6, True), (0.5, 0.6, False)],
)
def test_only_a_precise_and_short_trial_is_repeated(
    seconds: float, patience: float, expected: bool
) -> None:
    assert is_worth_repeating(taking(seconds), patience, 24.0) is expected


@pytest.mark.parametrize(
    ("batch_size", "sizes"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])]
)
def test_sizes_double_up_to_the_batch(batch_size: int, sizes: list[int]) -> None:
    assert micro_batch_sizes(batch_size) == sizes


def test_the_users_precision_comes_first_and_float32_beside_it() -> None:
    assert dtypes_to_measure("bfloat16", ["float32", "bfloat16", "float16"]) == [
        "bfloat16",
        "float32",
    ]
    assert dtypes_to_measure("float32", ["float32", "bfloat16"]) == ["float32"]
    assert dtypes_to_measure("bfloat16", ["float32", "float16"]) == ["float32", "float16"]


def test_small_sizes_of_all_kinds_come_first() -> None:
    jobs = layer_jobs(["dense", "mixture"], [1, 2], ["float32", "bfloat16"])
    assert len(jobs) == 16
    assert [short(job) for job in jobs[:5]] == [
        "float32 dense 1",
        "float32 dense 1 again",
        "float32 mixture 1",
        "float32 mixture 1 again",
        "float32 dense 2",
    ]


def test_with_time_and_memory_everything_is_measured() -> None:
    jobs = layer_jobs(["dense"], [1, 2, 4], ["float32"])
    schedule = LayerSchedule(jobs, end_seconds=100.0)
    assert len(lead(schedule)) == 6
    assert schedule.largest_micro_batch is None


def test_when_time_ends_every_kind_has_been_measured_once() -> None:
    jobs = layer_jobs(["dense", "mixture"], [1, 2, 4], ["float32"])
    schedule = LayerSchedule(jobs, end_seconds=0.0)
    assert lead(schedule, seconds_per_sample=1.0) == ["float32 dense 1", "float32 mixture 1"]


def test_a_trial_that_would_end_too_late_is_not_begun() -> None:
    jobs = layer_jobs(["dense"], [1, 2, 4, 8], ["float32"])
    schedule = LayerSchedule(jobs, end_seconds=8.0)
    # 1 + 1 + 2 + 2 seconds so far, and 4 more would be 10.
    assert lead(schedule, seconds_per_sample=1.0)[-1] == "float32 dense 2 again"


def test_after_running_out_of_memory_smaller_ones_of_other_kinds_go_on() -> None:
    jobs = layer_jobs(["dense", "mixture"], [1, 2, 4], ["float32", "bfloat16"])
    schedule = LayerSchedule(jobs, end_seconds=100.0)
    tried = lead(
        schedule,
        fits=lambda job: job.dtype == "bfloat16" or job.kind == "dense" or job.micro_batch_size < 2,
    )
    assert schedule.largest_micro_batch == 1
    assert "float32 mixture 2" in tried
    assert "float32 dense 4" not in tried
    assert tried[-1] == "bfloat16 mixture 1 again"


def test_a_device_on_which_nothing_fits_says_so() -> None:
    schedule = LayerSchedule(layer_jobs(["dense"], [1, 2], ["float32"]), end_seconds=100.0)
    assert lead(schedule, fits=lambda job: False) == ["float32 dense 1"]
    assert schedule.largest_micro_batch == 0


def test_another_dtype_that_does_not_fit_limits_only_itself() -> None:
    jobs = layer_jobs(["dense"], [1, 2], ["bfloat16", "float32"])
    schedule = LayerSchedule(jobs, end_seconds=100.0)
    tried = lead(schedule, fits=lambda job: (job.dtype, job.micro_batch_size) != ("float32", 2))
    assert schedule.largest_micro_batch is None
    assert tried[-1] == "float32 dense 2"


def test_a_trial_that_needs_too_much_memory_is_not_begun() -> None:
    jobs = layer_jobs(["dense"], [1, 2, 4, 8], ["float32"])
    schedule = LayerSchedule(jobs, end_seconds=100.0, most_peak_bytes=250)
    assert lead(schedule)[-1] == "float32 dense 2 again"
    assert schedule.largest_micro_batch == 2


def test_recomputation_is_measured_only_beside_the_plain_run() -> None:
    schedule = LayerSchedule(layer_jobs(["dense"], [1], ["float32"]), end_seconds=100.0)
    assert schedule.next(0.0) is not None
    assert schedule.next(0.0) is None


def test_a_dtype_that_the_device_cannot_run_is_skipped() -> None:
    jobs = layer_jobs(["dense"], [1, 2], ["float32", "float16"])
    schedule = LayerSchedule(jobs, end_seconds=100.0)
    schedule.skip("float16")
    assert all("float16" not in tried for tried in lead(schedule))


def test_patience_is_shared_and_bounded() -> None:
    assert patience_seconds(60.0, 10) == 0.6
    assert patience_seconds(1.0, 10) == pytest.approx(0.05)
    assert patience_seconds(0.1, 0) == pytest.approx(0.05)
