"""What the strategy itself costs.

First, the strategy with every layer on the coordinator against plain Lightning, interleaved. Then
what StageMonitor adds to a step over one worker. Then, with layers on a worker, the CPU time that
each of the two processes spends outside torch's operators: all of it, less that of the operators,
less what counting these took. Plain Lightning is measured so too, since Python and autograd take
their time there as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

import lightning.pytorch as pl
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.overhead import microbatch, parts
from benchmarks.overhead.monitored import measure, report_turns
from benchmarks.overhead.operators import OperatorClock, cpu_seconds, read_counted
from benchmarks.processes import (
    be_quiet,
    environment,
    machine,
    on_core,
    pin,
    two_cores,
    wide_console,
    worker_process,
)
from benchmarks.training import Decoder, Sequences, fit, llama, random_tokens
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

NUM_LAYERS = 8
NUM_LOCAL_LAYERS = 3
BATCH_SIZE = 16
NUM_MICROBATCHES = 8
VOCABULARY = 2048
PROCESSES = ("plain Lightning", "coordinator", "worker")


@dataclass(frozen=True)
class Shape:
    """How large the model and its sequences are."""

    hidden_size: int
    sequence_length: int

    @property
    def config(self) -> LlamaConfig:
        return llama(self.hidden_size, NUM_LAYERS, VOCABULARY)


def train(
    shape: Shape,
    num_steps: int,
    strategy: pl.strategies.Strategy | str = "auto",
    accumulate: int = 1,
    callback: pl.Callback | None = None,
) -> Decoder:
    """Train a model of this shape on random tokens."""
    module = Decoder(shape.config)
    tokens = random_tokens(num_steps * BATCH_SIZE, shape.sequence_length, VOCABULARY)
    data = DataLoader(Sequences(tokens), batch_size=BATCH_SIZE // accumulate)
    fit(module, data, strategy, accumulate, [callback] if callback else None)
    return module


def alone() -> HeteroPipelineStrategy:
    """The strategy with every layer on the coordinator."""
    plan = Plan([StagePlan(["coordinator"], (0, NUM_LAYERS))], micro_batches=1)
    return HeteroPipelineStrategy([], plan)


@dataclass(frozen=True)
class Ratio:
    """The strategy's step over that of plain Lightning."""

    seconds: float
    cpu_seconds: float


def compare_alone(shape: Shape, rounds: int, num_steps: int) -> list[Ratio]:
    """The ratios of medians over a run's steps, round by round; who begins alternates.

    Raises:
        RuntimeError: If the two do not train the same.
    """
    ratios = []
    for number in range(rounds):
        runs: dict[str, Decoder] = {}
        for name in ("plain", "ours") if number % 2 else ("ours", "plain"):
            runs[name] = train(shape, num_steps, "auto" if name == "plain" else alone())
        plain, ours = runs["plain"], runs["ours"]
        if plain.losses != ours.losses:
            raise RuntimeError(f"The losses differ: {plain.losses} and {ours.losses}.")
        seconds = median(ours.step_seconds) / median(plain.step_seconds)
        cpu_seconds = median(ours.step_cpu_seconds) / median(plain.step_cpu_seconds)
        ratios.append(Ratio(seconds, cpu_seconds))
    return ratios


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds of a process, without what counting its operators takes."""

    whole_seconds: float
    operator_seconds: float

    def since(self, start: CpuTime, num_steps: int) -> CpuTime:
        """Per step of these."""
        return CpuTime(
            (self.whole_seconds - start.whole_seconds) / num_steps,
            (self.operator_seconds - start.operator_seconds) / num_steps,
        )


def read_cpu_time(pid: int, file: Path) -> CpuTime:
    """What a process has taken so far, which counts its operators in a file."""
    counted = read_counted(file)
    return CpuTime(cpu_seconds(pid) - counted.counting_seconds, counted.operator_seconds)


class Window(pl.Callback):
    """What processes take from the end of the first step on, per step."""

    def __init__(self, files: dict[str, tuple[int, Path]], num_steps: int) -> None:
        self._files = files
        self._num_steps = num_steps
        self._start: dict[str, CpuTime] = {}
        self.taken: dict[str, CpuTime] = {}

    def on_before_zero_grad(self, trainer: pl.Trainer, *_: object) -> None:
        """Once per optimizer step; in each the same moment."""
        now = {name: read_cpu_time(pid, file) for name, (pid, file) in self._files.items()}
        if trainer.global_step == 1:
            self._start = now
        elif trainer.global_step == self._num_steps - 1:
            steps = self._num_steps - 2
            self.taken = {name: time.since(self._start[name], steps) for name, time in now.items()}


def read_cpu_times(name: str, shape: Shape, num_steps: int) -> dict[str, CpuTime]:
    """Per step, of the processes of one run."""
    first_core, second_core = two_cores()
    pin(first_core)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        here, there = Path(folder, "here"), Path(folder, "there")
        OperatorClock(here).start()
        if name == "plain Lightning":
            window = Window({name: (os.getpid(), here)}, num_steps)
            train(shape, num_steps, accumulate=NUM_MICROBATCHES, callback=window)
            return window.taken
        program = [sys.executable, "-m", "benchmarks.overhead.counted_worker", str(there)]
        worker = stack.enter_context(worker_process(on_core(second_core), program=program))
        window = Window(
            {"coordinator": (os.getpid(), here), "worker": (worker.pid, there)}, num_steps
        )
        stages = [
            StagePlan([worker.address], (0, NUM_LAYERS - NUM_LOCAL_LAYERS), embedding=True),
            StagePlan(["coordinator"], (NUM_LAYERS - NUM_LOCAL_LAYERS, NUM_LAYERS)),
        ]
        strategy = HeteroPipelineStrategy([worker.address], Plan(stages, NUM_MICROBATCHES))
        train(shape, num_steps, strategy, callback=window)
        return window.taken


def in_new_process(name: str, shape: Shape, num_steps: int) -> dict[str, CpuTime]:
    """The same in a process of its own, since counting cannot be ended."""
    told = json.dumps([name, shape.hidden_size, shape.sequence_length, num_steps])
    command = [sys.executable, __file__, "--run", told]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment())
    taken: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return {process: CpuTime(*seconds) for process, seconds in taken.items()}


def outside_operators(shape: Shape, rounds: int, num_steps: int) -> dict[str, list[CpuTime]]:
    """Each process's CPU time per step, round by round."""
    found: dict[str, list[CpuTime]] = {name: [] for name in PROCESSES}
    for _ in range(rounds):
        for name in ("plain Lightning", "pipeline"):
            for process, taken in in_new_process(name, shape, num_steps).items():
                found[process].append(taken)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of the comparison, all layers here")
    parser.add_argument("--steps", type=int, default=6, help="per run; the first is not timed")
    parser.add_argument("--hidden-size", type=int, default=256, help="of the comparison")
    parser.add_argument("--sequence-length", type=int, default=128, help="of the comparison")
    parser.add_argument("--cpu-rounds", type=int, default=2, help="of CPU time at hidden 512")
    parser.add_argument("--cpu-steps", type=int, default=5, help="per run; first and last not read")
    parser.add_argument("--cpu-sequence-length", type=int, default=256)
    # One run, in a process of its own.
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--monitor-rounds", type=int, default=5, help="of looking on")
    parser.add_argument("--monitor-steps", type=int, default=50, help="of each turn of a round")
    parser.add_argument("--monitor-sequence-length", type=int, default=32)
    parser.add_argument("--microbatch-rounds", type=int, default=5, help="of one more micro-batch")
    parser.add_argument("--microbatch-steps", type=int, default=20, help="of each of its runs")
    only = parser.add_mutually_exclusive_group()
    for name, section in SECTIONS.items():
        chosen = {"dest": "only", "action": "store_const", "const": name}
        only.add_argument(f"--only-{name}", **chosen, help=f"only: {section.__doc__}")
    options = parser.parse_args()
    be_quiet()
    if options.run:
        name, hidden_size, length, num_steps = json.loads(options.run)
        taken = read_cpu_times(name, Shape(hidden_size, length), num_steps)
        print(json.dumps({process: astuple(time) for process, time in taken.items()}))
        return
    if options.steps < 2 or options.cpu_steps < 3:
        parser.error("--steps must be 2 or more, and --cpu-steps 3 or more")
    console, cores = wide_console(), os.sched_getaffinity(0)
    for section in [SECTIONS[options.only]] if options.only else SECTIONS.values():
        section(options, console)
        # The next section chooses its cores itself.
        os.sched_setaffinity(0, cores)
    console.print(machine())


def show_alone(options: argparse.Namespace, console: Console) -> None:
    """Every layer on the coordinator against plain Lightning."""
    pin(two_cores()[0])
    shape = Shape(options.hidden_size, options.sequence_length)
    report_alone(compare_alone(shape, options.rounds, options.steps), shape, console)


def show_monitor(options: argparse.Namespace, console: Console) -> None:
    """What looking on adds to a step over one worker."""
    shape = Shape(options.hidden_size, options.monitor_sequence_length)
    rounds, num_steps = options.monitor_rounds, options.monitor_steps
    turns = measure(
        shape.config, shape.sequence_length, BATCH_SIZE, NUM_LOCAL_LAYERS, rounds, num_steps
    )
    report_turns(turns, num_steps, console)


def show_outside(options: argparse.Namespace, console: Console) -> None:
    """CPU time outside operators, with layers on a worker."""
    shape = Shape(512, options.cpu_sequence_length)
    found = outside_operators(shape, options.cpu_rounds, options.cpu_steps)
    report_outside(found, shape, console)


def show_microbatch(options: argparse.Namespace, console: Console) -> None:
    """CPU time of one more micro-batch, where only software counts."""
    costs = microbatch.measure(options.microbatch_rounds, options.microbatch_steps)
    microbatch.report(costs, console)


def show_parts(options: argparse.Namespace, console: Console) -> None:
    """Microseconds of single actions, such as seeding."""
    pin(two_cores()[0])
    parts.report(parts.measure(options.rounds), console)


SECTIONS: dict[str, Callable[[argparse.Namespace, Console], None]] = {
    "alone": show_alone,
    "monitor": show_monitor,
    "outside": show_outside,
    "microbatch": show_microbatch,
    "parts": show_parts,
}


def report_alone(ratios: list[Ratio], shape: Shape, console: Console) -> None:
    """Print how much longer a step takes."""
    found = {
        "by the clock": [ratio.seconds for ratio in ratios],
        "in CPU time": [ratio.cpu_seconds for ratio in ratios],
    }
    for what, values in found.items():
        listed = ", ".join(f"{value - 1:+.1%}" for value in values)
        console.print(
            f"every layer on the coordinator, hidden {shape.hidden_size}, sequence "
            f"{shape.sequence_length}: a step takes {median(values) - 1:+.1%} against plain "
            f"Lightning {what} (rounds {listed})"
        )


def report_outside(found: dict[str, list[CpuTime]], shape: Shape, console: Console) -> None:
    """Print the shares of CPU time outside operators."""
    table = Table(
        title=f"CPU time per step, hidden {shape.hidden_size}, sequence {shape.sequence_length}"
    )
    for column in ("process", "all, ms", "operators, ms", "outside operators"):
        table.add_column(column, justify="right")
    for name, rounds in found.items():
        table.add_row(
            name,
            f"{median(taken.whole_seconds for taken in rounds) * 1e3:.0f}",
            f"{median(taken.operator_seconds for taken in rounds) * 1e3:.0f}",
            f"{median(1 - taken.operator_seconds / taken.whole_seconds for taken in rounds):.1%}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
