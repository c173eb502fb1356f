"""A training script that a test interrupts, with a folder and workers for its arguments.

It trains on one device and then over workers. It prints a line inside the second batch of each run,
while Lightning shuts the run down, and when the first run has ended. After each line it waits for a
line of its standard input.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hetero import HeteroPipelineStrategy

from ..models import TinyModule, fit, loader

SCRIPT = f"import sys; from {__name__} import main; main(*sys.argv[1:])"


def say(text: str) -> None:
    """Say something, and wait for a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


class ShuttingDown(Callback):
    """Waits while Lightning shuts the run down and ignores a second Ctrl-C."""

    def on_exception(self, *_: Any) -> None:
        say("shutting down")


class Waiting(TinyModule):
    """Waits in its second batch, while workers are busy with the first micro-batch."""

    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self.calls_left = num_calls

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.calls_left -= batch_idx == 1
        if batch_idx == 1 and self.calls_left == 0:
            say("inside")
        return super().training_step(batch, batch_idx)


def train(strategy: Any, folder: str, num_calls: int) -> None:
    checkpoint = ModelCheckpoint(folder, filename="interrupted", save_on_exception=True)
    options: dict[str, Any] = {"callbacks": [ShuttingDown(), checkpoint]}
    fit(Waiting(num_calls), strategy, loader(60, 12), enable_checkpointing=True, **options)


def main(folder: str, *workers: str) -> None:
    torch.set_num_threads(1)
    # A shell's background job inherits that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        train("auto", f"{folder}/plain", num_calls=1)
    except SystemExit as end:
        say(f"ended {end.code or 0}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    strategy = HeteroPipelineStrategy(list(workers), "even", micro_batches=3)
    train(strategy, f"{folder}/cut", num_calls=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
