"""The LightningModule: a causal language model of which only the LoRA matrices learn."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import PeftModel
from torch import Tensor
from torch.optim import AdamW
from transformers import get_cosine_schedule_with_warmup

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import ModelError

from .labels import IGNORED_LABEL
from .loading import Base, Lora
from .packing import Batch


class FineTuner(L.LightningModule):
    """LoRA over a frozen base model, on one device or over workers.

    Args:
        base: The model's name on the Hub, or a folder.
        four_bits: Whether the frozen linear layers are stored as NF4 (QLoRA).
        lora: The adapter.
        recompute: Whether layers keep only their inputs and run their forward again in the
            backward. It is for one device; over workers the plan says it for each stage.
        learning_rate: The highest, after the warm-up; a cosine leads to zero.
        warmup: The part of the steps in which the learning rate rises.
        weight_decay: Of AdamW.
    """

    model: PeftModel

    def __init__(
        self,
        base: str,
        four_bits: bool = True,
        lora: Lora = Lora(),  # noqa: B008  # jsonargparse shows its defaults; nobody changes it
        recompute: bool = False,
        learning_rate: float = 2e-4,
        warmup: float = 0.03,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__()
        self.base = base
        self.four_bits = four_bits
        self.lora = lora
        self.recompute = recompute
        self.learning_rate = learning_rate
        self.warmup = warmup
        self.weight_decay = weight_decay
        # A checkpoint holds what is learnt; the rest is in the base model.
        self.strict_loading = False

    def configure_model(self) -> None:
        # Lightning calls this before each fit or validate; the model is built once.
        if hasattr(self, "model"):
            return
        base = Base(self.base, self.four_bits, _dtype(str(self.trainer.precision)), self.lora)
        if not isinstance(self.trainer.strategy, HeteroPipelineStrategy):
            self.model = base.load_here(self.trainer.strategy.root_device, self.recompute)
        elif self.recompute:
            raise ModelError(
                "`model.recompute` is for one device. Over workers each stage of the plan has its "
                "own `recompute`, and `plan: auto` sets it where memory is short; leave it out."
            )
        else:
            self.model = base.load_hollow()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss: Tensor = self.model(**batch).loss
        # Weighted by learnt tokens, so that each of them counts alike.
        num_learnt = int((batch["labels"] != IGNORED_LABEL).sum())
        self.log("val_loss", loss, prog_bar=True, batch_size=num_learnt)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = AdamW(trained, lr=self.learning_rate, weight_decay=self.weight_decay)
        num_steps = int(self.trainer.estimated_stepping_batches)
        num_warmup_steps = max(1, int(num_steps * self.warmup))
        schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps, num_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        learnt = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in state if name in learnt}


def _dtype(precision: str) -> torch.dtype:
    """The dtype of frozen weights that are not in 4 bits."""
    if precision.startswith("bf16"):
        return torch.bfloat16
    return torch.float16 if precision == "16-true" else torch.float32
