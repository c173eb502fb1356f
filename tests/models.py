"""The smallest models and data that the tests train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

# `make test` runs on processors; this runs the same tests with the coordinator on another device.
ACCELERATOR = os.environ.get("TEST_ACCELERATOR", "cpu")
DEVICE = "cpu" if ACCELERATOR == "cpu" else "cuda"
VOCABULARY = 48
SEQUENCE_LENGTH = 10


def tiny_llama(num_layers: int = 5, **options: Any) -> LlamaForCausalLM:
    """A Llama with random weights, the same at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        **options,
    )
    return LlamaForCausalLM(config)


class TinyModule(pl.LightningModule):
    """An ordinary LightningModule: two parameter groups, AdamW, a step scheduler.

    ``losses`` holds what `on_train_batch_end` saw, step by step.
    """

    def __init__(self, num_layers: int = 5, **options: Any) -> None:
        super().__init__()
        self.model = tiny_llama(num_layers, **options)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.model(**batch).loss)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.model(**batch).logits
        return logits

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0, "lr": 2e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
        every_step = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": every_step}


def sequences(count: int, padded: bool = False) -> list[dict[str, Tensor]]:
    """Random sequences; padded ones differ in length, so that micro-batches count differently."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (SEQUENCE_LENGTH,), generator=generator)
        length = SEQUENCE_LENGTH
        if padded:
            length = int(torch.randint(2, SEQUENCE_LENGTH + 1, (), generator=generator))
        mask = (torch.arange(SEQUENCE_LENGTH) < length).long()
        labels = tokens.masked_fill(mask == 0, -100)
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return found


def loader(count: int, batch_size: int, padded: bool = False) -> DataLoader[dict[str, Tensor]]:
    """The sequences in batches, in their order."""
    return DataLoader(sequences(count, padded), batch_size=batch_size)  # type: ignore[arg-type]


def trainer(strategy: Any = "auto", **options: Any) -> pl.Trainer:
    """A Trainer that does nothing but train."""
    quiet: dict[str, Any] = {
        "accelerator": ACCELERATOR,
        "devices": 1,
        # The sums of other devices have the same bits only then.
        "deterministic": ACCELERATOR != "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=strategy, **{**quiet, **options})


Module = TypeVar("Module", bound=pl.LightningModule)


def fit(
    module: Module,
    strategy: Any = "auto",
    data: Any = None,
    validation: Any = None,
    ckpt_path: str | Path | None = None,
    **options: Any,
) -> Module:
    """Train the module, by default for one epoch of three batches, and return it.

    The options are those of the Trainer.
    """
    run = trainer(strategy, **{"max_epochs": 1, **options})
    data = loader(36, 12) if data is None else data
    run.fit(module, data, validation, ckpt_path=ckpt_path)
    return module


def scaled_precision(init_scale: float = 2.0**12) -> MixedPrecision:
    """'16-mixed'; on a CPU Lightning gives no such plugin by itself."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=init_scale, growth_interval=3)
    return MixedPrecision("16-mixed", DEVICE, scaler)
