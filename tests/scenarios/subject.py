"""What is trained in a scenario: a LightningModule, the arguments of its Trainer, and its data."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

from lightning_hetero.callbacks import StageWeightAveraging

from ..models import loader, scaled_precision, tiny_llama
from ..qlora import in_four_bits, with_lora
from .scenario import Scenario

NUM_LAYERS = 5
BATCH_SIZE = 6
STEPS_PER_EPOCH = 2
NUM_STEPS = 2 * STEPS_PER_EPOCH
CLIP = {"clipping by value": ("value", 1e-3), "clipping by norm": ("norm", 0.05)}
LOGGED = ("loss", "logit_step")
# By turns, in each optimizer step.
FROZEN = ("layers.1.", "layers.3.", "layers.0.")


def model_of(options: Collection[str], folder: Path) -> Any:
    """The model of a scenario; four bits need a folder for its files."""
    # A cache makes keys and values contiguous, and products of dropped attention then round in
    # another way. Workers keep no cache in training.
    given: dict[str, Any] = {"tie_word_embeddings": "tied" in options, "use_cache": False}
    if "dropout" in options:
        given["attention_dropout"] = 0.2
    adapter = {"lora_dropout": 0.2} if "dropout" in options else {}
    if "NF4" in options:
        model = in_four_bits("llama", folder, num_hidden_layers=NUM_LAYERS, **given)
        return with_lora(model, "llama", **adapter)
    model = tiny_llama(NUM_LAYERS, **given)
    return with_lora(model, "llama", **adapter) if "LoRA" in options else model


class Subject(pl.LightningModule):
    """Trains a model with the options of a scenario.

    Args:
        scenario: Its options count.
        folder: For the files of a model in four bits.
        num_pieces: The calls of `training_step` for a batch: of a micro-batch each where one device
            is to accumulate over them.

    Attributes:
        logged: What Lightning had of the training behind each call of `training_step`.
        validated: The losses of the evaluations.
        inside: Is called in each `training_step`, when its model has run.
    """

    def __init__(self, scenario: Scenario, folder: Path, num_pieces: int = 1) -> None:
        super().__init__()
        self.options = {*scenario.options}
        self.window, self.num_pieces = scenario.window, num_pieces
        self.model = model_of(self.options, folder).train()
        self.trains = [name for name, p in self.named_parameters() if p.requires_grad]
        self.automatic_optimization = not self.options & {"manual", "two optimizers"}
        self.logged: list[dict[str, float]] = []
        self.validated: list[float] = []
        self.inside: Callable[[], None] = lambda: None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        outputs = self.model(**batch)
        self.inside()
        loss: Tensor = outputs.loss
        self.log("loss", loss)
        if "padding" not in self.options:  # it is no mean over the labels
            self.log("logit", outputs.logits.float().mean(), on_step=True, on_epoch=True)
        if not self.automatic_optimization:
            self._step_by_hand(loss, batch_idx)
        return loss

    def _step_by_hand(self, loss: Tensor, batch_idx: int) -> None:
        found: Any = self.optimizers()
        optimizers = found if isinstance(found, list) else [found]
        self.manual_backward(loss / self.window)
        if (batch_idx + 1) % self.window:
            return
        for optimizer in optimizers:
            for name, (how, value) in CLIP.items():
                if name in self.options:
                    self.clip_gradients(optimizer, value, how)
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        schedule: Any = self.lr_schedulers()
        schedule.step()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if "freezing" not in self.options:
            return
        step = self.current_epoch * STEPS_PER_EPOCH + batch_idx // (self.window * self.num_pieces)
        named = dict(self.named_parameters())
        for name in self.trains:
            named[name].requires_grad_(FROZEN[step % len(FROZEN)] not in name)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = self.trainer.callback_metrics
        self.logged.append({name: float(metrics[name]) for name in LOGGED if name in metrics})

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.model(**batch).loss
        self.validated.append(float(loss))
        self.log("val_loss", loss)

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        trained = [named[name] for name in self.trains]
        if "two optimizers" in self.options:
            middle = len(trained) // 2
            first = torch.optim.AdamW(trained[:middle], lr=2e-3, weight_decay=0.1)
            second = torch.optim.SGD(trained[middle:], lr=0.1, momentum=0.9)
            return [first, second], [torch.optim.lr_scheduler.StepLR(first, 2, 0.5)]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "lr": 2e-3},
        ]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
        every_step = {"scheduler": schedule, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": every_step}


def trainer_arguments(scenario: Scenario, is_alone: bool, num_pieces: int = 1) -> dict[str, Any]:
    """The arguments of a Trainer, with its callbacks.

    Args:
        is_alone: Whether it trains on one device.
        num_pieces: The calls of `training_step` for a batch.
    """
    options, callbacks = {*scenario.options}, list[pl.Callback]()
    found: dict[str, Any] = {"callbacks": callbacks, "limit_val_batches": 1}
    if "EMA" in options:
        kind = EMAWeightAveraging if is_alone else StageWeightAveraging
        callbacks.append(kind(decay=0.7))
    if "16-mixed" in options:
        found["plugins"] = [scaled_precision()]
    if "bf16-mixed" in options:
        found["precision"] = "bf16-mixed"
    if not options & {"manual", "two optimizers"}:
        found["accumulate_grad_batches"] = scenario.window * num_pieces
        for name, (how, value) in CLIP.items():
            if name in options:
                found |= {"gradient_clip_algorithm": how, "gradient_clip_val": value}
    return found


def data(scenario: Scenario, num_pieces: int = 1) -> Any:
    """The batches of an epoch, each perhaps cut into pieces."""
    count = BATCH_SIZE * STEPS_PER_EPOCH * scenario.window
    return loader(count, BATCH_SIZE // num_pieces, padded="padding" in scenario.options)


def validation() -> Any:
    return loader(BATCH_SIZE, BATCH_SIZE)
