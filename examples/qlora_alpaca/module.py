"""The LightningModule: a causal language model of which only the LoRA matrices learn."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import PeftModel
from torch import Tensor
from torch.optim import AdamW
from transformers import get_cosine_schedule_with_warmup

from data import IGNORED_LABEL, Batch
from loading import ModelChoice, load_here, load_hollow


class InstructionTuner(L.LightningModule):
    """Instruction tuning with LoRA over frozen, and usually 4-bit, weights."""

    model: PeftModel

    def __init__(
        self,
        choice: ModelChoice,
        on_workers: bool,
        learning_rate: float = 2e-4,
        warmup_part: float = 0.03,
    ) -> None:
        super().__init__()
        self.choice = choice
        self.on_workers = on_workers
        self.learning_rate = learning_rate
        self.warmup_part = warmup_part

    def configure_model(self) -> None:
        # Lightning calls this before each fit or validate; the model is built once.
        if hasattr(self, "model"):
            return
        if self.on_workers:
            self.model = load_hollow(self.choice)
        else:
            self.model = load_here(self.choice, self.trainer.strategy.root_device)

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        loss: Tensor = self.model(**batch).loss
        # Weighted by answer tokens, so that long and short answers count alike per token.
        num_labels = int((batch["labels"] != IGNORED_LABEL).sum())
        self.log("val_loss", loss, prog_bar=True, batch_size=num_labels)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = AdamW(trained, lr=self.learning_rate, weight_decay=0.0)
        num_steps = int(self.trainer.estimated_stepping_batches)
        num_warmup_steps = max(1, int(num_steps * self.warmup_part))
        schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps, num_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
