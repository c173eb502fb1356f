"""Small batches with accumulation: one pipeline for each optimizer step, by sleeping stages.

Three ways to train the same micro-batches are compared with one device and with the bound:

    accumulated   `accumulate_grad_batches`: backwards go on while the next batch begins
    windows       `lightning_hetero.windows(loader, n)`: the batches come at once
    one batch     all samples in one batch
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from benchmarks.processes import be_quiet, machine, wide_console
from benchmarks.sleeping_stages.main import (
    HIDDEN_SIZE,
    SEQUENCE_LENGTH,
    Case,
    SleepingBlock,
    Sleepy,
    bound_seconds,
    plan_for,
    stage_times,
)
from benchmarks.training import fit
from lightning_hetero import HeteroPipelineStrategy, windows

Way = Literal["accumulated", "windows", "one batch"]
WAYS: tuple[Way, ...] = ("accumulated", "windows", "one batch")

# Each process has two equal layers.
SHAPES = ("C2 a2", "C2 a2 b2", "C2 a2 b2 c2", "C2 a2 b2 c2 d2 e2", "a2 C2", "a2 b2 C2")


@dataclass(frozen=True)
class Setting:
    """How samples come.

    Args:
        shape: The stages, as `Case.of` reads them.
        batch: The samples, and so the micro-batches, of a batch of the loader.
        accumulate: The batches of an optimizer step.
    """

    shape: str
    batch: int
    accumulate: int

    @property
    def num_processes(self) -> int:
        return len({word[0] for word in self.shape.split()})

    @property
    def case(self) -> Case:
        """The pipeline of all micro-batches of an optimizer step."""
        return Case.of((1,) * self.num_processes, self.shape, self.batch * self.accumulate)

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.accumulate}"


def settings(wanted: str) -> Iterator[Setting]:
    sizes = [(1, 4), (1, 8), (1, 16), (4, 4), (8, 4)]
    for shape, (batch, accumulate) in itertools.product(SHAPES, sizes):
        setting = Setting(shape, batch, accumulate)
        if wanted in f"{shape}, {setting.name}":
            yield setting


def one_device_seconds(setting: Setting, unit_seconds: float) -> float:
    """The sum of all sleeps of an optimizer step."""
    each = sum(times.both_seconds for times in stage_times(setting.case, unit_seconds))
    return setting.case.num_microbatches * each


def measured_seconds(setting: Setting, way: Way, unit_seconds: float, num_steps: int) -> float:
    """The median optimizer step, the first left out."""
    case = setting.case
    num_layers = sum(count for _, count in case.stages)
    module = Sleepy([SleepingBlock(unit_seconds, 2 * unit_seconds) for _ in range(num_layers)])
    size = setting.batch if way != "one batch" else case.num_microbatches
    data = torch.randn(num_steps * case.num_microbatches, SEQUENCE_LENGTH, HIDDEN_SIZE)
    plan = plan_for(case, None)
    strategy = HeteroPipelineStrategy(workers=case.num_workers, plan=plan, layers="blocks")
    loader = DataLoader(data, batch_size=size)
    return trained_seconds(module, loader, strategy, way, setting.accumulate)


def trained_seconds(
    module: Any, loader: Any, strategy: HeteroPipelineStrategy, way: Way, accumulate: int
) -> float:
    """The median optimizer step of a training, the first left out.

    Args:
        module: What is trained; its ``marks`` are the ends of its batches.
        loader: Its batches; those of each step in one, if they come as one batch.
        strategy: How it is trained.
        way: How the batches of a step come.
        accumulate: How many there are for each step.
    """
    if way == "windows":
        loader = windows(loader, accumulate)
    accumulate = accumulate if way == "accumulated" else 1
    fit(module, loader, strategy, accumulate)
    ends = module.marks[accumulate - 1 :: accumulate]
    return median(end - start for start, end in itertools.pairwise(ends))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="per run; the first is not timed")
    parser.add_argument("--cases", default="", help='only those with this: "b2, 1 x 8"')
    parser.add_argument("--milliseconds", type=float, default=20, help="a layer's forward")
    options = parser.parse_args()

    be_quiet()
    console, unit_seconds = wide_console(), options.milliseconds / 1e3
    found: dict[Setting, dict[Way, list[float]]] = {
        setting: {way: [] for way in WAYS} for setting in settings(options.cases)
    }
    for _ in range(options.rounds):
        for setting, seconds in found.items():
            for way in WAYS:
                seconds[way].append(measured_seconds(setting, way, unit_seconds, options.steps))
    report(found, unit_seconds, console)


def report(
    found: dict[Setting, dict[Way, list[float]]], unit_seconds: float, console: Console
) -> None:
    """Print the speed of each way, as times one device."""
    table = Table(title="an optimizer step, compute replaced by sleeps")
    table.add_column("stages")
    for column in ("batches", "one device, ms", *(f"{way}, ms" for way in WAYS), *WAYS, "bound"):
        table.add_column(column, justify="right")
    for setting, seconds in found.items():
        alone = one_device_seconds(setting, unit_seconds)
        medians = [median(seconds[way]) for way in WAYS]
        bound = bound_seconds(setting.case, stage_times(setting.case, unit_seconds))
        table.add_row(
            setting.shape,
            setting.name,
            f"{alone * 1e3:.0f}",
            *(f"{each * 1e3:.0f}" for each in medians),
            *(f"{alone / each:.2f} x" for each in medians),
            f"{alone / bound:.2f} x",
        )
    console.print(table)
    console.print("C: coordinator; a to e: workers; 1 x 8: batches of 1, eight for a step")
    console.print(machine())


if __name__ == "__main__":
    main()
