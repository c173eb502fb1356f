"""The schedule of a device, and the conversation with it, led with a made-up device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_hetero.errors import StageFailed
from lightning_hetero.pipeline.bench import LayerTrial
from lightning_hetero.plan import Dtype
from lightning_hetero.planner.profile import ModelProfile, Part, Timing
from lightning_hetero.profiler.measured_model import LayerJob, micro_batch_sizes
from lightning_hetero.profiler.trials import (
    DeviceResult,
    LayerSchedule,
    Outcome,
    Trial,
    affordable,
    again,
    change_of_speed,
    correction,
    doubtful,
    dtypes_to_measure,
    is_calmer,
    is_worth_repeating,
    layer_jobs,
    patience_seconds,
    still_varying,
    trials,
    with_shorter,
)
from lightning_hetero.protocol import messages as m

from .dry_runs import Clock, Device, subject, talk


def lead(
    device: Device, dtypes: tuple[Dtype, ...] = ("float32",), end_seconds: float = 1e9
) -> tuple[DeviceResult, list[Trial]]:
    """The results of a device, and the trials that it was asked for."""
    measured = subject([1, 2, 4])
    schedule = LayerSchedule(layer_jobs(["layer"], [1, 2, 4], dtypes), end_seconds)
    return talk(trials(measured, schedule, 0.1, Clock(), "old-tower"), device)


def sound(trial: Trial) -> Outcome:
    if isinstance(trial, LayerTrial):
        size = trial.hidden_shape[0]
        return m.LayerMeasured(0.1 * size, 0.2 * size, 10 * size, 20 * size, 0.0)
    return m.OptimizerMeasured(0.5, 64)


def failing(is_out_of_memory: bool, when: Callable[[LayerTrial], bool]) -> Device:
    def device(trial: Trial) -> Outcome:
        if isinstance(trial, LayerTrial) and when(trial):
            return m.NotMeasured("RuntimeError: no", "Traceback: there", is_out_of_memory)
        return sound(trial)

    return device


def test_everything_is_measured_and_the_optimizer_once() -> None:
    result, asked = lead(sound)
    assert [timing.micro_batch_size for timing in result.timings] == [1, 1, 2, 2, 4, 4]
    assert [timing.recompute for timing in result.timings] == [False, True] * 3
    assert result.timings[2].backward_seconds == 0.4
    assert result.optimizers == {"layer": m.OptimizerMeasured(0.5, 64)}
    assert sum(not isinstance(trial, LayerTrial) for trial in asked) == 1
    # The last layer of a kind stands for it.
    layers = [trial for trial in asked if isinstance(trial, LayerTrial)]
    assert {number for trial in layers for number in trial.numbers} == {1}


def test_the_first_trial_is_asked_for_again() -> None:
    result, asked = lead(sound)
    found, repeated = talk(again(subject([1, 2, 4]), result.timings[:1], 0.1), sound)
    assert repeated == asked[:1]
    assert found.timings == result.timings[:1]


def test_a_first_trial_that_fails_the_second_time_tells_nothing() -> None:
    result, _ = lead(sound)
    failed = failing(True, lambda trial: True)
    found, _ = talk(again(subject([1, 2, 4]), result.timings, 0.1), failed)
    assert found.timings == []


def test_a_device_without_time_is_asked_once_for_each_kind() -> None:
    result, asked = lead(sound, end_seconds=0.0)
    assert len(result.timings) == 1
    assert len(asked) == 2


def test_a_device_out_of_memory_gets_no_larger_sizes() -> None:
    result, _ = lead(failing(True, lambda trial: trial.hidden_shape[0] >= 4))
    assert result.largest_micro_batch == 2
    assert max(timing.micro_batch_size for timing in result.timings) == 2


def test_a_failure_in_the_users_precision_names_layer_and_worker() -> None:
    with pytest.raises(StageFailed, match=r"old-tower failed .* layer \(layer 1\) on 2 .*: no"):
        lead(failing(False, lambda trial: trial.hidden_shape[0] >= 2))


def test_a_dtype_that_fails_beside_it_is_left_out() -> None:
    device = failing(False, lambda trial: trial.dtype is torch.float16)
    result, asked = lead(device, ("float32", "float16"))
    assert {timing.dtype for timing in result.timings} == {"float32"}
    assert sum(isinstance(t, LayerTrial) and t.dtype is torch.float16 for t in asked) == 1


def test_an_optimizer_that_fails_is_named() -> None:
    def device(trial: Trial) -> Outcome:
        return (
            sound(trial)
            if isinstance(trial, LayerTrial)
            else m.NotMeasured("no optimizer", "", False)
        )

    with pytest.raises(StageFailed, match=r"the step of SGD over a layer \(layer 1\): no"):
        lead(device)


def timed(part: str, seconds: float, size: int = 1, **others: Any) -> Timing:
    return Timing(part, size, seconds / 3, 2 * seconds / 3, **others)


def two_kinds(head_bytes: int = 0) -> ModelProfile:
    """Layers with equal parameters whose classes differ, and larger ones."""
    sizes = {"embedding": 0, "head": head_bytes, "full": 100, "sliding": 100, "wide": 400}
    return ModelProfile(
        fingerprint="test",
        layers=["full", "sliding", "wide"],
        parts=[Part(name, size) for name, size in sizes.items()],
        tokens_per_sample=8,
        activation_bytes_per_sample=0,
        gradient_bytes_per_sample=0,
    )


@pytest.mark.parametrize(
    ("timings", "doubted"),
    [
        # Measured on a calm device.
        ([timed("full", 1.0), timed("full", 1.8, 2), timed("full", 3.7, 4)], []),
        ([timed("full", 1.0), timed("full", 0.6, 2)], []),
        ([timed("full", 1.0), timed("full", 1.4, recompute=True)], []),
        ([timed("full", 1.0), timed("sliding", 0.5), timed("wide", 9.0)], []),
        ([timed("head", 3.9), timed("full", 1.0)], []),
        ([timed("head", 9.0), timed("full", 1.0, 2)], []),
        ([timed("head", 417.0)], []),
        # A smaller micro-batch took longer, so the device was busy meanwhile.
        ([timed("full", 5.0), timed("full", 2.0, 2), timed("full", 4.0, 4)], [0]),
        ([timed("full", 1.0), timed("full", 40.0, 2), timed("full", 4.0, 4)], [1]),
        ([timed("full", 1.0), timed("full", 2.0, 2), timed("full", 40.0, 4)], [2]),
        # Other dtypes and recomputation have times of their own.
        ([timed("full", 5.0), timed("full", 1.0, 2, dtype="bfloat16")], []),
        ([timed("full", 1.0), timed("full", 9.0, recompute=True)], [1]),
        ([timed("full", 9.0), timed("full", 1.4, recompute=True)], [0]),
        # Layers that have equal parameters, and do not take equal times.
        ([timed("full", 4.0), timed("sliding", 1.0)], [0]),
        ([timed("full", 1.0), timed("sliding", 4.0), timed("wide", 1.0)], [1]),
        # The head of the report: 417 ms, and really 19 ms.
        ([timed("embedding", 0.001), timed("head", 0.417), timed("full", 0.019)], [1]),
        ([timed("embedding", 0.5), timed("head", 0.019), timed("full", 0.019)], [0]),
        # The repeated runs differed.
        ([timed("full", 1.0, spread=0.2), timed("full", 2.0, 2, spread=0.9)], [1]),
        ([timed("full", 0.0002, spread=3.0)], []),
    ],
)
def test_timings_that_others_contradict_are_doubtful(
    timings: list[Timing], doubted: list[int]
) -> None:
    assert doubtful(two_kinds(), timings) == [timings[index] for index in doubted]


def test_an_end_may_take_as_long_as_its_parameters_need() -> None:
    timings = [timed("head", 30.0), timed("full", 1.0)]
    assert doubtful(two_kinds(), timings) == timings[:1]
    assert doubtful(two_kinds(head_bytes=1000), timings) == []


def test_doubtful_timings_take_at_most_half_of_a_devices_time() -> None:
    timings = [timed("full", 1.0), timed("full", 2.0, 2), timed("full", 4.0, 4)]
    assert affordable(timings, 0.5, 1000.0) == timings
    assert affordable(timings, 0.5, 40.0) == timings[:2]
    assert affordable(timings, 0.5, 1.0) == []


def test_a_part_has_its_article() -> None:
    told = correction("here", [timed("embedding", 0.4)], [timed("embedding", 0.02)])
    assert told is not None
    assert "for an embedding on 1 sample" in told


def test_the_shorter_time_is_kept_and_a_correction_says_so() -> None:
    first = [timed("head", 0.417), timed("full", 0.010), timed("full", 0.020, 2)]
    second = [timed("head", 0.019), timed("full", 0.011)]
    kept = with_shorter(first, second)
    assert kept == [second[0], first[1], first[2]]
    assert correction("here", first, second) == (
        "here took 417 ms for a head on 1 sample, a doubtful time, and 19 ms in a second "
        "measurement; the shorter time is kept"
    )
    assert correction("here", first, [second[1]]) is None


def test_one_sentence_tells_of_all_corrections() -> None:
    first = [timed("head", 0.4), timed("full", 0.5), timed("full", 0.020, 2)]
    told = correction("here", first, [timed("head", 0.2), timed("full", 0.1)])
    assert told == (
        "here took 500 ms for a full on 1 sample, a doubtful time, and 100 ms in a second "
        "measurement; the shorter time is kept, and so are the times of 1 more of its 3 timings"
    )


def test_a_device_that_is_faster_at_the_end_was_busy_before() -> None:
    slow, fast = timed("full", 2.0), timed("full", 1.0)
    assert is_calmer(slow, fast)
    assert not is_calmer(fast, slow)
    assert not is_calmer(fast, timed("full", 0.9))


# By `PipelineProfiler(force=True)` and the command's `--force` a run measures anew in
# `test_profiling_run.py` and `test_cli.py`.
@pytest.mark.follows(
    "Measure again on idle machines, by `PipelineProfiler(force=True)` or `lightning-hetero "
    "profile CONFIG --force`."
)
def test_a_device_that_varies_to_the_end_is_named() -> None:
    calm, varying = timed("full", 1.0, spread=0.2), timed("full", 2.0, 2, spread=1.5)
    assert still_varying("old-tower", [calm]) is None
    told = still_varying("old-tower", [calm, varying])
    assert told is not None
    assert "for a full on 2 samples the median is 150% above the fastest, and 1 of its 2" in told
    assert "PipelineProfiler(force=True)" in told
    assert still_varying("old-tower", [calm, timed("full", 2.0, 2, spread=0.1)]) is None


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


def played(
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
    assert len(played(schedule)) == 6
    assert schedule.largest_micro_batch is None


def test_when_time_ends_every_kind_has_been_measured_once() -> None:
    jobs = layer_jobs(["dense", "mixture"], [1, 2, 4], ["float32"])
    schedule = LayerSchedule(jobs, end_seconds=0.0)
    assert played(schedule, seconds_per_sample=1.0) == ["float32 dense 1", "float32 mixture 1"]


def test_a_trial_that_would_end_too_late_is_not_begun() -> None:
    jobs = layer_jobs(["dense"], [1, 2, 4, 8], ["float32"])
    schedule = LayerSchedule(jobs, end_seconds=8.0)
    # 1 + 1 + 2 + 2 seconds so far, and 4 more would be 10.
    assert played(schedule, seconds_per_sample=1.0)[-1] == "float32 dense 2 again"


def test_after_running_out_of_memory_smaller_ones_of_other_kinds_go_on() -> None:
    jobs = layer_jobs(["dense", "mixture"], [1, 2, 4], ["float32", "bfloat16"])
    schedule = LayerSchedule(jobs, end_seconds=100.0)
    tried = played(
        schedule,
        fits=lambda job: job.dtype == "bfloat16" or job.kind == "dense" or job.micro_batch_size < 2,
    )
    assert schedule.largest_micro_batch == 1
    assert "float32 mixture 2" in tried
    assert "float32 dense 4" not in tried
    assert tried[-1] == "bfloat16 mixture 1 again"


def test_a_device_on_which_nothing_fits_says_so() -> None:
    schedule = LayerSchedule(layer_jobs(["dense"], [1, 2], ["float32"]), end_seconds=100.0)
    assert played(schedule, fits=lambda job: False) == ["float32 dense 1"]
    assert schedule.largest_micro_batch == 0


def test_another_dtype_that_does_not_fit_limits_only_itself() -> None:
    jobs = layer_jobs(["dense"], [1, 2], ["bfloat16", "float32"])
    schedule = LayerSchedule(jobs, end_seconds=100.0)
    tried = played(schedule, fits=lambda job: (job.dtype, job.micro_batch_size) != ("float32", 2))
    assert schedule.largest_micro_batch is None
    assert tried[-1] == "float32 dense 2"


def test_a_trial_that_needs_too_much_memory_is_not_begun() -> None:
    jobs = layer_jobs(["dense"], [1, 2, 4, 8], ["float32"])
    schedule = LayerSchedule(jobs, end_seconds=100.0, most_peak_bytes=250)
    assert played(schedule)[-1] == "float32 dense 2 again"
    assert schedule.largest_micro_batch == 2


def test_recomputation_is_measured_only_beside_the_plain_run() -> None:
    schedule = LayerSchedule(layer_jobs(["dense"], [1], ["float32"]), end_seconds=100.0)
    assert schedule.next(0.0) is not None
    assert schedule.next(0.0) is None


def test_a_dtype_that_the_device_cannot_run_is_skipped() -> None:
    jobs = layer_jobs(["dense"], [1, 2], ["float32", "float16"])
    schedule = LayerSchedule(jobs, end_seconds=100.0)
    schedule.skip("float16")
    assert all("float16" not in tried for tried in played(schedule))


def test_patience_is_shared_and_bounded() -> None:
    assert patience_seconds(60.0, 10) == 0.6
    assert patience_seconds(1.0, 10) == pytest.approx(0.05)
    assert patience_seconds(0.1, 0) == pytest.approx(0.05)
