"""What trains on fake devices, and what a run leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_hetero import Plan, StagePlan
from lightning_hetero.verify.device_check import AnyAccelerator

from ..models import TinyModule

NUM_LAYERS = 5
BATCH_SIZE = 12
Found = dict[str, Tensor]


class Module(TinyModule):
    """Its optimizer computes alike on every device, and its step makes a tensor on the device."""

    is_fused = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        # As user code writes it: the kind of device alone means the thread's current device.
        return loss * torch.ones((), device=self.device.type).expand(1).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3, foreach=False, fused=self.is_fused)


def on(device: str) -> dict[str, Any]:
    """The Trainer's options for a device."""
    if device == "cpu":
        return {"accelerator": "cpu"}
    return {"accelerator": AnyAccelerator(), "devices": [int(device.partition(":")[2])]}


def line(workers: Sequence[str], cuts: Sequence[int] = (1, 3, 4), **options: Any) -> Plan:
    """The coordinator has the first layers and the last ones, and two workers those between."""
    bounds = [0, *cuts, NUM_LAYERS]
    names = ["coordinator", *workers[:2], "coordinator"]
    stages = [
        StagePlan([name], (start, end), **(options if name != "coordinator" else {}))
        for name, start, end in zip(names, bounds[:-1], bounds[1:], strict=True)
        if start < end
    ]
    return Plan(stages, micro_batches=3)


def result_of(module: pl.LightningModule) -> Found:
    """The weights and losses of a run."""
    weights = {name: tensor.cpu().clone() for name, tensor in module.state_dict().items()}
    return weights | {"losses": torch.tensor(getattr(module, "losses", []))}


def differing(found: Found, expected: Found) -> list[str]:
    """What differs in any bit, by name."""
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
