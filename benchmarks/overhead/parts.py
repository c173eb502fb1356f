"""Microseconds of single actions that a step repeats for each layer or each micro-batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from lightning_hetero.devices.device import forked_generators
from lightning_hetero.devices.numerics import compute_with, numerics_here
from lightning_hetero.pipeline.random_numbers import Draws, seed_action
from lightning_hetero.pipeline.recorder import Recorder
from lightning_hetero.pipeline.rule import Key

NUM_REPEATS = 2_000


def measure(rounds: int) -> dict[str, float]:
    """Median microseconds of each action."""
    draws, hidden = Draws(1), torch.zeros(2, 4)
    microbatch = draws.microbatch(1, 0)
    recorder, numerics = Recorder(torch.device("cpu")), numerics_here()

    def call_layer() -> None:
        with draws.of(microbatch), draws.of_layer(3, (hidden,)):
            pass

    def keep_generators() -> None:
        with forked_generators():
            pass

    def record() -> None:
        with recorder.action("forward", Key(0), 1):
            pass

    actions: dict[str, Callable[[], object]] = {
        "seed torch by a place": lambda: seed_action(1, 2, 3, 4),
        "a call of a layer draws from its own stream": call_layer,
        "keep the generators and put them back": keep_generators,
        "read the settings that change numbers": numerics_here,
        "compare them with those of this process": lambda: compute_with(numerics),
        "sum up an action": record,
    }
    found = {
        name: [microseconds(action) for _ in range(rounds)] for name, action in actions.items()
    }
    return {name: median(values) for name, values in found.items()}


def microseconds(action: Callable[[], object]) -> float:
    """The mean of many in a row."""
    start = time.perf_counter()
    for _ in range(NUM_REPEATS):
        action()
    return (time.perf_counter() - start) / NUM_REPEATS * 1e6


def report(found: dict[str, float], console: Console) -> None:
    table = Table(title="single actions")
    table.add_column("action")
    table.add_column("µs", justify="right")
    for name, value in found.items():
        table.add_row(name, f"{value:.1f}")
    console.print(table)
