"""A callback that moves layers in the middle of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_hetero import HeteroPipelineStrategy, Plan


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
