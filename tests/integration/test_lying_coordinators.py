"""What a coordinator asks of the wrong stage, or at a time that never comes, is refused or ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import msgspec
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import HeteroError, StageFailed, WeightsLost, WorkerLost
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.channel import Channel
from lightning_hetero.transport.deadlines import Deadlines

from ..models import TinyModule, fit, loader, trainer
from ..pairwise import keeping
from .shapes import Shape, shaped

SHAPE: Shape = [("C", 0, 1), ("a", 1, 2), ("a", 2, 3), ("b", 3, 4), ("a", 4, 5)]
"""Stages 1, 2 and 4 on the first worker, which a lie is told to, and stage 3 on the second."""


@dataclass(frozen=True)
class Lie:
    """What the coordinator says instead, in its second step, and the error that follows."""

    kind: type[m.Message]
    change: Callable[[Any], dict[str, Any]]
    says: str
    error: type[HeteroError] = StageFailed


def instead(**changes: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda _: changes


class Impatient(pl.Callback):
    """Waits for no result for long in the second step, after whose lie none may come any more."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        if batch_idx == 1:
            deadlines = Deadlines(progress_seconds=1.0)
            strategy.deployment.coordinator.connections.deadlines = deadlines


LIES = {
    "arguments for nobody": Lie(m.Arguments, instead(stage=9), r"stage 9, and this process has \["),
    "arguments twice": Lie(
        m.Arguments,
        lambda said: {"stage": 2 if said.stage == 4 else said.stage},
        "Surroundings for stage 2 .* came twice",
    ),
    "an activation for nobody": Lie(m.Activation, instead(stage=9), "came for stage 9"),
    "an activation inside the worker": Lie(
        m.Activation, instead(stage=2), "Activation for stage 2 came from the coordinator"
    ),
    "an activation between workers": Lie(
        m.Activation, instead(stage=4), "for stage 4 came from (the coordinator|worker 2)"
    ),
    "gradients for nobody": Lie(m.Gradient, instead(stage=9), "came for stage 9"),
    "gradients inside the worker": Lie(
        m.Gradient, instead(stage=1), "Gradient for stage 1 came from the coordinator"
    ),
    "gradients between workers": Lie(
        m.Gradient, instead(stage=2), "Gradient for stage 2 came from the coordinator"
    ),
    "a stamp of the past": Lie(
        m.ApplyOptimizer,
        instead(forwards=0),
        r"belongs behind 0 forwards and \d backwards",
    ),
    "a stamp that never comes true": Lie(
        m.BeginStep,
        instead(forwards=99),
        "No stage returned a result for 1 s in step 2",
        WorkerLost,
    ),
    "a backward that never comes": Lie(
        m.BeginStep,
        instead(backwards=4),
        "No stage returned a result for 1 s in step 2",
        WorkerLost,
    ),
}


def train(workers: list[str], *callbacks: pl.Callback) -> TinyModule:
    strategy = HeteroPipelineStrategy(workers[:2], shaped(workers, SHAPE, 3))
    return fit(TinyModule(), strategy, callbacks=[*callbacks])


# The same workers hear all lies, each in a second step, so they have served in spite of the others.
@pytest.mark.parametrize(
    "name",
    keeping(
        (
            *("arguments for nobody", "arguments twice", "an activation inside the worker"),
            *("gradients between workers", "a stamp of the past", "a stamp that never comes true"),
        ),
        LIES,
    ),
)
def test_a_lie_ends_the_run(name: str, workers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lie, send, told = LIES[name], Channel.send, []

    def lying(channel: Channel, message: m.Message, *tensors: Tensor) -> None:
        if isinstance(message, lie.kind) and message.step == 2:
            told.append(message)
            message = msgspec.structs.replace(message, **lie.change(message))  # type: ignore[type-var]
        send(channel, message, *tensors)

    monkeypatch.setattr(Channel, "send", lying)
    with pytest.raises(lie.error, match=lie.says):
        train(workers, *([Impatient()] if lie.error is WorkerLost else []))
    assert told


def test_after_all_lies_the_workers_serve_a_run_which_nothing_is_wrong_with(
    workers: list[str],
) -> None:
    assert len(train(workers).losses) == 3


def test_an_optimizer_step_that_one_worker_refuses_is_torn(
    workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Channel.send

    def lying(channel: Channel, message: m.Message, *tensors: Tensor) -> None:
        if (
            isinstance(message, m.ApplyOptimizer)
            and channel is strategy.deployment.coordinator.connections.workers[0].channel
        ):
            message = msgspec.structs.replace(message, forwards=0)
        send(channel, message, *tensors)

    strategy = HeteroPipelineStrategy(workers[:2], shaped(workers, SHAPE, 3))
    checkpoint = ModelCheckpoint(tmp_path, save_on_exception=True)
    run = trainer(strategy, max_steps=2, callbacks=[checkpoint], enable_checkpointing=True)
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "send", lying)
        with pytest.raises(StageFailed, match="belongs behind 0 forwards"):
            run.fit(TinyModule(), loader(24, 12))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WeightsLost, match="of two different steps"):
        run.save_checkpoint(tmp_path / "later.ckpt")
