"""What all peers train: a Llama of 8 layers, AdamW, fp32; all of its weights, or adapters alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.training import Decoder, Sequences, build, random_tokens

NUM_LAYERS = 8
LORA_RANK = 8
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True)
class Workload:
    """A model and its micro-batches.

    Args:
        hidden_size: Of the model.
        intermediate_size: Of its MLPs.
        num_heads: Of its attention.
        vocabulary: Different tokens.
        sequence_length: Tokens of a sample.
        microbatch_size: Samples of a micro-batch.
        has_adapters: Whether low-rank adapters train, and everything else is frozen.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    vocabulary: int
    sequence_length: int
    microbatch_size: int
    has_adapters: bool = False

    def config(self, num_layers: int = NUM_LAYERS) -> LlamaConfig:
        """The model; with fewer layers to find out what one of them takes."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=num_layers,
            num_attention_heads=self.num_heads,
            vocab_size=self.vocabulary,
            use_cache=False,
        )

    def model(self, num_layers: int = NUM_LAYERS) -> nn.Module:
        """The model, with adapters if they are what trains; the same at every call."""
        return self._prepared(build(self.config(num_layers)))

    def module(self, num_layers: int = NUM_LAYERS) -> Decoder:
        """The same for Lightning."""
        return Decoder(self.config(num_layers), self._prepared)

    def batches(self, num_steps: int, micro_batches: int) -> Sequence[Tensor]:
        """The tokens of each step."""
        return self._tokens(num_steps, micro_batches).split(micro_batches * self.microbatch_size)

    def loader(
        self, num_steps: int, micro_batches: int, accumulate: int = 1
    ) -> DataLoader[dict[str, Tensor]]:
        """The same for Lightning, in as many pieces as it is to accumulate."""
        batch_size = micro_batches * self.microbatch_size // accumulate
        return DataLoader(Sequences(self._tokens(num_steps, micro_batches)), batch_size=batch_size)

    def tokens_per_step(self, micro_batches: int) -> int:
        return self.sequence_length * micro_batches * self.microbatch_size

    def _tokens(self, num_steps: int, micro_batches: int) -> Tensor:
        num_sequences = num_steps * micro_batches * self.microbatch_size
        return random_tokens(num_sequences, self.sequence_length, self.vocabulary)

    def _prepared(self, model: LlamaForCausalLM) -> nn.Module:
        return with_adapters(model) if self.has_adapters else model


def with_adapters(model: LlamaForCausalLM) -> nn.Module:
    """The model with low-rank adapters, which alone train.

    Raises:
        RuntimeError: If anything else trains: then this would measure something else.
    """
    # Here, as its memory would be that of every other peer too.
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=LORA_RANK, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, config)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    others = [name for name in trained if "lora_" not in name]
    if others or not trained:
        raise RuntimeError(f"Adapters alone should train, and the model trains {others}.")
    return adapted


_SMALL = Workload(256, 688, 4, 2048, 128, 2)
_LARGE = Workload(512, 1536, 8, 10_000, 256, 1)
_TINY = Workload(32, 64, 2, 64, 16, 1)

SMALL = "small"
WORKLOADS = {
    name + ending: replace(workload, has_adapters=bool(ending))
    for name, workload in ((SMALL, _SMALL), ("large", _LARGE), ("tiny", _TINY))
    for ending in ("", ", adapters")
}
"""By name: 7.4 million parameters, 35 million, and next to none, to try a command."""
