"""The crown: training over workers equals plain Lightning on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import StageFailed

from ..conftest import worker_process
from ..equality import assert_close, differing, weights_of
from ..models import TinyModule, fit
from ..pairwise import each_value, keeping
from .yardstick import (
    NUM_LAYERS,
    NUM_PIECES,
    TwiceModule,
    accumulated_run,
    plan_over,
    train,
)


@pytest.mark.parametrize(
    ("num_stages", "tied"), keeping([(3, False), (4, True)], each_value([2, 3, 4], [True, False]))
)
def test_weights_are_bit_equal_to_accumulation_over_the_same_micro_batches(
    workers: list[str], num_stages: int, tied: bool
) -> None:
    strategy = HeteroPipelineStrategy(workers, plan_over(workers, num_stages, 1, NUM_PIECES))
    piped = TinyModule(NUM_LAYERS, tie_word_embeddings=tied)
    train(piped, strategy, padded=False)
    assert differing(piped, accumulated_run(NUM_PIECES, tied)) == []


@pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")
@pytest.mark.parametrize(
    "workers_wanted", keeping([2], [2, ["127.0.0.1:1"]]), ids=["local", "listed"]
)
def test_a_plan_without_workers_cuts_batches_and_starts_no_worker(
    workers_wanted: int | list[str],
) -> None:
    plan = Plan([StagePlan(["coordinator"], (0, NUM_LAYERS))], micro_batches=NUM_PIECES)
    strategy = HeteroPipelineStrategy(workers_wanted, plan)
    alone = train(TinyModule(NUM_LAYERS), strategy, padded=False)
    assert differing(alone, accumulated_run(NUM_PIECES)) == []


@pytest.mark.parametrize(
    "frozen",
    keeping(
        ["embed_tokens", "layers"], ["embed_tokens", "layers.0", "layers.3", "layers", "lm_head"]
    ),
)
def test_frozen_parts_equal_one_device(workers: list[str], frozen: str) -> None:
    def freeze(module: TinyModule) -> TinyModule:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(frozen not in name)
        return module

    plain, piped = freeze(TinyModule(NUM_LAYERS)), freeze(TinyModule(NUM_LAYERS))
    train(plain, "auto")
    train(piped, HeteroPipelineStrategy(workers, plan_over(workers, 3, 1, 4)))
    assert_close(weights_of(piped), weights_of(plain))


@pytest.mark.parametrize("micro_batching", keeping(["boundary"], ["step", "boundary"]))
def test_a_model_that_is_called_several_times_equals_one_device(
    workers: list[str], micro_batching: Any
) -> None:
    plain, piped = TwiceModule(NUM_LAYERS), TwiceModule(NUM_LAYERS)
    train(plain, "auto", padded=False)
    plan = plan_over(workers, 3, 1, 4)
    strategy = HeteroPipelineStrategy(workers, plan, micro_batching=micro_batching)
    train(piped, strategy, padded=False)
    assert_close(weights_of(piped), weights_of(plain))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


# All of them step in `tests/pipeline/test_optimizer.py`.
@pytest.mark.parametrize("name", keeping(["Adam", "Adafactor"], OPTIMIZERS))
def test_optimizers_equal_one_device(workers: list[str], name: str) -> None:
    class Module(TinyModule):
        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[name](self.parameters())

    plain, piped = Module(NUM_LAYERS), Module(NUM_LAYERS)
    train(plain, "auto")
    train(piped, HeteroPipelineStrategy(workers, plan_over(workers, 3, 1, 4)))
    assert_close(weights_of(piped), weights_of(plain))


WANTS_DETERMINISM = """
import torch
from lightning_hetero.pipeline.stage import Stage
run_layers = Stage._run_layers
def checked(stage, *args, **kwargs):
    if not torch.are_deterministic_algorithms_enabled():
        raise ZeroDivisionError("not deterministic")
    return run_layers(stage, *args, **kwargs)
Stage._run_layers = checked
"""


def test_workers_compute_with_the_settings_of_the_trainer() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with worker_process(before=WANTS_DETERMINISM) as worker:
        plan = plan_over([worker.address], 2, 1, NUM_PIECES)
        try:
            fit(TinyModule(), HeteroPipelineStrategy([worker.address], plan), deterministic=True)
        finally:
            torch.use_deterministic_algorithms(before)
        with pytest.raises(StageFailed, match="not deterministic"):
            fit(TinyModule(), HeteroPipelineStrategy([worker.address], plan), deterministic=False)
