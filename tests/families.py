"""Tiny models with random weights, one for each family of decoders, and their training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from lightning_hetero import Plan

from .equality import TOLERANCE, assert_close
from .models import VOCABULARY, fit, loader
from .plans import plan_of

NUM_LAYERS = 4
BATCH_SIZE = 6
NUM_STEPS = 3
NUM_MICROBATCHES = 3
FLOOR = 1e-2
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

    The weights are larger than usual, so that every part of a layer affects the loss.
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


class FamilyModule(pl.LightningModule):
    """Trains all parameters that require a gradient; ``gradients`` are those of the first step.

    The first momentum is the gradient, so the optimizer's state shows also those of workers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if batch_idx == 0:
            state = self.trainer.optimizers[0].state_dict()["state"]
            names = [name for name, p in self.named_parameters() if p.requires_grad]
            self.gradients = {
                names[index]: entry["momentum_buffer"].clone()
                for index, entry in state.items()
                if entry.get("momentum_buffer") is not None
            }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trainable, lr=0.05, momentum=0.9)


class CollectingModule(FamilyModule):
    """The same, and collects the hidden states of all layers."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, output_hidden_states=True).loss
        return loss


def plan_over(workers: Sequence[str], micro_batches: int = NUM_MICROBATCHES) -> Plan:
    """One layer on the coordinator, one on the first worker, the others on the second."""
    return plan_of(workers, (1, 1, NUM_LAYERS - 2), micro_batches)


def fit_family(model: PreTrainedModel, strategy: Any = "auto", padded: bool = True) -> FamilyModule:
    data = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE, padded)
    return fit(FamilyModule(model), strategy, data)


def fit_by_hand(model: PreTrainedModel) -> FamilyModule:
    """Train on one device over the same micro-batches.

    The reference for losses that are not a mean over the samples.
    """
    module = FamilyModule(model)
    optimizer = module.configure_optimizers()
    for step, batch in enumerate(loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE)):
        optimizer.zero_grad()
        losses = []
        for start in range(0, BATCH_SIZE, BATCH_SIZE // NUM_MICROBATCHES):
            end = start + BATCH_SIZE // NUM_MICROBATCHES
            piece = {name: tensor[start:end] for name, tensor in batch.items()}
            loss = model(**piece).loss / NUM_MICROBATCHES
            loss.backward()
            losses.append(float(loss.detach()))
        if step == 0:
            module.gradients = {
                name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
            }
        optimizer.step()
        module.losses.append(sum(losses))
    return module


def assert_equal_runs(found: FamilyModule, expected: FamilyModule) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert_close(found.gradients, expected.gradients, FLOOR)
    assert_close(found.state_dict(), expected.state_dict(), FLOOR)
