"""Coordinator and one worker, one core each, against the same training on one core.

Runs are interleaved: every round times one core, then each number of micro-batches. The medians of
the rounds' ratios are printed, and how much of the bound is reached: the bound is the sum of the
two cores' own measured speeds on the same training. With `--halves` every round times two plans of
halves of layers instead, on a smaller model.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.processes import be_quiet, machine, on_core, pin, two_cores, worker_process
from benchmarks.training import Decoder, Sequences, fit, random_tokens
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.transport.token import FILE_VARIABLE, Token, write_token_file

CONFIG = LlamaConfig(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    vocab_size=10_000,
    use_cache=False,
)
SMALL_CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=4,
    # The head is to a layer as it is in the larger model.
    vocab_size=5_000,
    use_cache=False,
)
CORE_A, CORE_B = "core A", "core B"
TLS = ", TLS"
LINE, ENDS = ", halves in a line", ", halves at both ends"
SEQUENCE_LENGTH = 256
BATCH_SIZE = 16
TOKENS_PER_STEP = SEQUENCE_LENGTH * BATCH_SIZE


def train(
    strategy: pl.strategies.Strategy | str, num_steps: int, config: LlamaConfig = CONFIG
) -> float:
    """Train for some steps without anything else; tokens per second over the median step."""
    module = Decoder(config)
    tokens = random_tokens(num_steps * BATCH_SIZE, SEQUENCE_LENGTH, config.vocab_size)
    fit(module, DataLoader(Sequences(tokens), batch_size=BATCH_SIZE), strategy)
    return TOKENS_PER_STEP / statistics.median(module.step_seconds)


def plan_for(worker: str, split: int, micro_batches: int, in_flight: int | None) -> Plan:
    """The last ``split`` layers here, the others and the embedding on the worker."""
    end = CONFIG.num_hidden_layers - split
    stages = [
        StagePlan([worker], (0, end), embedding=True),
        StagePlan(["coordinator"], (end, CONFIG.num_hidden_layers)),
    ]
    return Plan(stages, micro_batches, in_flight)


def plan_of_halves(
    worker: str, first: int, held: int, micro_batches: int, in_flight: int | None
) -> Plan:
    """Layers cut in two: so many halves on the worker behind the coordinator's first ones; without
    any first ones the worker has the embedding too."""
    ends = [first, first + held, 2 * CONFIG.num_hidden_layers]
    stages = [
        StagePlan([worker], (first, ends[1]), embedding=first == 0),
        StagePlan(["coordinator"], (ends[1], ends[2])),
    ]
    if first:
        stages.insert(0, StagePlan(["coordinator"], (0, first)))
    return Plan(stages, micro_batches, in_flight)


def main() -> None:
    options = parse(sys.argv[1:])
    be_quiet()
    # The token in the user's home would put all runs under TLS.
    os.environ[FILE_VARIABLE] = ""
    first_core, second_core = two_cores()
    speeds: dict[str, list[float]] = {}
    with ExitStack() as stack:
        if options.halves:
            pin(first_core)
            contest_of_halves(halves(stack, second_core, options), options)
            return
        runs = pipelines(stack, second_core, options)
        for round_number in range(options.rounds):
            for name, core in ((CORE_A, first_core), (CORE_B, second_core)):
                pin(core)
                speeds.setdefault(name, []).append(train("auto", options.steps))
            pin(first_core)
            for name, strategy in runs.items():
                speeds.setdefault(name, []).append(train(strategy(), options.steps))
            Console(stderr=True).print(f"round {round_number + 1} of {options.rounds} done")
    report(speeds)
    if options.tls:
        report_tls(speeds, options.micro_batches)


def contest_of_halves(
    runs: dict[str, Callable[[], HeteroPipelineStrategy]], options: argparse.Namespace
) -> None:
    """Time the line and both ends in turns, and print the ratio of each round as it comes."""
    speeds: dict[str, list[float]] = {}
    console, counts = Console(), options.micro_batches
    try:
        for round_number in range(options.rounds):
            for name, strategy in runs.items():
                speed = train(strategy(), options.steps, SMALL_CONFIG)
                speeds.setdefault(name, []).append(speed)
            for count in counts:
                line, ends = (speeds[run_name(count, each)][-1] for each in (LINE, ENDS))
                console.print(f"round {round_number + 1}, {count} micro-batches: {ends / line:.3f}")
    finally:
        console.print(machine())
        for count in counts if speeds else ():
            report_ends(speeds, count)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="per run; the first is not timed")
    parser.add_argument("--split", type=int, default=3, help="layers on the coordinator")
    parser.add_argument("--in-flight", type=int)
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--halves", action="store_true", help="a line and both ends of halves only")
    parser.add_argument("--held", type=int, default=9, help="halves on the worker")
    parser.add_argument("--first", type=int, default=2, help="halves in front of the worker's")
    parser.add_argument("--tls", action="store_true", help="each also under mutual TLS")
    return parser.parse_args(arguments)


def pipelines(
    stack: ExitStack, core: int, options: argparse.Namespace
) -> dict[str, Callable[[], HeteroPipelineStrategy]]:
    """Makes the strategy of each run; their workers are on this core until the stack is closed."""
    token_files: dict[str, Path | None] = {"": None}
    if options.tls:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        token_files[TLS] = Path(folder) / "token"
        write_token_file(token_files[TLS], Token.new())
    made: dict[str, Callable[[], HeteroPipelineStrategy]] = {}
    for ending, token_file in token_files.items():
        worker = stack.enter_context(worker_process(on_core(core), token_file=token_file))
        for count in options.micro_batches:
            made[run_name(count, ending)] = partial(
                HeteroPipelineStrategy,
                workers=[worker.address],
                plan=plan_for(worker.address, options.split, count, options.in_flight),
                token_file=token_file,
            )
    return made


def halves(
    stack: ExitStack, core: int, options: argparse.Namespace
) -> dict[str, Callable[[], HeteroPipelineStrategy]]:
    """As `pipelines`, for the two plans of halves of layers."""
    address = stack.enter_context(worker_process(on_core(core))).address
    made: dict[str, Callable[[], HeteroPipelineStrategy]] = {}
    firsts = ((LINE, 0), (ENDS, options.first))
    for count, (name, first) in itertools.product(options.micro_batches, firsts):
        plan = plan_of_halves(address, first, options.held, count, options.in_flight)
        made[run_name(count, name)] = partial(
            HeteroPipelineStrategy, workers=[address], plan=plan, cut_layers=True
        )
    return made


def run_name(micro_batches: int, ending: str) -> str:
    return f"{micro_batches} micro-batches{ending}"


def report(speeds: dict[str, list[float]]) -> None:
    """Print medians of ratios, and the machine."""
    single, other = speeds[CORE_A], speeds[CORE_B]
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


def report_tls(speeds: dict[str, list[float]], counts: list[int]) -> None:
    """Print what TLS leaves of the throughput."""
    for count in counts:
        left = statistics.median(ratios_of(speeds, run_name(count, TLS), run_name(count, "")))
        Console().print(f"{count} micro-batches: TLS leaves {left:.1%} of the throughput")


def report_ends(speeds: dict[str, list[float]], count: int) -> None:
    """Print what the coordinator at both ends gains over a line of the same halves."""
    gains = ratios_of(speeds, run_name(count, ENDS), run_name(count, LINE))
    Console().print(
        f"{count} micro-batches: both ends are {statistics.median(gains):.3f} × the line, "
        f"{min(gains):.3f} to {max(gains):.3f} in {len(gains)} rounds"
    )


def ratios_of(speeds: dict[str, list[float]], run: str, other: str) -> list[float]:
    """The speed of a run as a part of another's, in each round that both have run."""
    return [a / b for a, b in zip(speeds[run], speeds[other], strict=False)]


if __name__ == "__main__":
    main()
