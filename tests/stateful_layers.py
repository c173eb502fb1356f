"""Layers that keep something from one forward to the next, in a module that workers import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .models import VOCABULARY
from .own_layers import WIDTH, OwnModule


class Running(nn.Module):
    """Normalizes over the batch, drops at random, and counts its calls in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen += 1
        mixed = self.norm(self.line(hidden).transpose(1, 2)).transpose(1, 2)
        return hidden + self.dropout(mixed)


class LayeredModel(nn.Module):
    """An embedding, layers that are called one after the other, and a head."""

    def __init__(self, make: Callable[[], nn.Module], num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class LayeredModule(OwnModule):
    """An ordinary LightningModule around layers of one kind."""

    def __init__(self, make: Callable[[], nn.Module], num_layers: int = 3) -> None:
        super().__init__(1)
        self.model = LayeredModel(make, num_layers)  # type: ignore[assignment]

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(batch["input_ids"])
