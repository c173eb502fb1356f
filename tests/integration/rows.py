"""A model that is compiled in no time, and whether this machine compiles."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero.devices.description import equipment_here

CAN_COMPILE = "compile" in equipment_here(torch.device("cpu")).capabilities


class Rows(pl.LightningModule):
    """Layers of torch's own, small enough that a compiler has little to do."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        hidden = batch
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()

    def on_train_batch_end(self, outputs: Any, *_: object) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def rows() -> DataLoader[Tensor]:
    return DataLoader(torch.linspace(-1, 1, 64).reshape(16, 4), batch_size=4)  # type: ignore[arg-type]
