"""Batches of one image in buckets of three sizes, as LoRA of a diffusion transformer has them.

The model has the shape of FLUX: blocks of (image, text), then blocks of one stream, in two lists.
The blocks sleep by the tokens of their image. Images of other sizes make no common batch, so an
optimizer step comes as accumulated batches or as a window.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.processes import be_quiet, machine, wide_console
from benchmarks.sleeping_stages.main import HIDDEN_SIZE, Sleep
from benchmarks.window.main import Way, trained_seconds
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

# Tokens of an image in each bucket, relative to the first.
TOKENS = (16, 24, 32)
TEXT_LENGTH = 8
NUM_DOUBLE, NUM_SINGLE, NUM_WORKERS = 2, 4, 2
WAYS: tuple[Way, ...] = ("accumulated", "windows")


class SingleBlock(nn.Module):
    """Sleeps for each token: once in its forward, twice in its backward."""

    def __init__(self, seconds_per_token: float) -> None:
        super().__init__()
        self.seconds_per_token = seconds_per_token
        self.scale = nn.Parameter(torch.ones(HIDDEN_SIZE))

    def forward(self, hidden: Tensor, num_tokens: int) -> Tensor:
        seconds = self.seconds_per_token * num_tokens
        slept: Tensor = Sleep.apply(hidden, seconds, 2 * seconds)
        return slept * self.scale


class DoubleBlock(SingleBlock):
    """Has a stream of the text beside that of the image."""

    def forward(self, hidden: Tensor, num_tokens: int, text: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return text * self.scale, super().forward(hidden, num_tokens)


class Diffusing(pl.LightningModule):
    """The blocks between an embedding and a loss that take no time worth the name."""

    def __init__(self, seconds_per_token: float) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.ones(HIDDEN_SIZE))
        self.transformer_blocks = nn.ModuleList(
            DoubleBlock(seconds_per_token) for _ in range(NUM_DOUBLE)
        )
        self.single_transformer_blocks = nn.ModuleList(
            SingleBlock(seconds_per_token) for _ in range(NUM_SINGLE)
        )
        self.marks: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        num_tokens = batch.shape[1]
        hidden = batch * self.embedding
        text = torch.ones_like(hidden[:, :1]).expand(-1, TEXT_LENGTH, -1) * self.embedding
        for block in self.transformer_blocks:
            text, hidden = block(hidden, num_tokens, text)
        hidden = torch.cat([text, hidden], 1)
        for block in self.single_transformer_blocks:
            hidden = block(hidden, num_tokens)
        return hidden[:, TEXT_LENGTH:].square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.marks.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def sizes(count: int) -> Iterator[int]:
    """The tokens of so many images, a bucket after the other."""
    return itertools.islice(itertools.cycle(TOKENS), count)


def one_device_seconds(tokens: Sequence[int], seconds_per_token: float) -> float:
    """The sum of all sleeps."""
    return 3 * seconds_per_token * (NUM_DOUBLE + NUM_SINGLE) * sum(tokens)


def bound_seconds(tokens: Sequence[int], seconds_per_token: float) -> float:
    """The work of one of the equal workers, while the other one works too but for the smallest
    image, which has to come to it first or leaves it last."""
    alone = one_device_seconds([min(tokens)], seconds_per_token) / NUM_WORKERS
    return one_device_seconds(tokens, seconds_per_token) / NUM_WORKERS + alone


def measured_seconds(way: Way, options: argparse.Namespace) -> float:
    """The median optimizer step, the first left out; each has the same sizes."""
    count = options.accumulate
    images = [torch.randn(size, HIDDEN_SIZE) for size in sizes(count)] * options.steps
    end, half = NUM_DOUBLE + NUM_SINGLE, (NUM_DOUBLE + NUM_SINGLE) // NUM_WORKERS
    stages = [StagePlan(["local-1"], (0, half)), StagePlan(["local-2"], (half, end))]
    strategy = HeteroPipelineStrategy(
        NUM_WORKERS,
        Plan(stages, 1),
        layers=["transformer_blocks", "single_transformer_blocks"],
        micro_batches=count,
    )
    module = Diffusing(options.milliseconds / 1e3 / TOKENS[0])
    loader = DataLoader(images, batch_size=1)  # type: ignore[arg-type]
    return trained_seconds(module, loader, strategy, way, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="per run; the first is not timed")
    parser.add_argument("--accumulate", type=int, default=8, help="images of an optimizer step")
    parser.add_argument(
        "--milliseconds", type=float, default=20, help="a block's forward of the smallest image"
    )
    options = parser.parse_args()

    be_quiet()
    console = wide_console()
    seconds: dict[Way, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            seconds[way].append(measured_seconds(way, options))
    tokens = [*sizes(options.accumulate)]
    per_token = options.milliseconds / 1e3 / TOKENS[0]
    alone = one_device_seconds(tokens, per_token)
    table = Table(title=f"{len(tokens)} images of {len(TOKENS)} sizes for an optimizer step")
    for column in ("way", "ms", "x one device"):
        table.add_column(column, justify="right")
    found = {"one device": alone, **{way: median(each) for way, each in seconds.items()}}
    found["bound"] = bound_seconds(tokens, per_token)
    for name, each in found.items():
        table.add_row(name, f"{each * 1e3:.0f}", f"{alone / each:.2f}")
    console.print(table)
    gain = found["accumulated"] / found["windows"]
    console.print(f"windows: {gain:.2f} times as fast as accumulated batches; two workers")
    console.print(machine())


if __name__ == "__main__":
    main()
