"""A trial forward through real workers changes nothing of the run around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.coordinator.batch_trials import trying

from ..conftest import worker_process
from ..models import fit, loader
from ..stateful_layers import LayeredModule, Running

# Buffers are updated by each of two micro-batches, and batches for BatchNorm stay whole.
pytestmark = [
    pytest.mark.filterwarnings("ignore:What the layers on workers keep"),
    pytest.mark.filterwarnings("ignore:The batch goes through the stages in one piece"),
]


@pytest.fixture(scope="module")
def allowing() -> Iterator[list[str]]:
    with worker_process("--allow", "tests.stateful_layers") as worker:
        yield [worker.address]


class Trying(LayeredModule):
    """Runs some batches on trial before it trains on them."""

    def __init__(self, num_trials: int) -> None:
        super().__init__(Running)
        self.num_trials = num_trials
        self.tried: list[torch.Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        deployment = self.trainer.strategy.deployment
        for _ in range(self.num_trials):
            deployment.coordinator.stages.begin_step(1, accumulate=False, is_trial=True)
            with torch.no_grad(), trying(deployment.hand_overs, is_cut=False):
                self.tried.append(self.model(batch["input_ids"]))


def train(workers: list[str], num_trials: int) -> Trying:
    # What the coordinator itself would compute is not on trial.
    plan = Plan([StagePlan(["coordinator"], (0, 0)), StagePlan(workers, (0, 3))], 2)
    strategy = HeteroPipelineStrategy(
        workers, plan, layers="model.blocks", micro_batching="boundary"
    )
    return fit(Trying(num_trials), strategy, loader(36, 6), accumulate_grad_batches=2)


def test_trials_change_no_weight_no_buffer_no_gradient_and_no_dropout_mask(
    allowing: list[str],
) -> None:
    tried, plain = train(allowing, 2), train(allowing, 0)
    assert tried.losses == plain.losses
    found, expected = tried.state_dict(), plain.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_trial_is_the_same_every_time(allowing: list[str]) -> None:
    first, second = train(allowing, 2).tried[:2]
    assert torch.equal(first, second)
