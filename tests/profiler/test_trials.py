"""The conversation with a device, led with a made-up device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_hetero.errors import ModelError, StageFailed
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.pipeline.bench import LayerTrial
from lightning_hetero.pipeline.boundary import Surroundings
from lightning_hetero.plan import Dtype
from lightning_hetero.planner.profile import ModelProfile, Part, Timing
from lightning_hetero.profiler.dry_run import OptimizerSettings
from lightning_hetero.profiler.ends import Example
from lightning_hetero.profiler.model_view import Subject
from lightning_hetero.profiler.sample_layers import Blueprint
from lightning_hetero.profiler.trials import (
    DeviceResult,
    LayerSchedule,
    Outcome,
    Trial,
    Trials,
    affordable,
    again,
    corrections,
    doubtful,
    is_calmer,
    layer_jobs,
    still_varying,
    trials,
    with_shorter,
)
from lightning_hetero.protocol import messages as m

from ..models import tiny_llama

Device = Callable[[Trial], Outcome]


def example(size: int, called: bool = True) -> Example:
    calls = {1: LayerCall(1, True, (), {})} if called else {}
    inputs = dict.fromkeys(range(2), torch.empty(size, 3, 16, device="meta"))
    return Example(inputs, True, Surroundings(True, None, []), calls)


def subject(sizes: list[int], called: bool = True) -> Subject:
    model = tiny_llama(2)
    return Subject(
        blueprint=Blueprint.draw(model, find_decoder_layers(model), ["layer", "layer"]),
        wants_gradient=[True, True],
        examples={size: example(size, called) for size in sizes},
        optimizer=OptimizerSettings("SGD", {"lr": 0.1}, {"lr": 0.1}),
        dtype="float32",
        converts_weights=True,
    )


class Clock:
    """Advances by a second at each reading."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1
        return self.seconds


def lead(
    device: Device, dtypes: tuple[Dtype, ...] = ("float32",), end_seconds: float = 1e9
) -> tuple[DeviceResult, list[Trial]]:
    """The results of a device, and the trials that it was asked for."""
    measured = subject([1, 2, 4])
    schedule = LayerSchedule(layer_jobs(["layer"], [1, 2, 4], dtypes), end_seconds)
    return talk(trials(measured, schedule, 0.1, Clock(), "old-tower"), device)


def talk(conversation: Trials, device: Device) -> tuple[DeviceResult, list[Trial]]:
    asked: list[Trial] = []
    try:
        trial = next(conversation)
        while True:
            asked.append(trial)
            trial = conversation.send(device(trial))
    except StopIteration as end:
        return end.value, asked


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
    assert {trial.number for trial in asked} == {1}


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


def test_a_layer_that_was_not_called_is_refused() -> None:
    schedule = LayerSchedule(layer_jobs(["layer"], [1], ["float32"]), 1.0)
    conversation = trials(subject([1], called=False), schedule, 0.1, Clock(), "here")
    with pytest.raises(ModelError, match="Layer 1 was not called"):
        next(conversation)


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
    [told] = corrections("here", [timed("embedding", 0.4)], [timed("embedding", 0.02)])
    assert "for an embedding on 1 sample" in told


def test_the_shorter_time_is_kept_and_a_correction_says_so() -> None:
    first = [timed("head", 0.417), timed("full", 0.010), timed("full", 0.020, 2)]
    second = [timed("head", 0.019), timed("full", 0.011)]
    kept = with_shorter(first, second)
    assert kept == [second[0], first[1], first[2]]
    assert list(corrections("here", first, second)) == [
        "here took 417 ms for a head on 1 sample, which was doubtful, and 19 ms when it was "
        "measured again; the shorter time is kept"
    ]


def test_a_device_that_is_faster_at_the_end_was_busy_before() -> None:
    slow, fast = timed("full", 2.0), timed("full", 1.0)
    assert is_calmer(slow, fast)
    assert not is_calmer(fast, slow)
    assert not is_calmer(fast, timed("full", 0.9))


def test_a_device_that_varies_to_the_end_is_named() -> None:
    calm, varying = timed("full", 1.0, spread=0.2), timed("full", 2.0, 2, spread=1.5)
    assert still_varying("old-tower", [calm]) is None
    told = still_varying("old-tower", [calm, varying])
    assert told is not None
    assert "for a full on 2 samples the median is 150% above the fastest, and 1 of its 2" in told
    assert "PipelineProfiler(force=True)" in told
