"""Tiny models of families besides plain decoders: of images, of two stacks, and recurrent ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from .families import NUM_LAYERS, SIZES

VOCABULARY = SIZES["vocab_size"]
LENGTH = 8
IMAGE_TOKEN = VOCABULARY - 1
STACK: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": NUM_LAYERS,
    "decoder_layers": NUM_LAYERS,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 4,
    "patch_size": 2,
}


@dataclass(frozen=True)
class Family:
    """A family, and how its model is made and called.

    Args:
        model: Makes the model.
        batch: Makes a batch of so many samples.
        layers: What `layers` names; None where the strategy finds the layers.
        others: Other choices of layers.
        refused: What the error says of its layers, if they cannot be on workers.
        no_cache: What the error says of its key-value cache, if a worker cannot keep it.
        settings: Other arguments of the strategy, where it does not train.
    """

    model: Callable[[], PreTrainedModel]
    batch: Callable[[int], dict[str, Tensor]]
    layers: Any = None
    others: tuple[Any, ...] = ()
    refused: str | None = None
    no_cache: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def tokens(count: int) -> dict[str, Tensor]:
    ids = torch.randint(3, IMAGE_TOKEN, (count, LENGTH), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.clone()}


def pairs(count: int) -> dict[str, Tensor]:
    """Sequences of two lengths, padded at their ends."""
    found = tokens(count)
    mask = torch.ones_like(found["input_ids"])
    mask[::2, -2:] = 0
    return {**found, "attention_mask": mask, "labels": found["labels"][:, :5].contiguous()}


def pictures(count: int) -> dict[str, Tensor]:
    """One picture of four patches before each text."""
    found = tokens(count)
    found["input_ids"][:, :4] = IMAGE_TOKEN
    found["labels"][:, :4] = -100
    pixels = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(4))
    return {**found, "pixel_values": pixels}


def sounds(count: int) -> dict[str, Tensor]:
    features = torch.randn(count, 8, 20, generator=torch.Generator().manual_seed(4))
    return {"input_features": features, "labels": tokens(count)["labels"][:, :5].contiguous()}


def bart() -> PreTrainedModel:
    return hf.BartForConditionalGeneration(hf.BartConfig(**STACK, max_position_embeddings=32))


def t5() -> PreTrainedModel:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=NUM_LAYERS,
            num_decoder_layers=NUM_LAYERS,
            num_heads=2,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )


def whisper() -> PreTrainedModel:
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            **STACK,
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=16,
            suppress_tokens=[],
            begin_suppress_tokens=[],
        )
    )


def llava() -> PreTrainedModel:
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**VISION, projection_dim=8),
            text_config=hf.LlamaConfig(**SIZES),
            image_token_index=IMAGE_TOKEN,
            vision_feature_layer=-1,
        )
    )


def gemma3() -> PreTrainedModel:
    return hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(
            vision_config=hf.SiglipVisionConfig(**VISION),
            text_config=hf.Gemma3TextConfig(
                **SIZES, head_dim=8, sliding_window=4, sliding_window_pattern=2
            ),
            mm_tokens_per_image=4,
            image_token_index=IMAGE_TOKEN,
            boi_token_index=1,
            eoi_token_index=2,
        )
    )


def qwen2_vl() -> PreTrainedModel:
    vision = {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "patch_size": 2}
    text = {**SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    return hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(
            text_config=text,
            vision_config={**vision, "spatial_merge_size": 2, "temporal_patch_size": 2},
            image_token_id=IMAGE_TOKEN,
        )
    )


def mamba() -> PreTrainedModel:
    return hf.MambaForCausalLM(
        hf.MambaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=NUM_LAYERS,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def mamba2() -> PreTrainedModel:
    return hf.Mamba2ForCausalLM(
        hf.Mamba2Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=NUM_LAYERS,
            num_heads=4,
            head_dim=8,
            n_groups=1,
            chunk_size=4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def recurrent_gemma() -> PreTrainedModel:
    return hf.RecurrentGemmaForCausalLM(
        hf.RecurrentGemmaConfig(
            num_hidden_layers=NUM_LAYERS,
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_attention_heads=2,
            num_key_value_heads=1,
            lru_width=16,
            attention_window_size=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def rwkv() -> PreTrainedModel:
    return hf.RwkvForCausalLM(
        hf.RwkvConfig(
            vocab_size=VOCABULARY,
            context_length=16,
            hidden_size=16,
            num_hidden_layers=NUM_LAYERS,
            attention_hidden_size=16,
            intermediate_size=24,
            use_cache=False,
            rescale_every=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def xlnet() -> PreTrainedModel:
    return hf.XLNetLMHeadModel(
        hf.XLNetConfig(
            vocab_size=VOCABULARY,
            d_model=16,
            n_layer=NUM_LAYERS,
            n_head=2,
            d_inner=24,
            dropout=0.0,
            use_mems_eval=False,
            use_mems_train=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


STACKS = ("model.model.encoder.layers", "model.model.decoder.layers")
T5_STACKS = ("model.encoder.block", "model.decoder.block")
BOTH = "EncoderDecoderCache cannot be kept .* `use_cache=False`"
LINEAR = "LinearAttentionLayer, which cannot be kept .* `use_cache=False`"
FAMILIES = {
    "bart": Family(bart, pairs, None, (STACKS[1], list(STACKS)), no_cache=BOTH),
    "t5": Family(t5, pairs, None, (T5_STACKS[1], list(T5_STACKS)), no_cache=BOTH),
    "whisper": Family(whisper, sounds, None, (STACKS[1], list(STACKS)), no_cache=BOTH),
    "llava": Family(llava, pictures),
    "gemma3": Family(gemma3, pictures),
    "qwen2_vl": Family(qwen2_vl, tokens),
    "mamba": Family(mamba, tokens, no_cache=LINEAR),
    "mamba2": Family(mamba2, tokens, no_cache=LINEAR),
    "recurrent_gemma": Family(recurrent_gemma, tokens, refused="or keep the layer with the coord"),
    "rwkv": Family(rwkv, tokens),
    # Samples are the third dimension of its masks, so a batch that is handed over stays whole.
    "xlnet": Family(xlnet, tokens, "model.transformer.layer", settings={"micro_batches": 1}),
}
CASES = [
    (name, layers)
    for name, family in FAMILIES.items()
    if family.refused is None
    for layers in (family.layers, *family.others)
]


def tiny(name: str) -> PreTrainedModel:
    """A family's model, with the same random weights at every call."""
    torch.manual_seed(0)
    model = FAMILIES[name].model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model
