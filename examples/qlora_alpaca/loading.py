"""Loading: a pretrained model in 4 bits, with LoRA matrices on its attention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
)


@dataclass(frozen=True)
class ModelChoice:
    """Which model, in which number format, with how large an adapter."""

    name: str
    rank: int = 16
    quantize: bool = True
    dtype: torch.dtype = torch.float32

    @property
    def quantization_config(self) -> BitsAndBytesConfig | None:
        """NF4 with double quantisation; None if not wanted or if the checkpoint has its own."""
        if not self.quantize or hasattr(
            AutoConfig.from_pretrained(self.name), "quantization_config"
        ):
            return None
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.dtype,
        )

    @property
    def lora_config(self) -> LoraConfig:
        """LoRA on the four projections of the attention."""
        return LoraConfig(
            r=self.rank,
            lora_alpha=2 * self.rank,
            lora_dropout=0.05,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            task_type="CAUSAL_LM",
        )


def load_here(choice: ModelChoice, device: torch.device) -> PeftModel:
    """Load the whole model on this device, with a new adapter."""
    return get_peft_model(load_base(choice, device), choice.lora_config).train()


def load_hollow(choice: ModelChoice) -> PeftModel:
    """Build the same model without weights: each worker is sent those of its layers."""
    # Imported here so that training without workers runs without the package.
    from lightning_hetero import from_pretrained

    return from_pretrained(
        choice.name,
        quantization_config=choice.quantization_config,
        peft_config=choice.lora_config,
        dtype=choice.dtype,
    )


def load_trained(choice: ModelChoice, adapter: Path, device: torch.device) -> PeftModel:
    """Load the base model anew, with a saved adapter."""
    return PeftModel.from_pretrained(load_base(choice, device), str(adapter)).eval()


def load_base(choice: ModelChoice, device: torch.device) -> PreTrainedModel:
    """Load the model without adapters, in 4 bits if the choice asks for it."""
    quantization_config = choice.quantization_config
    # An argument of None would override the configuration that a quantised checkpoint has.
    options = {"quantization_config": quantization_config} if quantization_config else {}
    model = AutoModelForCausalLM.from_pretrained(
        choice.name, dtype=choice.dtype, device_map={"": device}, **options
    )
    model.config.use_cache = False
    _keep_weights_as_packed(model)
    return model


def _keep_weights_as_packed(model: PreTrainedModel) -> None:
    """Keep validation from spoiling the gradients of the training after it.

    On CPUs with AVX512-BF16 bitsandbytes repacks 4-bit weights in place when a layer runs in
    evaluation mode. Back in training no gradient passes through the repacked weights, so the
    layers before them stop learning, without an error.
    """
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False
