"""The script of the run that `overnight` rehearses.

python -m tests.faults.overnight_training FOLDER END WORKER...

It trains until the clock shows END (seconds since 1970), or for as many steps on one device where
END is `steps=N`. Each step adds a line to losses.txt. A start finds the last checkpoint by itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, StageMonitor, StagePlan

from .spot import BATCH_SIZE, NUM_MICROBATCHES, Module, Sequences

# Data that take a while: hours of steps stay few enough for one device to repeat them.
BATCH_SECONDS = 0.5
STEPS_PER_CHECKPOINT = 50


class Batches:
    """The batches in their order, from the one after the checkpoint's.

    Lightning takes a batch in advance from data without a length, and would save one too many.
    """

    def __init__(self, pause_seconds: float) -> None:
        self.num_taken = 0
        self._pause_seconds = pause_seconds

    def __len__(self) -> int:
        return len(Sequences()) // BATCH_SIZE

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        first = self.num_taken * BATCH_SIZE
        rest = torch.utils.data.Subset(Sequences(), range(first, len(Sequences())))
        for batch in DataLoader(rest, batch_size=BATCH_SIZE):
            time.sleep(self._pause_seconds)
            self.num_taken += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.num_taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_taken = state["taken"]


class Writing(pl.Callback):
    """Adds the step, the time and the loss to a file, each step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: pl.Trainer, _: Any, outputs: Any, *__: Any) -> None:
        line = f"{trainer.global_step} {time.time()} {float(outputs['loss'])!r}\n"
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(line)


def train(folder: Path, end: str, workers: list[str]) -> None:
    """Train as the run's owner does, with everything that the documentation recommends."""
    torch.set_num_threads(1)
    num_steps = int(end.removeprefix("steps=")) if end.startswith("steps=") else None

    def is_over(_: int) -> bool:
        return num_steps is None and time.time() > float(end)

    # One device takes the same micro-batches, one after the other.
    here = Plan([StagePlan(["coordinator"], (0, 7))], NUM_MICROBATCHES)
    options: dict[str, Any] = {"strategy": HeteroPipelineStrategy([], here)}
    if workers:
        stages = [StagePlan(["coordinator"], (0, 3)), StagePlan([workers[0]], (3, 5))]
        stages += [StagePlan([workers[1]], (5, 7))]
        recovery = Recovery(folder=folder / "recovery", every_seconds=20)
        options["strategy"] = HeteroPipelineStrategy(
            workers,
            Plan(stages, NUM_MICROBATCHES),
            token_file=folder / "token",
            recovery=recovery,
        )
        options["callbacks"] = [StageMonitor()]
        options["logger"] = CSVLogger(folder / "logs")
    saving = ModelCheckpoint(
        folder / "checkpoints", every_n_train_steps=STEPS_PER_CHECKPOINT, save_last=True
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        max_steps=-1 if num_steps is None else num_steps,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, **options},
        log_every_n_steps=10,
    )
    trainer.callbacks += [Writing(folder / "losses.txt"), saving]
    last = folder / "checkpoints" / "last.ckpt"
    batches: Any = Batches(BATCH_SECONDS if workers else 0.0)
    trainer.fit(Module(is_over), batches, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
