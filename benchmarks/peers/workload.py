"""What all peers train: 7.4 million parameters, batches of 16 in 8 micro-batches, AdamW, fp32."""

from __future__ import annotations

from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.training import Sequences, random_tokens

NUM_LAYERS = 8
SEQUENCE_LENGTH = 128
BATCH_SIZE = 16
NUM_MICROBATCHES = 8
MICROBATCH_SIZE = BATCH_SIZE // NUM_MICROBATCHES
TOKENS_PER_STEP = SEQUENCE_LENGTH * BATCH_SIZE
VOCABULARY = 2048


def config(num_layers: int = NUM_LAYERS) -> LlamaConfig:
    """The model; with fewer layers to find out what one of them takes."""
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        use_cache=False,
    )


def batches(num_steps: int) -> list[Tensor]:
    """The tokens of each step."""
    return list(_tokens(num_steps).split(BATCH_SIZE))


def loader(num_steps: int, batch_size: int = BATCH_SIZE) -> DataLoader[dict[str, Tensor]]:
    """The same for Lightning."""
    return DataLoader(Sequences(_tokens(num_steps)), batch_size=batch_size)


def _tokens(num_steps: int) -> Tensor:
    return random_tokens(num_steps * BATCH_SIZE, SEQUENCE_LENGTH, VOCABULARY)
