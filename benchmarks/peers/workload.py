"""What all peers train: 7.4 million parameters, micro-batches of 2, AdamW, fp32."""

from __future__ import annotations

from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.training import Sequences, random_tokens

NUM_LAYERS = 8
SEQUENCE_LENGTH = 128
MICROBATCH_SIZE = 2
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


def batches(num_steps: int, micro_batches: int) -> list[Tensor]:
    """The tokens of each step."""
    return list(_tokens(num_steps, micro_batches).split(micro_batches * MICROBATCH_SIZE))


def loader(
    num_steps: int, micro_batches: int, accumulate: int = 1
) -> DataLoader[dict[str, Tensor]]:
    """The same for Lightning, in as many pieces as it is to accumulate."""
    batch_size = micro_batches * MICROBATCH_SIZE // accumulate
    return DataLoader(Sequences(_tokens(num_steps, micro_batches)), batch_size=batch_size)


def tokens_per_step(micro_batches: int) -> int:
    return SEQUENCE_LENGTH * micro_batches * MICROBATCH_SIZE


def _tokens(num_steps: int, micro_batches: int) -> Tensor:
    num_sequences = num_steps * micro_batches * MICROBATCH_SIZE
    return random_tokens(num_sequences, SEQUENCE_LENGTH, VOCABULARY)
