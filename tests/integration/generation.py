"""Prompts, and what a model generates for them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from ..models import VOCABULARY, loader, trainer

NUM_NEW = 6


def prompts() -> dict[str, Tensor]:
    """Four prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCABULARY, (4, 7), generator=generator)
    padding = torch.tensor([0, 3, 1, 0])
    mask = (torch.arange(7) >= padding[:, None]).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}


def generate(model: nn.Module, device: torch.device | str = "cpu", **options: Any) -> Tensor:
    """Tokens with the scores behind each, as one tensor."""
    torch.manual_seed(5)
    out = model.generate(  # type: ignore[operator]
        **{name: tensor.to(device) for name, tensor in prompts().items()},
        max_new_tokens=NUM_NEW,
        pad_token_id=0,
        eos_token_id=None,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    assert len(out.scores) == NUM_NEW
    everything = [out.sequences, *out.scores]
    return torch.cat([tensor.double().flatten() for tensor in everything])


class Generating(pl.LightningModule):
    """Generates in `predict_step`."""

    def __init__(self, model: nn.Module, *ways: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.ways = ways

    def predict_step(self, batch: Any, batch_idx: int) -> list[Tensor]:
        return [generate(self.model, self.device, **way) for way in self.ways]


def generated_here(model: nn.Module, *ways: dict[str, Any]) -> list[Tensor]:
    """What the model generates in plain Lightning, in these ways."""
    (found,) = trainer().predict(Generating(model, *ways), loader(1, 1)) or []
    assert isinstance(found, list)
    return found
