"""The models: a 1.1B Llama, and an 8B Llama in NF4 with an adapter, of random weights.

Nothing is downloaded, and nothing is written to disk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.cards.jobs import LARGE, SMALL
from examples.fine_tune.offline.random_base import SIZES, fill


@dataclass(frozen=True)
class Workload:
    """What trains.

    Args:
        sizes: Of the Llama.
        precision: As Lightning calls it.
        sequence_length: Tokens of each sequence.
        rank: Of the adapter on NF4; None if all weights train.
    """

    sizes: dict[str, int]
    precision: str
    sequence_length: int
    rank: int | None = None

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(**self.sizes, use_cache=False)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16-true" else torch.float32

    def model(self) -> nn.Module:
        """The model in main memory, the same at every call."""
        model = _filled(self.config, self.dtype)
        return model if self.rank is None else _with_adapter(model, self.rank)


_SMALL_SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
}

WORKLOADS = {
    ("full", SMALL): Workload(_SMALL_SIZES, "bf16-true", 512),
    ("full", LARGE): Workload(SIZES["8b"], "bf16-true", 512, rank=16),
    ("tiny", SMALL): Workload(SIZES["tiny"], "32-true", 32),
    ("tiny", LARGE): Workload(SIZES["tiny"], "32-true", 32, rank=4),
}


def _filled(config: LlamaConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model.to_empty(device="cpu")
    # Its buffers are computed, and were not on the meta device.
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1)
        else:
            fill(parameter.data)
    return model


def _with_adapter(model: LlamaForCausalLM, rank: int) -> Any:
    """The model with linear layers in NF4, and an adapter on each."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - optional

    quantize = _quantizer()
    for layer in model.model.layers:
        for path, linear in [*layer.named_modules()]:
            if isinstance(linear, nn.Linear):
                layer.set_submodule(path, quantize(linear))
    model.requires_grad_(False)
    # PEFT takes its adapters for 4 bits by this, which transformers sets for a model that it loads.
    model.is_loaded_in_4bit = True
    torch.manual_seed(0)
    adapter = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapter)


def _quantizer() -> Callable[[nn.Linear], nn.Module]:
    """Quantises the first layer of each shape, and takes copies for the others: all have the same
    weights here."""
    from bitsandbytes.functional import quantize_4bit  # noqa: PLC0415 - optional
    from bitsandbytes.nn import Linear4bit, Params4bit  # noqa: PLC0415 - optional

    found: dict[torch.Size, tuple[Tensor, Any]] = {}

    def quantize(linear: nn.Linear) -> nn.Module:
        weight = linear.weight.data
        if weight.shape not in found:
            found[weight.shape] = quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
        packed, state = found[weight.shape]
        made = Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        made.quant_state = copy.deepcopy(state)
        made.weight = Params4bit(
            packed.clone(),
            quant_state=made.quant_state,
            quant_type="nf4",
            bnb_quantized=True,
            module=made,
        )
        # On some processors it would repack its weights in evaluation mode.
        made.support_avx512bf16_for_cpu = False
        return made

    return quantize
