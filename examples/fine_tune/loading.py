"""Loading: the base model, in 4 bits if wanted, with LoRA matrices."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from lightning_hetero import from_pretrained

from .hub import plain_hub_errors


class LoraError(Exception):
    """The adapter does not fit the model; the message says what to do."""


@dataclass
class Lora:
    """The adapter.

    Args:
        rank: Of each matrix.
        alpha: The adapter counts alpha / rank.
        dropout: Of the input of each adapter.
        targets: `all-linear`, `family` (the layers that PEFT chooses for the model's family), or a
            list of names such as `[q_proj, v_proj]`.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.05
    targets: str | list[str] = "all-linear"

    @property
    def config(self) -> LoraConfig:
        """As PEFT takes it."""
        targets = None if self.targets == "family" else self.targets
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=targets,
            task_type="CAUSAL_LM",
        )


@dataclass
class Base:
    """The model under the adapter.

    Args:
        name: A name on the Hub, or a folder.
        four_bits: Whether its linear layers are stored as NF4. A checkpoint that is stored in 4
            bits already stays as it is.
        dtype: The dtype of everything else.
    """

    name: str
    four_bits: bool = True
    dtype: torch.dtype = torch.float32
    lora: Lora = field(default_factory=Lora)

    def quantization(self) -> BitsAndBytesConfig | None:
        """NF4 with double quantisation; None if not wanted or if the checkpoint has its own."""
        with plain_hub_errors("model", self.name):
            config = AutoConfig.from_pretrained(self.name)
        if not self.four_bits or hasattr(config, "quantization_config"):
            return None
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.dtype,
        )

    def load_here(self, device: torch.device, recompute: bool = False) -> PeftModel:
        """Load the whole model on this device, with a new adapter."""
        model = load_base(self, device)
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            return get_peft_model(model, self.lora.config).train()
        except ValueError as error:
            raise self._refusal(error) from error

    def load_hollow(self) -> PeftModel:
        """Build the same model without weights: each worker is sent those of its layers."""
        try:
            with plain_hub_errors("model", self.name):
                model = from_pretrained(
                    self.name,
                    quantization_config=self.quantization(),
                    peft_config=self.lora.config,
                    dtype=self.dtype,
                )
        except ValueError as error:
            raise self._refusal(error) from error
        # Packed samples are told apart only without a cache.
        model.config.use_cache = False
        return model

    def _refusal(self, error: ValueError) -> LoraError:
        return LoraError(
            f"No adapter fits {self.name} with `model.lora.targets` {self.lora.targets}: {error} "
            "Set it to all-linear, or to a list of names of linear layers."
        )


def load_base(base: Base, device: torch.device) -> PreTrainedModel:
    """Load the model without an adapter."""
    quantization = base.quantization()
    # An argument of None would override the configuration that a quantised checkpoint has.
    options: dict[str, Any] = {"quantization_config": quantization} if quantization else {}
    with plain_hub_errors("model", base.name):
        model = AutoModelForCausalLM.from_pretrained(
            base.name, dtype=base.dtype, device_map={"": device}, **options
        )
    model.config.use_cache = False
    _keep_weights_as_packed(model)
    return model


def load_trained(base: Base, adapter: Path, device: torch.device) -> PeftModel:
    """Load the base model anew, with a saved adapter."""
    return PeftModel.from_pretrained(load_base(base, device), str(adapter)).eval()


def _keep_weights_as_packed(model: PreTrainedModel) -> None:
    """Keep validation from spoiling the gradients of the training after it.

    On CPUs with AVX512-BF16 bitsandbytes repacks 4-bit weights in place when a layer runs in
    evaluation mode. Back in training no gradient passes through the repacked weights, so the
    layers before them stop learning, without an error.
    """
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False
