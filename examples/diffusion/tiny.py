"""Make a tiny FLUX and a few samples of two sizes: python -m examples.diffusion.tiny."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import save_file

FOLDER = Path("output/made")
TEXT_WIDTH, TEXT_LENGTH = 32, 8
SIZES = ((8, 8), (4, 12))


def make(folder: Path = FOLDER, samples_of_each_size: int = 16) -> None:
    """Write a model of random weights, and samples that are stripes."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
    )
    model.to(torch.bfloat16).save_pretrained(folder / "flux")
    samples = folder / "samples"
    samples.mkdir(parents=True, exist_ok=True)
    for height, width in SIZES:
        for number in range(samples_of_each_size):
            stripes = torch.sin(torch.arange(float(width)) * (1 + number % 4))
            content = {
                "latents": stripes.expand(4, height, width).contiguous(),
                "text": torch.randn(TEXT_LENGTH, TEXT_WIDTH),
                "pooled": torch.randn(TEXT_WIDTH),
            }
            save_file(content, samples / f"{height}x{width}_{number:03}.safetensors")


if __name__ == "__main__":
    make()
    print(f"The model and the samples are in {FOLDER}.")
