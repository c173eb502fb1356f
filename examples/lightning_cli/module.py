"""The LightningModule: a small Llama that reads text byte by byte."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

NUM_BYTES = 256


class ByteModel(L.LightningModule):
    """Predicts each byte of a text from those before it.

    Args:
        hidden_size: Width of the model, a multiple of 32.
        num_layers: Number of decoder layers; this is what the plan cuts into stages.
        learning_rate: Of AdamW.
    """

    def __init__(
        self, hidden_size: int = 128, num_layers: int = 6, learning_rate: float = 2e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        config = LlamaConfig(
            vocab_size=NUM_BYTES,
            hidden_size=hidden_size,
            intermediate_size=hidden_size * 8 // 3,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // 32,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The likeliest next byte behind each piece of text, [pieces]."""
        logits: Tensor = self.model(input_ids=batch).logits
        return logits[:, -1].argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    def _loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss
