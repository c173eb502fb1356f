"""Tiny diffusion transformers of diffusers, one of each family, and a LightningModule that trains
them by flow matching."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import lightning.pytorch as pl
import torch
from peft import LoraConfig
from torch import Tensor
from torch.nn import functional

HEADS, HEAD_WIDTH = 2, 16
WIDTH = HEADS * HEAD_WIDTH
TEXT_WIDTH, TEXT_LENGTH = 32, 6
Call = Callable[[Any, Mapping[str, Tensor]], Tensor]
_HEADS = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_WIDTH}


@dataclass(frozen=True)
class DiffusionFamily:
    """A transformer of diffusers.

    Args:
        name: The class of diffusers.
        options: Of its constructor.
        latents: The shape of one sample.
        call: Runs the model on a batch: noisy ``latents``, ``text``, ``pooled`` and ``time``.
        layers: The lists of its layers.
        targets: The names of modules that get an adapter.
    """

    name: str
    options: Mapping[str, Any]
    latents: tuple[int, ...]
    call: Call
    layers: tuple[str, ...] = ("transformer_blocks",)
    targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")

    def model(self) -> Any:
        torch.manual_seed(0)
        return getattr(diffusers, self.name)(**self.options)


def _flux(model: Any, batch: Mapping[str, Tensor], **more: Any) -> Tensor:
    places = model.config.axes_dims_rope
    found: Tensor = model(
        hidden_states=batch["latents"],
        encoder_hidden_states=batch["text"],
        timestep=batch["time"],
        img_ids=torch.ones(batch["latents"].shape[1], len(places)).cumsum(0),
        txt_ids=torch.zeros(TEXT_LENGTH, len(places)),
        return_dict=False,
        **more,
    )[0]
    return found


def _first_flux(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return _flux(model, batch, pooled_projections=batch["pooled"])


def _wan(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = model(
        hidden_states=batch["latents"],
        timestep=batch["time"] * 1000,
        encoder_hidden_states=batch["text"],
        return_dict=False,
    )[0]
    return found


def _sd3(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = model(
        hidden_states=batch["latents"],
        timestep=batch["time"] * 1000,
        encoder_hidden_states=batch["text"],
        pooled_projections=batch["pooled"],
        return_dict=False,
    )[0]
    return found


def _qwen(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = model(
        hidden_states=batch["latents"],
        timestep=batch["time"],
        encoder_hidden_states=batch["text"],
        encoder_hidden_states_mask=torch.ones(batch["text"].shape[:2], dtype=torch.long),
        img_shapes=[[(1, 4, 4)]] * len(batch["latents"]),
        return_dict=False,
    )[0]
    return found


def _ltx(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = model(
        hidden_states=batch["latents"],
        timestep=batch["time"] * 1000,
        encoder_hidden_states=batch["text"],
        encoder_attention_mask=torch.ones(batch["text"].shape[:2]),
        num_frames=2,
        height=2,
        width=4,
        return_dict=False,
    )[0]
    return found


def _lumina(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = model(
        hidden_states=batch["latents"],
        timestep=batch["time"],
        encoder_hidden_states=batch["text"],
        encoder_attention_mask=torch.ones(batch["text"].shape[:2], dtype=torch.bool),
        return_dict=False,
    )[0]
    return found


_TWO_LISTS = ("transformer_blocks", "single_transformer_blocks")
FAMILIES: dict[str, DiffusionFamily] = {
    "FLUX": DiffusionFamily(
        "FluxTransformer2DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "joint_attention_dim": TEXT_WIDTH,
            "pooled_projection_dim": TEXT_WIDTH,
            "axes_dims_rope": (4, 4, 8),
        },
        (16, 4),
        _first_flux,
        _TWO_LISTS,
    ),
    "FLUX.2": DiffusionFamily(
        "Flux2Transformer2DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "joint_attention_dim": TEXT_WIDTH,
            "timestep_guidance_channels": 16,
            "axes_dims_rope": (4, 4, 4, 4),
            "guidance_embeds": False,
        },
        (16, 4),
        _flux,
        _TWO_LISTS,
        ("to_q", "to_k", "to_v", "to_qkv_mlp_proj"),
    ),
    "Chroma": DiffusionFamily(
        "ChromaTransformer2DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "joint_attention_dim": TEXT_WIDTH,
            "axes_dims_rope": (4, 4, 8),
            "approximator_hidden_dim": 32,
            "approximator_layers": 1,
        },
        (16, 4),
        _flux,
        _TWO_LISTS,
    ),
    "Wan": DiffusionFamily(
        "WanTransformer3DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": TEXT_WIDTH,
            "freq_dim": 32,
            "ffn_dim": 64,
            "num_layers": 4,
            "rope_max_seq_len": 32,
        },
        (4, 2, 4, 4),
        _wan,
        ("blocks",),
    ),
    "SD3": DiffusionFamily(
        "SD3Transformer2DModel",
        {
            **_HEADS,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 4,
            "joint_attention_dim": TEXT_WIDTH,
            "caption_projection_dim": WIDTH,
            "pooled_projection_dim": TEXT_WIDTH,
            "pos_embed_max_size": 8,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        },
        (4, 8, 8),
        _sd3,
    ),
    "Qwen-Image": DiffusionFamily(
        "QwenImageTransformer2DModel",
        {
            **_HEADS,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 4,
            "joint_attention_dim": TEXT_WIDTH,
            "axes_dims_rope": (4, 6, 6),
        },
        (16, 16),
        _qwen,
    ),
    "LTX": DiffusionFamily(
        "LTXVideoTransformer3DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 4,
            "cross_attention_dim": WIDTH,
            "caption_channels": TEXT_WIDTH,
        },
        (16, 4),
        _ltx,
    ),
    "Lumina 2": DiffusionFamily(
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": WIDTH,
            "num_layers": 4,
            "num_refiner_layers": 1,
            "num_attention_heads": HEADS,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "axes_dim_rope": (4, 6, 6),
            "axes_lens": (32, 16, 16),
            "cap_feat_dim": TEXT_WIDTH,
        },
        (4, 8, 8),
        _lumina,
        ("layers",),
    ),
}


class DiffusionModule(pl.LightningModule):
    """Trains all weights, or an adapter."""

    def __init__(self, family: DiffusionFamily, *, lora: bool = False) -> None:
        super().__init__()
        self.family = family
        self.model = family.model()
        if lora:
            self.model.requires_grad_(False)
            config = LoraConfig(r=4, target_modules=list(family.targets), init_lora_weights=False)
            self.model.add_adapter(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        time = batch["time"].view(-1, *[1] * (batch["clean"].ndim - 1))
        latents = (1 - time) * batch["clean"] + time * batch["noise"]
        found = self.family.call(self.model, {**batch, "latents": latents})
        wanted = (batch["noise"] - batch["clean"])[..., : found.shape[-1]]
        loss = functional.mse_loss(found, wanted)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def samples(family: DiffusionFamily, count: int) -> list[dict[str, Tensor]]:
    """Random latents, embeddings of texts, and times."""
    torch.manual_seed(1)
    return [
        {
            "clean": torch.randn(family.latents),
            "noise": torch.randn(family.latents),
            "text": torch.randn(TEXT_LENGTH, TEXT_WIDTH),
            "pooled": torch.randn(TEXT_WIDTH),
            "time": torch.rand(()),
        }
        for _ in range(count)
    ]
