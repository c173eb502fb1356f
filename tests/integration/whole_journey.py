"""A journey that records all that Lightning does: hooks, metrics, stopping, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from ..equality import assert_same
from ..models import VOCABULARY, fit, loader
from .hooks import Record, recording
from .journey import BATCH_SIZE, NUM_STEPS, Journey


class MeasuredJourney(Journey):
    """Keeps metrics with a state in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.accuracy = MulticlassAccuracy(VOCABULARY, ignore_index=-100)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.log("train_mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        found = self.model(**batch)
        self.accuracy.update(found.logits.argmax(-1).flatten(), batch["labels"].flatten())
        self.log("val_loss", found.loss)
        self.log("val_accuracy", self.accuracy)


@dataclass(frozen=True)
class WholeResult:
    """What a run leaves, and what Lightning did in it; each part is compared in all bits."""

    weights: dict[str, Tensor]
    losses: list[float]
    tokens: list[list[int]]
    metrics: bytes
    hooks: Record
    checkpoints: dict[str, Any]
    stopping: dict[str, Any]

    def differing(self, other: WholeResult) -> list[str]:
        """The names of the parts that differ."""
        found = []
        for part in fields(self):
            try:
                mine, theirs = getattr(self, part.name), getattr(other, part.name)
                assert_same(mine, theirs, part.name, tolerance=0.0)
            except AssertionError:
                found.append(part.name)
        return found


def recorded_journey(record: Record) -> MeasuredJourney:
    """A module that notes every call of its hooks."""
    made: MeasuredJourney = recording(MeasuredJourney, "module", record)()
    return made


def travel_whole(
    strategy: Any,
    folder: Path,
    module: MeasuredJourney,
    record: Record,
    callbacks: tuple[pl.Callback, ...] = (),
) -> WholeResult:
    """The run: each second step is evaluated, each step is saved, and then it stops early."""
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    # No loss falls so far, so the second evaluation stops the run.
    stopping = EarlyStopping("val_loss", min_delta=100.0, patience=1)
    hooks: pl.Callback = recording(pl.Callback, "callback", record)()
    logger = CSVLogger(folder, name="logs", version="0", flush_logs_every_n_steps=1)
    fit(
        module,
        strategy,
        loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE, padded=True),
        loader(BATCH_SIZE, BATCH_SIZE),
        callbacks=[checkpoint, stopping, hooks, *callbacks],
        logger=logger,
        log_every_n_steps=1,
        gradient_clip_val=0.5,
        val_check_interval=2,
        max_epochs=3,
        enable_checkpointing=True,
    )
    saved = {path.name: torch.load(path, weights_only=True) for path in folder.glob("*.ckpt")}
    return WholeResult(
        module.state_dict(),
        module.losses,
        module.tokens,
        (folder / "logs" / "0" / "metrics.csv").read_bytes(),
        _without(record, str(folder)),
        _without({name: saved[name] for name in sorted(saved)}, str(folder)),
        stopping.state_dict(),
    )


def _without(value: Any, folder: str) -> Any:
    """The value without the name of a folder, in which each run has its files."""
    if isinstance(value, str):
        return value.replace(folder, "")
    if isinstance(value, dict):
        return {_without(k, folder): _without(v, folder) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without(each, folder) for each in value]
    return value
