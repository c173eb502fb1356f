"""Batches of one sample on two pinned cores: accumulated, as windows, and one batch of all.

A small Llama; the coordinator and one worker have one core each. Runs are interleaved: every round
times one core alone, then each way. The medians of the rounds' ratios are printed.
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from benchmarks.pipeline_vs_single.main import SMALL_CONFIG
from benchmarks.processes import be_quiet, machine, on_core, pin, two_cores, worker_process
from benchmarks.training import Decoder, Sequences, fit, random_tokens
from benchmarks.window.main import WAYS, Way
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan, windows
from lightning_hetero.transport.token import FILE_VARIABLE

ALONE = "one core"


def plan_for(worker: str, split: int, micro_batches: int) -> Plan:
    """The first layers on the worker, the last ``split`` here."""
    end, num_layers = SMALL_CONFIG.num_hidden_layers - split, SMALL_CONFIG.num_hidden_layers
    stages = [
        StagePlan([worker], (0, end), embedding=True),
        StagePlan(["coordinator"], (end, num_layers)),
    ]
    return Plan(stages, micro_batches)


def step_seconds(strategy: Any, way: Way, options: argparse.Namespace) -> float:
    """The median optimizer step, the first left out."""
    count = options.accumulate
    module = Decoder(SMALL_CONFIG)
    tokens = random_tokens(options.steps * count, options.sequence_length, SMALL_CONFIG.vocab_size)
    size = count if way == "one batch" else 1
    loader: Any = DataLoader(Sequences(tokens), batch_size=size)
    if way == "windows":
        loader = windows(loader, count)
    fit(module, loader, strategy, count if way == "accumulated" else 1)
    return median(module.step_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="per run; the first is not timed")
    parser.add_argument("--accumulate", type=int, default=16, help="samples of an optimizer step")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--split", type=int, default=3, help="layers on the coordinator")
    options = parser.parse_args()

    be_quiet()
    os.environ[FILE_VARIABLE] = ""  # no TLS
    here, there = two_cores()
    pin(here)
    seconds: dict[str, list[float]] = {name: [] for name in (ALONE, *WAYS)}
    with worker_process(on_core(there)) as worker:
        for _ in range(options.rounds):
            seconds[ALONE].append(step_seconds("auto", "accumulated", options))
            for way in WAYS:
                pieces = options.accumulate if way == "one batch" else 1
                plan = plan_for(worker.address, options.split, pieces)
                strategy = HeteroPipelineStrategy([worker.address], plan)
                seconds[way].append(step_seconds(strategy, way, options))
    report(seconds, options.accumulate)


def report(seconds: dict[str, list[float]], accumulate: int) -> None:
    """Print the medians of the rounds' ratios."""
    table = Table(title=f"{accumulate} samples for an optimizer step, two pinned cores")
    for column in ("way", "ms", "x one core", "x one batch"):
        table.add_column(column, justify="right")
    for name, found in seconds.items():
        ratios = [
            median(other / each for other, each in zip(seconds[base], found, strict=True))
            for base in (ALONE, "one batch")
        ]
        table.add_row(name, f"{median(found) * 1e3:.0f}", *(f"{each:.2f}" for each in ratios))
    console = Console()
    console.print(table)
    console.print(machine())


if __name__ == "__main__":
    main()
