"""The software cost of a micro-batch: CPU time of one more of them, over that of plain Lightning.

The model is so small that only software counts. The same batch is cut into 4 and into 32
micro-batches; the difference, divided by 28, is the CPU time of one more micro-batch. Plain
Lightning accumulates over the same micro-batches.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import lightning.pytorch as pl
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.overhead.operators import cpu_seconds
from benchmarks.processes import on_core, pin, two_cores, worker_process
from benchmarks.training import Decoder, Sequences, fit, random_tokens
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

NUM_LAYERS = 4
NUM_LOCAL_LAYERS = 2
FEW, MANY = 4, 32
SEQUENCE_LENGTH = 16
VOCABULARY = 256
# Steps that are not counted: connections and memory come in them, and the checks of the first and
# the tenth batch.
WARM_UP = 11


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one more micro-batch.

    Args:
        plain_seconds: Plain Lightning, one more batch to accumulate.
        coordinator_seconds: The strategy's process with the Trainer.
        worker_seconds: The process with two of four layers.
    """

    plain_seconds: float
    coordinator_seconds: float
    worker_seconds: float

    @property
    def ratio(self) -> float:
        """Both processes of the strategy over plain Lightning."""
        return (self.coordinator_seconds + self.worker_seconds) / self.plain_seconds


class StepCpu(pl.Callback):
    """CPU seconds per optimizer step of several processes, by their names."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._marks: list[dict[str, float]] = []

    def on_before_zero_grad(self, *_: object) -> None:
        """Once per optimizer step, at the same moment of each."""
        self._marks.append({name: cpu_seconds(pid) for name, pid in self._pids.items()})

    @property
    def seconds(self) -> dict[str, float]:
        """Of an average step behind the warm-up."""
        first, last = self._marks[WARM_UP], self._marks[-1]
        num_steps = len(self._marks) - 1 - WARM_UP
        return {name: (last[name] - first[name]) / num_steps for name in self._pids}


def measure(rounds: int, num_steps: int) -> list[Cost]:
    """The cost of a micro-batch, round by round; each process has a core of its own."""
    first_core, second_core = two_cores()
    pin(first_core)
    costs = []
    with worker_process(on_core(second_core)) as worker:
        for _ in range(rounds):
            plain, ours = {}, {}
            for number in (FEW, MANY):
                plain[number] = _run("auto", {"here": os.getpid()}, num_steps, number)
                pids = {"here": os.getpid(), "away": worker.pid}
                ours[number] = _run(_away(worker.address, number), pids, num_steps)
            costs.append(
                Cost(
                    _more(plain, "here"),
                    _more(ours, "here"),
                    _more(ours, "away"),
                )
            )
    return costs


def _more(seconds: Mapping[int, Mapping[str, float]], process: str) -> float:
    return (seconds[MANY][process] - seconds[FEW][process]) / (MANY - FEW)


def _away(address: str, num_microbatches: int) -> HeteroPipelineStrategy:
    stages = [
        StagePlan(["coordinator"], (0, NUM_LOCAL_LAYERS)),
        StagePlan([address], (NUM_LOCAL_LAYERS, NUM_LAYERS)),
    ]
    return HeteroPipelineStrategy([address], Plan(stages, num_microbatches))


def _run(
    strategy: pl.strategies.Strategy | str,
    pids: Mapping[str, int],
    num_steps: int,
    accumulate: int = 1,
) -> dict[str, float]:
    """CPU seconds of each process per step."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    tokens = random_tokens((num_steps + 1 + WARM_UP) * MANY, SEQUENCE_LENGTH, VOCABULARY)
    data = DataLoader(Sequences(tokens), batch_size=MANY // accumulate)
    step_cpu = StepCpu(pids)
    fit(Decoder(config), data, strategy, accumulate, [step_cpu])
    return step_cpu.seconds


def report(costs: list[Cost], console: Console) -> None:
    """Print the table."""
    table = Table(title=f"CPU time of one more micro-batch, {len(costs)} rounds, hidden size 32")
    for column in ("process", "median, ms"):
        table.add_column(column, justify="right")
    for name in ("plain", "coordinator", "worker"):
        seconds = median(getattr(cost, f"{name}_seconds") for cost in costs)
        table.add_row("plain Lightning" if name == "plain" else name, f"{seconds * 1e3:.2f}")
    console.print(table)
    ratios = ", ".join(f"{cost.ratio:.2f}" for cost in costs)
    console.print(
        f"both processes over plain Lightning: {median(cost.ratio for cost in costs):.2f} "
        f"(rounds {ratios}); the bound is 1.0"
    )
