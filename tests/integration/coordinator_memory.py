"""Train a saved model with all of it on two local workers, and print the coordinator's memory.

    python -m tests.integration.coordinator_memory FOLDER away
    python -m tests.integration.coordinator_memory FOLDER here

prints the highest memory of this process above its memory after the model is built. The
second word says where the ends of the model are.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan, from_pretrained

LENGTH = 128
BATCH_SIZE = 8


class TrainsAll(pl.LightningModule):
    """Trains all weights of the model of a folder, which stay there until a worker reads them."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model = from_pretrained(folder)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def most_bytes() -> int:
    """The highest memory of this process, on Linux."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]) * 1024


def main(folder: str, ends: str) -> None:
    module = TrainsAll(folder)
    num_layers = module.model.config.num_hidden_layers
    first = StagePlan(["local-1"], (0, 1), embedding=ends == "away")
    last = StagePlan(["local-2"], (1, num_layers), head=ends == "away")
    plan = Plan([first, last], micro_batches=4)
    ids = torch.randint(module.model.config.vocab_size, (2 * BATCH_SIZE, LENGTH))
    data: Any = DataLoader(ids, BATCH_SIZE)  # type: ignore[arg-type]
    found: dict[str, int] = {}

    class Peak(pl.Callback):
        """The highest memory while the weights are sent, and in the steps."""

        def on_train_start(self, *_: Any) -> None:
            found["while weights are sent"] = most_bytes()
            found["before the steps"] = psutil.Process().memory_info().rss
            Path("/proc/self/clear_refs").write_text("5")  # begins `VmHWM` anew

        def on_train_end(self, *_: Any) -> None:
            found["in the steps"] = most_bytes()

    before = psutil.Process().memory_info().rss
    pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        strategy=HeteroPipelineStrategy(2, plan, check_first_batch="off"),
        callbacks=[Peak()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, data)
    for name, num_bytes in found.items():
        print(f"{(num_bytes - before) / 2**20:.0f} MiB above start {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
