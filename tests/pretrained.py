"""A model with LoRA and four bits, built whole or on `meta`, and a module that builds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import lightning.pytorch as pl
import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import lightning_hetero

from .families import MIXTURES, tiny_model

BATCH_SIZE = 6


NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.float32,
}


LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def build_whole(folder: Path, quantize: bool, lora: bool) -> Any:
    """Load all weights into this process, as transformers does."""
    config = BitsAndBytesConfig(**NF4) if quantize else None
    model: Any = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False  # plain Lightning does not do it
        if quantize and hasattr(module, "experts"):
            for name in ("gate_up_proj", "down_proj"):
                replace_parameter_4bit(module.experts, name, compress_statistics=True)
    if not lora:
        return model
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(**LORA))


def build_from_checkpoint(folder: Path, quantize: bool, lora: bool, **options: Any) -> Any:
    """The model on `meta`, as `from_pretrained` makes it."""
    torch.manual_seed(3)
    return lightning_hetero.from_pretrained(
        folder,
        quantization_config=BitsAndBytesConfig(**NF4) if quantize else None,
        peft_config=LoraConfig(**LORA) if lora else None,
        **options,
    )


class PretrainedModule(pl.LightningModule):
    """Builds its model in `configure_model`."""

    def __init__(self, build: Any) -> None:
        super().__init__()
        self.build = build
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = self.build()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def save_tiny(family: str, folder: Path, **options: Any) -> Path:
    if family in MIXTURES:
        options["output_router_logits"] = False
    tiny_model(family, **options).save_pretrained(folder / "model")
    return folder / "model"
