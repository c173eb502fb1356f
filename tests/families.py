"""Tiny models with random weights, one for each family of decoders that the package speaks of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

from .models import VOCABULARY

NUM_LAYERS = 4
# Gemma and Mistral alternate or limit their windows below the tests' sequence length.
WINDOW = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_KEY_VALUE_HEADS = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": True}


def _gpt2() -> hf.GPT2Config:
    return hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_inner=24,
        n_layer=NUM_LAYERS,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


CONFIGS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "qwen2": lambda: hf.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: hf.Qwen3Config(**SIZES, head_dim=8),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=WINDOW),
    "phi": lambda: hf.PhiConfig(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0),
    "gemma2": lambda: hf.Gemma2Config(**SIZES, head_dim=8, sliding_window=WINDOW),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=WINDOW, sliding_window_pattern=2
    ),
    "gpt2": _gpt2,
    "gpt_neox": lambda: hf.GPTNeoXConfig(**NO_KEY_VALUE_HEADS),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        word_embed_proj_dim=16,
        dropout=0.0,
        pad_token_id=0,
    ),
    "falcon": lambda: hf.FalconConfig(
        **NO_KEY_VALUE_HEADS, new_decoder_architecture=False, multi_query=True
    ),
    "falcon-alibi": lambda: hf.FalconConfig(**NO_KEY_VALUE_HEADS, alibi=True),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=8, num_experts=4, moe_intermediate_size=8
    ),
}
MIXTURES = ("mixtral", "qwen3_moe")


def tiny_model(family: str, **options: Any) -> PreTrainedModel:
    """The family's model, with the same random weights at every call.

    They are larger than usual, so that every part of a layer has a say in the loss.
    """
    torch.manual_seed(0)
    config = CONFIGS[family]()
    for name, value in options.items():
        setattr(config, name, value)
    model: PreTrainedModel = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model
