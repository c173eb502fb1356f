"""Callbacks that move layers in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_hetero import HeteroPipelineStrategy, Plan

from ..equality import differing
from ..models import TinyModule, fit, loader
from .groups import InGroups, InTurns


class Moves(Callback):
    """Moves layers before the batches of these numbers."""

    def __init__(self, plans: Mapping[int, Plan]) -> None:
        self.plans = plans
        self.moved: list[int] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx in self.plans:
            mover = trainer.strategy
            assert isinstance(mover, HeteroPipelineStrategy)
            mover.move_layers(self.plans[batch_idx])
            self.moved.append(batch_idx)


class MovesEachStep(Callback):
    """Moves the layers before each step to where the next plan has them.

    ``sent_bytes`` is what each move sent from this process.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = plans
        self.sent_bytes: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_arguments: Any) -> None:
        strategy: Any = trainer.strategy
        workers = strategy.deployment.coordinator.connections.members
        before = sum(worker.channel.traffic.sent_bytes for worker in workers)
        strategy.move_layers(self.plans[trainer.global_step])
        after = sum(worker.channel.traffic.sent_bytes for worker in workers)
        self.sent_bytes.append(after - before)


def moved_and_expected(
    plans: Sequence[Plan],
    names: list[str],
    module: Callable[[], pl.LightningModule] = TinyModule,
    options: Callable[[], dict[str, Any]] = dict,
    alone: Callable[[], dict[str, Any]] | None = None,
) -> tuple[MovesEachStep, list[str]]:
    """Train a step under each plan, with one sample in each micro-batch.

    Args:
        plans: One for each step, with as many micro-batches each.
        names: The workers.
        module: Makes the module.
        options: Makes the options of the Trainer.
        alone: Those of the run on one device, if they are others.

    Returns:
        The callback, and the names of tensors that differ from the groups' of one device.
    """
    pieces, moving = plans[0].micro_batches, MovesEachStep(plans)
    given = options()
    callbacks = [moving, *given.pop("callbacks", [])]
    found = fit(
        module(),
        HeteroPipelineStrategy(names, plans[0]),
        loader(len(plans) * pieces, pieces),
        callbacks=callbacks,
        **given,
    )
    sums = [InGroups(plan, pieces) for plan in plans]
    given = (alone or options)()
    expected = fit(
        module(),
        data=loader(len(plans) * pieces, 1),
        accumulate_grad_batches=pieces,
        callbacks=[InTurns(sums, pieces), *given.pop("callbacks", [])],
        **given,
    )
    return moving, differing(found, expected)
