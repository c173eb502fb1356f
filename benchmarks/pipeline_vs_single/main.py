"""Coordinator and one worker, one core each, against the same training on one core.

Runs are interleaved: every round times one core, then each number of micro-batches. The medians of
the rounds' ratios are printed, and how much of the bound is reached: the bound is the sum of the
two cores' own measured speeds on the same training.
"""

from __future__ import annotations

import argparse
import statistics

import lightning.pytorch as pl
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.processes import be_quiet, machine, on_core, pin, two_cores, worker_process
from benchmarks.training import Decoder, Sequences, fit, random_tokens
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


def train(strategy: pl.strategies.Strategy | str, num_steps: int) -> float:
    """Train for some steps without anything else; tokens per second over the median step."""
    module = Decoder(CONFIG)
    tokens = random_tokens(num_steps * BATCH_SIZE, SEQUENCE_LENGTH, CONFIG.vocab_size)
    fit(module, DataLoader(Sequences(tokens), batch_size=BATCH_SIZE), strategy)
    return TOKENS_PER_STEP / statistics.median(module.step_seconds)


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

    be_quiet()
    first_core, second_core = two_cores()
    speeds: dict[str, list[float]] = {"core A": [], "core B": []}
    speeds |= {f"{count} micro-batches": [] for count in options.micro_batches}
    with worker_process(on_core(second_core)) as worker:
        for round_number in range(options.rounds):
            for name, core in (("core A", first_core), ("core B", second_core)):
                pin(core)
                speeds[name].append(train("auto", options.steps))
            pin(first_core)
            for count in options.micro_batches:
                plan = plan_for(worker.address, options.split, count, options.in_flight)
                strategy = HeteroPipelineStrategy(workers=[worker.address], plan=plan)
                speeds[f"{count} micro-batches"].append(train(strategy, options.steps))
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
    console.print(machine())


if __name__ == "__main__":
    main()
