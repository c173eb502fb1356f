"""The bench measures a stage; here with a clock that the layers turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.devices.device import device_for, is_out_of_memory
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.bench import (
    Bench,
    LayerTrial,
    OptimizerTrial,
    Repeats,
    attempt,
    measure_stage,
    median_of_blocks,
)
from lightning_hetero.pipeline.boundary import Surroundings
from lightning_hetero.pipeline.stage import Stage
from lightning_hetero.protocol import messages as m

CPU = torch.device("cpu")


class Hands:
    """The hands of a clock that only work turns."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Turning(torch.autograd.Function):
    """Takes 2 seconds forward and 3 backward."""

    @staticmethod
    def forward(ctx: object, hidden: Tensor, hands: Hands) -> Tensor:
        ctx.hands = hands  # type: ignore[attr-defined]
        hands.seconds += 2
        return hidden.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.hands.seconds += 3  # type: ignore[attr-defined]
        return gradient, None


class Layer(nn.Module):
    """Keeps one tensor as large as its input, and its input."""

    def __init__(self, hands: Hands) -> None:
        super().__init__()
        self.hands = hands
        self.linear = nn.Linear(64, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        turned: Tensor = Turning.apply(hidden, self.hands)
        return hidden + self.linear(turned)


def around(grad_enabled: bool = True) -> Surroundings:
    return Surroundings(grad_enabled, None, [LayerCall(0, True, (), {})])


def measured(recompute: bool = False, wants_gradient: bool = True) -> m.LayerMeasured:
    hands = Hands()
    stage = Stage(nn.ModuleDict({"0": Layer(hands)}), CPU, 1, recompute)
    if not wants_gradient:
        stage.layers.requires_grad_(False)
    hidden = torch.randn(8, 64, requires_grad=wants_gradient)
    return measure_stage(stage, hidden, around(), 0.0, hands)


HIDDEN_BYTES = 8 * 64 * 4


def test_seconds_are_those_of_the_stage() -> None:
    found = measured()
    assert (found.forward_seconds, found.backward_seconds) == (2, 3)


def test_what_is_kept_is_the_input_and_what_the_graph_needs() -> None:
    found = measured()
    assert found.saved_bytes == 2 * HIDDEN_BYTES
    assert found.peak_bytes > found.saved_bytes


def test_with_recomputation_only_the_input_is_kept_and_the_backward_is_longer() -> None:
    found = measured(recompute=True)
    assert (found.forward_seconds, found.backward_seconds) == (2, 5)
    assert found.saved_bytes == HIDDEN_BYTES


def test_a_frozen_layer_without_a_gradient_behind_it_has_no_backward() -> None:
    found = measured(wants_gradient=False)
    assert (found.backward_seconds, found.saved_bytes) == (0, 0)


def test_the_median_of_blocks_is_of_their_means() -> None:
    runs = itertools.cycle([[1.0], [9.0]])
    assert median_of_blocks(lambda: next(runs), 30.0) == Repeats([5.0], 0.0)
    once = iter([[1.0, 4.0], [7.0, 5.0], [2.0, 6.0]])
    assert median_of_blocks(lambda: next(once), 0.0).seconds == [2.0, 5.0]


class Device:
    """Takes 10 ms for a run, times a factor that changes with its clock."""

    def __init__(self, factor_at: Callable[[float], float]) -> None:
        self.seconds = 0.0
        self.factor_at = factor_at

    def run(self) -> list[float]:
        taken = 0.01 * self.factor_at(self.seconds)
        self.seconds += taken
        return [taken]


@pytest.mark.parametrize(
    ("factor_at", "seconds", "spread", "taken_seconds"),
    [
        # A calm device: three blocks of a second, and nothing more.
        (lambda now: 1.0, 0.01, 0.0, 3.0),
        (lambda now: 1.0 + 0.2 * (now > 2), 0.01, 0.0, 3.0),
        # One slow block of three changes no median, so nothing is repeated.
        (lambda now: 20.0 if now < 0.9 else 1.0, 0.01, 0.0, 3.0),
        # Busy at the beginning: more blocks follow until most of them agree.
        (lambda now: 20.0 if now < 1.5 else 1.0, 0.01, 0.0, 5.0),
        # Busy now and then: the limit ends the repeats, and the spread tells it.
        (lambda now: 1.0 + 2.0 * (now % 3 > 0.99), 0.03, 2.0, 6.0),
    ],
)
def test_blocks_that_differ_are_repeated(
    factor_at: Callable[[float], float], seconds: float, spread: float, taken_seconds: float
) -> None:
    device = Device(factor_at)
    found = median_of_blocks(device.run, 3.0)
    assert found.seconds == [pytest.approx(seconds, rel=0.3)]
    assert found.spread == pytest.approx(spread, abs=0.45)
    assert device.seconds == pytest.approx(taken_seconds, abs=0.5)


def test_runs_longer_than_the_patience_are_not_repeated() -> None:
    once = iter([1.0, 9.0, 20.0])
    found = median_of_blocks(lambda: [next(once)], 2.0)
    assert (found.seconds, found.spread) == ([9.0], 8.0)


def test_tensors_are_counted_while_they_live() -> None:
    before = torch.ones(100)
    with device_for(CPU).metering() as meter:
        kept = before * 2
        assert meter.taken_bytes() == 400
        view = kept[:50]
        before.add_(1)
        assert meter.taken_bytes() == 400
        del kept
        assert meter.taken_bytes() == 400  # its memory lives on in the view
        del view
        assert (meter.taken_bytes(), meter.peak_bytes()) == (0, 400)
        meter.reset_peak()
        assert meter.peak_bytes() == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_a_lack_of_memory_is_recognized(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def fail(error: Exception) -> None:
    raise error


def test_an_attempt_says_why_it_failed() -> None:
    found = attempt(partial(fail, RuntimeError("CUDA out of memory")), CPU)
    assert isinstance(found, m.NotMeasured)
    assert found.is_out_of_memory
    assert found.reason == "RuntimeError: CUDA out of memory"
    assert "in fail" in found.traceback
    assert attempt(lambda: 3, CPU) == 3


def bench_of(*layers: nn.Module) -> tuple[Bench, list[int]]:
    """A bench with layers on meta, and how often they were built."""
    built: list[int] = []

    def build() -> nn.ModuleDict:
        built.append(1)
        with torch.device("meta"):
            return nn.ModuleDict({str(n): nn.Linear(4, 4) for n in range(2)})

    return Bench(CPU, build, {}), built


def trial(number: int, dtype: torch.dtype | None = None) -> LayerTrial:
    calls: Sequence[LayerCall] = [LayerCall(number, True, (), {})]
    return LayerTrial(
        hidden_shape=(2, 4),
        hidden_dtype=torch.float32,
        wants_gradient=True,
        surroundings=Surroundings(True, None, calls),
        recompute=False,
        dtype=dtype,
        converts_weights=True,
        patience_seconds=0.0,
    )


def test_layers_are_built_once_for_each_dtype() -> None:
    bench, built = bench_of()
    for dtype in (None, None, torch.bfloat16):
        for number in (0, 1):
            assert bench.measure_layer(trial(number, dtype)).forward_seconds > 0
    assert len(built) == 2


def test_the_optimizer_steps_over_one_layer() -> None:
    bench, _ = bench_of()
    step = OptimizerTrial(1, "AdamW", {"lr": 0.1}, {"lr": 0.1}, 0.0)
    found = bench.measure_optimizer(step)
    assert found.step_seconds > 0
    assert found.state_bytes == 2 * (16 + 4) * 4 + 2 * 4
    assert attempt(partial(bench.measure_layer, trial(7)), CPU).reason.endswith(  # type: ignore[union-attr]
        "Layer 7 is not among the layers to be measured, which are [0, 1]."
    )
