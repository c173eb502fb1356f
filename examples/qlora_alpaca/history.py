"""The history of a run: losses, tokens and seconds, collected for the report at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import lightning as L

from data import Batch


@dataclass(frozen=True)
class Validation:
    """The loss on the held-out pairs after so many steps; after none, that of the base model."""

    step: int
    loss: float


class History(L.Callback):
    """Remember the validation losses, the trained tokens and how long training took."""

    def __init__(self) -> None:
        self.validations: list[Validation] = []
        self.num_tokens = 0
        self.training_seconds = 0.0
        self.validation_seconds = 0.0
        self._training_started = 0.0
        self._validation_started = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens per second, prompts included, padding and validation left out."""
        return self.num_tokens / (self.training_seconds - self.validation_seconds)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._training_started = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        self.num_tokens += int(batch["attention_mask"].sum())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.training_seconds = time.perf_counter() - self._training_started

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation_started = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validation_seconds += time.perf_counter() - self._validation_started
        loss = float(trainer.callback_metrics["val_loss"])
        self.validations.append(Validation(trainer.global_step, loss))
