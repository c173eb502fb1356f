"""The LightningModule: FLUX learns a LoRA by flow matching."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from bitsandbytes.nn import Linear4bit
from diffusers import FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from .data import Batch


@dataclass(frozen=True)
class Lora:
    """The adapter.

    Args:
        rank: Of its matrices.
        targets: The ends of the names of the layers that get one.
    """

    rank: int = 16
    targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")


class DiffusionTuner(L.LightningModule):
    """LoRA of a frozen transformer, on one device or over workers.

    Args:
        base: The folder of the transformer, or a name on the Hub.
        subfolder: Where the transformer is in there.
        four_bit: Whether the blocks' linear layers are packed into NF4.
        lora: The adapter.
        learning_rate: Of AdamW.
        output: The folder of the adapter's file.
    """

    def __init__(
        self,
        base: str,
        subfolder: str | None = None,
        four_bit: bool = False,
        lora: Lora = Lora(),  # noqa: B008  # jsonargparse shows its defaults; nobody changes it
        learning_rate: float = 1e-4,
        output: Path = Path("output/lora"),
    ) -> None:
        super().__init__()
        self.transformer = FluxTransformer2DModel.from_pretrained(
            base, subfolder=subfolder, torch_dtype=torch.bfloat16
        )
        self.transformer.train().requires_grad_(False)
        if four_bit:
            pack(self.transformer.transformer_blocks)
            pack(self.transformer.single_transformer_blocks)
            self.transformer.is_loaded_in_4bit = True  # PEFT looks for it
        # diffusers takes the rank for the scale when it loads an adapter.
        adapter = LoraConfig(r=lora.rank, lora_alpha=lora.rank, target_modules=list(lora.targets))
        self.transformer.add_adapter(adapter)
        for parameter in self.transformer.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        self.learning_rate = learning_rate
        self.output = output

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        times = batch["times"]
        share = times.view(-1, 1, 1, 1)
        noisy = (1 - share) * batch["latents"] + share * batch["noise"]
        packed = _packed(noisy)
        dtype = self.transformer.dtype
        found = self.transformer(
            hidden_states=packed.to(dtype),
            encoder_hidden_states=batch["text"].to(dtype),
            pooled_projections=batch["pooled"].to(dtype),
            timestep=times.to(dtype),
            guidance=torch.ones_like(times) if self.transformer.config.guidance_embeds else None,
            img_ids=_places(noisy),
            txt_ids=torch.zeros(batch["text"].shape[1], 3, device=times.device),
            return_dict=False,
        )[0]
        wanted = _packed(batch["noise"] - batch["latents"])
        loss = functional.mse_loss(found.float(), wanted.float())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> AdamW:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return AdamW(trained, lr=self.learning_rate)

    def on_fit_end(self) -> None:
        adapter = get_peft_model_state_dict(self.transformer)
        FluxPipeline.save_lora_weights(self.output, transformer_lora_layers=adapter)
        print(f"The adapter is in {self.output}.")


def pack(root: nn.Module) -> None:
    """Store the linear layers in NF4, which bitsandbytes does when they move to a device.

    diffusers packs too, but wants a GPU in this process for it.
    """
    for module in [*root.modules()]:
        for name, child in [*module.named_children()]:
            if type(child) is nn.Linear:
                packed = Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=False,
                    compute_dtype=child.weight.dtype,
                    quant_type="nf4",
                )
                packed.weight.data, packed.bias = child.weight.data, child.bias
                setattr(module, name, packed.requires_grad_(False).to(child.weight.device))


def _packed(latents: Tensor) -> Tensor:
    """Squares of two by two as one token each."""
    count, channels, height, width = latents.shape
    squares = latents.view(count, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * 4)


def _places(latents: Tensor) -> Tensor:
    """The row and the column of each token, behind a zero."""
    _, _, height, width = latents.shape
    rows, columns = torch.arange(height // 2), torch.arange(width // 2)
    places = torch.cartesian_prod(torch.zeros(1), rows.float(), columns.float())
    return places.to(latents.device)
