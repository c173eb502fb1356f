"""Coordinator and one worker, one core each, against the same training on one core.

Runs are interleaved: every round times one core, then each number of micro-batches. The medians of
the rounds' ratios are printed, and how much of the bound is reached: the bound is the sum of the
two cores' own measured speeds on the same training.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

CONFIG = LlamaConfig(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    vocab_size=10_000,
    use_cache=False,
)
SEQUENCE_LENGTH = 256
BATCH_SIZE = 16
TOKENS_PER_STEP = SEQUENCE_LENGTH * BATCH_SIZE


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens; the speed does not depend on what they say."""

    def __init__(self, num_sequences: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (num_sequences, SEQUENCE_LENGTH)
        self._tokens = torch.randint(CONFIG.vocab_size, shape, generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class Decoder(pl.LightningModule):
    """The model, and the seconds that each of its steps took."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(CONFIG)
        self.marks: list[float] = []
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def on_train_batch_end(self, outputs: dict[str, torch.Tensor], *_: object) -> None:
        self.marks.append(time.perf_counter())
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    @property
    def tokens_per_second(self) -> float:
        """Over the median step, the first left out."""
        steps = [end - start for start, end in itertools.pairwise(self.marks)]
        return TOKENS_PER_STEP / statistics.median(steps)


def train(strategy: pl.strategies.Strategy | str, num_steps: int) -> Decoder:
    """Train for some steps without anything else."""
    module = Decoder()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=num_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(RandomTokens(num_steps * BATCH_SIZE), batch_size=BATCH_SIZE))
    return module


@contextmanager
def worker_on(core: int) -> Iterator[str]:
    """A worker process pinned to a core; its address."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "lightning_hetero", "worker"]
    command += ["--listen", "127.0.0.1:0", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if "listening on" in line:
                yield line.split("listening on ")[1].split(",")[0]
                break
    finally:
        process.terminate()
        process.wait()


def pin(core: int) -> None:
    """Keep this process, its threads to come included, on one core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def plan_for(worker: str, split: int, micro_batches: int, in_flight: int | None) -> Plan:
    """The first ``split`` layers here, the others on the worker."""
    stages = [
        StagePlan(["coordinator"], (0, split)),
        StagePlan([worker], (split, CONFIG.num_hidden_layers)),
    ]
    return Plan(stages, micro_batches, in_flight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="per run; the first is not timed")
    parser.add_argument("--split", type=int, default=3, help="layers on the coordinator")
    parser.add_argument("--in-flight", type=int)
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[1, 8, 16])
    options = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    first_core, second_core = sorted(os.sched_getaffinity(0))[:2]
    speeds: dict[str, list[float]] = {"core A": [], "core B": []}
    speeds |= {f"{count} micro-batches": [] for count in options.micro_batches}
    with worker_on(second_core) as worker:
        for round_number in range(options.rounds):
            for name, core in (("core A", first_core), ("core B", second_core)):
                pin(core)
                speeds[name].append(train("auto", options.steps).tokens_per_second)
            pin(first_core)
            for count in options.micro_batches:
                plan = plan_for(worker, options.split, count, options.in_flight)
                strategy = HeteroPipelineStrategy(workers=[worker], plan=plan)
                speed = train(strategy, options.steps).tokens_per_second
                speeds[f"{count} micro-batches"].append(speed)
            Console(stderr=True).print(f"round {round_number + 1} of {options.rounds} done")
    report(speeds)


def report(speeds: dict[str, list[float]]) -> None:
    """Print medians of ratios, and the machine."""
    single, other = speeds["core A"], speeds["core B"]
    table = Table(title="coordinator + 1 worker, one pinned core each")
    for column in ("run", "tokens/s", "× one core", "achieved / bound"):
        table.add_column(column, justify="right")
    for name, values in speeds.items():
        ratio = statistics.median(v / s for v, s in zip(values, single, strict=True))
        of_bound = statistics.median(
            v / (s + o) for v, s, o in zip(values, single, other, strict=True)
        )
        table.add_row(name, f"{statistics.median(values):.0f}", f"{ratio:.2f}", f"{of_bound:.0%}")
    console = Console()
    console.print(table)
    console.print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
