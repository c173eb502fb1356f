"""A window over workers trains as its batches do under Lightning's accumulation on one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from lightning_hetero import (
    HeteroPipelineStrategy,
    PipelineProfiler,
    Plan,
    StagePlan,
    windows,
)
from lightning_hetero.errors import BatchError

from ..equality import assert_close, differing, weights_of
from ..models import TinyModule, fit, loader, scaled_precision
from ..pairwise import keeping
from .yardstick import NUM_LAYERS, plan_over

SIZE = 4
OPTIONS: dict[str, Any] = {
    "max_epochs": 2,
    # The norm of gradients on several devices is rounded otherwise than that of one device.
    "gradient_clip_val": 0.01,
    "gradient_clip_algorithm": "value",
}


class Adapted(TinyModule):
    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        torch.manual_seed(0)
        self.model = get_peft_model(self.model, config)  # type: ignore[assignment]


def data() -> Any:
    """Ten batches of two samples: the last window of an epoch is short."""
    return loader(20, 2, padded=True)


@cache
def accumulated(kind: type[TinyModule], precision: str = "32") -> TinyModule:
    plugins = [scaled_precision()] if precision == "16" else None
    return fit(
        kind(NUM_LAYERS),
        data=data(),
        accumulate_grad_batches=SIZE,
        plugins=plugins,
        **OPTIONS,
    )


@pytest.mark.parametrize(
    ("kind", "micro_batching", "precision", "pieces"),
    keeping(
        [(TinyModule, "step", "32", 1), (TinyModule, "boundary", "32", 1)],
        [
            (TinyModule, "step", "32", 1),
            (TinyModule, "step", "32", 7),
            (TinyModule, "boundary", "32", 1),
            (Adapted, "step", "32", 4),
            (Adapted, "boundary", "32", 1),
            (TinyModule, "step", "16", 1),
            (TinyModule, "boundary", "16", 1),
        ],
    ),
)
def test_weights_are_bit_equal_to_accumulation(
    workers: list[str], kind: Any, micro_batching: Any, precision: str, pieces: int
) -> None:
    plan = plan_over(workers, 3, 1, pieces)
    strategy = HeteroPipelineStrategy(workers, plan, micro_batching=micro_batching)
    plugins = [scaled_precision()] if precision == "16" else None
    found = fit(kind(NUM_LAYERS), strategy, windows(data(), SIZE), plugins=plugins, **OPTIONS)
    assert differing(found, accumulated(kind, precision)) == []
    assert len(found.losses) == 6


def test_pieces_that_are_cut_equal_one_device(workers: list[str]) -> None:
    strategy = HeteroPipelineStrategy(workers, plan_over(workers, 3, 1, 2 * SIZE))
    found = fit(TinyModule(NUM_LAYERS), strategy, windows(data(), SIZE), **OPTIONS)
    assert_close(weights_of(found), weights_of(accumulated(TinyModule)))


def test_replicas_share_the_pieces_of_a_window(workers: list[str]) -> None:
    stages = [StagePlan(["coordinator"], (0, 1)), StagePlan(workers[:2], (1, NUM_LAYERS))]
    strategy = HeteroPipelineStrategy(workers[:2], Plan(stages, micro_batches=1))
    found = fit(TinyModule(NUM_LAYERS), strategy, windows(data(), SIZE), **OPTIONS)
    assert_close(weights_of(found), weights_of(accumulated(TinyModule)))


def test_a_measured_plan_counts_pieces(workers: list[str]) -> None:
    strategy = HeteroPipelineStrategy(workers[:1], "auto")
    profiler = PipelineProfiler(budget_seconds=1)
    module = TinyModule(NUM_LAYERS)
    found = fit(module, strategy, windows(data(), SIZE), callbacks=[profiler], **OPTIONS)
    profile = strategy.plan_choice.profile
    assert profile is not None
    assert (profile.batch_size, profile.window) == (2 * SIZE, SIZE)
    # A piece has two samples; whether each is a micro-batch of its own depends on the times.
    assert {t.micro_batch_size for device in profile.devices for t in device.timings} <= {1, 2}
    assert_close(weights_of(found), weights_of(accumulated(TinyModule)))


class Carrying(TinyModule):
    """Hands a value from one batch to the next."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.carried = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale = self.carried
        loss = super().training_step(batch, batch_idx) * scale
        self.carried = 0.9 * scale + 0.1 * float(loss.detach())
        return loss


def test_what_goes_from_piece_to_piece_is_refused_and_boundary_trains_it(
    workers: list[str],
) -> None:
    plan = plan_over(workers, 2, 1, 1)
    with pytest.raises(BatchError, match="other losses in their step than one after the other"):
        fit(Carrying(NUM_LAYERS), HeteroPipelineStrategy(workers, plan), windows(loader(4, 1), 4))
    expected = fit(Carrying(NUM_LAYERS), data=loader(4, 1), accumulate_grad_batches=4)
    strategy = HeteroPipelineStrategy(workers, plan, micro_batching="boundary")
    found = fit(Carrying(NUM_LAYERS), strategy, windows(loader(4, 1), 4))
    assert_close(weights_of(found), weights_of(expected))


class InFlight(TinyModule):
    """Notes how many pieces have begun, and how many had ended then."""

    def on_fit_start(self) -> None:
        self.begun = self.ended = self.most = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.begun += 1
        self.most = max(self.most, self.begun - self.ended)
        loss = super().training_step(batch, batch_idx)
        self.ended += 1
        return loss


@pytest.mark.filterwarnings("ignore:`training_step` changes begun")
def test_the_pieces_of_a_window_are_on_their_way_at_once(workers: list[str]) -> None:
    module = InFlight(NUM_LAYERS)
    strategy = HeteroPipelineStrategy(workers, plan_over(workers, 3, 1, 1))
    fit(module, strategy, windows(loader(8, 1), 8))
    assert module.most > 1
