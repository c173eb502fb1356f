"""The LightningModule: a small Llama that writes docstrings. It knows nothing of workers."""

from __future__ import annotations

import math

import lightning as L
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.text import Perplexity
from transformers import LlamaConfig, LlamaForCausalLM

IGNORED_LABEL = -100


class DocstringWriter(L.LightningModule):
    """A decoder of about five million parameters, trained from random weights."""

    def __init__(
        self,
        vocabulary_size: int = 4096,
        hidden_size: int = 192,
        num_layers: int = 8,
        learning_rate: float = 4e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 30,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        config = LlamaConfig(
            vocab_size=vocabulary_size,
            hidden_size=hidden_size,
            intermediate_size=hidden_size * 8 // 3,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // 64,
            max_position_embeddings=256,
            initializer_range=0.05,  # the usual 0.02 suits wider models and learns more slowly here
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)
        self.val_perplexity = Perplexity(ignore_index=IGNORED_LABEL)

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        output = self.model(**batch)
        targets = batch["labels"][:, 1:]
        self.val_perplexity(output.logits[:, :-1], targets)
        # Weighted by tokens, so that the perplexity is the exponential of the loss.
        num_targets = int((targets != IGNORED_LABEL).sum())
        self.log("val_loss", output.loss, prog_bar=True, batch_size=num_targets)
        self.log("val_perplexity", self.val_perplexity, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        norms = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        num_steps = int(self.trainer.estimated_stepping_batches)

        def rate(step: int) -> float:
            """A linear warm-up, and then half a wave of a cosine down to 0."""
            if step < self.warmup_steps:
                return step / self.warmup_steps
            done = (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
            return 0.5 * (1 + math.cos(math.pi * done))

        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, rate), "interval": "step"},
        }
