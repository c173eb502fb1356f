"""Replicas on workers: one stage on several, with the bits of one device that adds up in groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.coordinator import optimizers, worker_stages
from lightning_hetero.coordinator.run_part import Loaded
from lightning_hetero.coordinator.tensor_transfers import TensorLoad, send_all
from lightning_hetero.errors import StageFailed, WorkerError

from ..equality import assert_close, differing, weights_of
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import keeping
from .groups import fit_in_groups
from .moves import moved_and_expected
from .rows import Rows, rows

BATCH_SIZE = 6
PIECES = 6
NUM_STEPS = 3

Planned = Callable[..., Plan]


def replicated(workers: Sequence[str], **options: Any) -> Plan:
    """Two workers share the layers 1 to 3, two micro-batches to one; the rest is here."""
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan([*workers[:2]], (1, 4), shares=[2, 1], **options),
        StagePlan(["coordinator"], (4, 5)),
    ]
    return Plan(stages, micro_batches=PIECES)


def between(workers: Sequence[str], **options: Any) -> Plan:
    """A line of a worker, of a stage on two others, and of the first worker again."""
    stages = [
        StagePlan([workers[0]], (0, 2)),
        StagePlan([workers[1], workers[2]], (2, 4), shares=[1, 2], **options),
        StagePlan([workers[0]], (4, 5)),
    ]
    return Plan(stages, micro_batches=PIECES)


def both_shared(workers: Sequence[str], **options: Any) -> Plan:
    """Two workers share both stages, with other shares."""
    stages = [
        StagePlan([workers[0], workers[1]], (0, 2), shares=[1, 1], **options),
        StagePlan([workers[1], workers[0]], (2, 5), shares=[2, 1], **options),
    ]
    return Plan(stages, micro_batches=PIECES)


def with_a_spare(workers: Sequence[str], **options: Any) -> Plan:
    """Three workers hold all layers, and one of them has no work."""
    stages = [StagePlan([*workers], (0, 5), shares=[1, 0, 2], **options)]
    return Plan(stages, micro_batches=PIECES)


PLANS: dict[str, Planned] = {
    "beside": replicated,
    "between": between,
    "both": both_shared,
    "spare": with_a_spare,
}


def strategy_of(plan: Plan, **options: Any) -> HeteroPipelineStrategy:
    return HeteroPipelineStrategy(plan.workers, plan, **options)


@cache
def in_groups(name: str, workers: tuple[str, ...]) -> TinyModule:
    """Trained on one device in the groups of a plan, which the optimizer does not change."""
    plan = PLANS[name](workers)
    return fit_in_groups(TinyModule(), plan, loader(NUM_STEPS * BATCH_SIZE, 1))


class Normed(Rows):
    """Its layers keep running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(2))


@pytest.mark.filterwarnings("ignore:Normed has BatchNorm")
def test_a_buffer_that_training_updates_is_refused(workers: list[str]) -> None:
    plan = Plan([StagePlan(workers[:2], (0, 2))], micro_batches=2)
    with pytest.raises(StageFailed, match="layers that several processes hold"):
        fit(Normed(), strategy_of(plan, layers="layers", check_first_batch="off"), rows())


def evaluated(strategy: Any) -> tuple[list[dict[str, float]], list[Any]]:
    module, run = TinyModule(), trainer(strategy)
    data = loader(BATCH_SIZE, BATCH_SIZE)
    return run.test(module, data, verbose=False), run.predict(module, data)  # type: ignore[return-value]


@pytest.mark.parametrize("name", keeping(["spare"], PLANS))
def test_evaluation_and_prediction_are_those_of_one_device(name: str, workers: list[str]) -> None:
    found, expected = evaluated(strategy_of(PLANS[name](workers))), evaluated("auto")
    assert found[0][0]["test_loss"] == pytest.approx(expected[0][0]["test_loss"], rel=1e-6)
    torch.testing.assert_close(found[1], expected[1])


def test_other_shares_alone_send_nothing(workers: list[str]) -> None:
    plan = replicated(workers)
    plans = [plan]
    for shares in ([1, 2], [0, 1], [5, 3]):
        shared = replace(plan.stages[1], shares=shares)
        plans.append(replace(plan, stages=[plan.stages[0], shared, plan.stages[2]]))
    moving, wrong = moved_and_expected(plans, workers[:2])
    assert wrong == []
    # On a slow machine heartbeats go meanwhile; a layer takes many times their bytes.
    layer = TinyModule().model.model.layers[0]
    assert max(moving.sent_bytes[1:]) < sum(weight.nbytes for weight in layer.parameters()) / 10


@pytest.mark.follows(
    "computes or stores wrongly. Give the stage to other workers, and continue from a checkpoint."
)
@pytest.mark.parametrize("count", [2, 3])
def test_a_replica_with_other_weights_is_named(
    count: int, workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Poking(pl.Callback):
        """Gives the last worker another weight, as if it had computed wrongly."""

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            strategy: Any = trainer.strategy
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "sound.ckpt")
            remote = strategy.deployment.coordinator.layers
            name, worker = "1.mlp.up_proj.weight", remote.connections.workers[-1]
            other = torch.ones(remote.holdings.tensors[name].spec.shape)
            load = TensorLoad(
                worker, iter([Loaded(name, other, {})]), remote.connections.requests.send
            )
            assert trainer.global_step < 1 or [*send_all([load], remote.hear)]

    monkeypatch.setattr(optimizers, "STEPS_BETWEEN_COMPARISONS", 2)
    plan = Plan([StagePlan(workers[:count], (0, 5))], micro_batches=PIECES)
    module = TinyModule()
    named = [workers[0], workers[1]] if count == 2 else [workers[2]]
    wrong = " or ".join(f"stage 1 on {name}" for name in named)
    # The check before the first step would find it too.
    strategy = strategy_of(plan, check_first_batch="off")
    with pytest.raises(WorkerError, match=rf"1\.mlp\.up_proj\.weight is not equal.* {wrong} comp"):
        fit(module, strategy, loader(36, BATCH_SIZE), callbacks=[Poking()])
    assert len(module.losses) == 1
    others = strategy_of(Plan([StagePlan([workers[-1]], (0, 5))], micro_batches=PIECES))
    data, path = loader(36, BATCH_SIZE), tmp_path / "sound.ckpt"
    found = fit(TinyModule(), others, data, ckpt_path=path)
    assert_close(weights_of(found), weights_of(fit(TinyModule(), data=data, ckpt_path=path)))


def test_replicas_on_unlike_devices_step_in_parts(
    workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "STEPS_BETWEEN_COMPARISONS", 1)
    kinds = iter(range(9))
    monkeypatch.setattr(worker_stages, "kind_of", lambda _equipment: next(kinds))
    module, strategy = TinyModule(), strategy_of(replicated(workers))
    fit(module, strategy, loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE))
    assert next(kinds) == 2
    assert differing(module, in_groups("beside", (*workers,))) == []
