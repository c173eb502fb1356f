"""A check of a device with a smaller model than the user's."""

from __future__ import annotations

from transformers import LlamaConfig

from lightning_hetero.verify.device_check import NUM_LAYERS

CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=2,
    vocab_size=64,
    use_cache=False,
)
SEQUENCE_LENGTH = 16
