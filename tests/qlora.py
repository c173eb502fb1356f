"""LoRA and four bits, added to a model of a family as a user adds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from .families import tiny_model

LORA_TARGETS = {
    "gpt2": ["c_attn", "c_proj"],
    "gpt_neox": ["query_key_value", "dense"],
    "falcon": ["query_key_value", "dense"],
    "falcon-alibi": ["query_key_value", "dense"],
    "phi": ["q_proj", "v_proj", "dense"],
    "opt": ["q_proj", "v_proj", "out_proj"],
}


def with_lora(model: PreTrainedModel, family: str, **options: Any) -> PeftModel:
    """Add adapters with random weights, so that each of their parts affects the first loss."""
    targets = LORA_TARGETS.get(family, ["q_proj", "k_proj", "v_proj", "o_proj"])
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **options)
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                drawn = torch.empty(parameter.shape, dtype=parameter.dtype)
                parameter.copy_(drawn.normal_(std=0.1, generator=generator))
    return adapted


def in_four_bits(family: str, folder: Path, **options: Any) -> PreTrainedModel:
    """Save the family's model and load it in 4 bits, as a user does."""
    tiny_model(family, **options).save_pretrained(folder)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    )
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False  # plain Lightning does not do it
        experts = getattr(module, "experts", None)
        if experts is not None:
            for name in ("gate_up_proj", "down_proj"):
                replace_parameter_4bit(experts, name, compress_statistics=True, quant_type="nf4")
    return model
