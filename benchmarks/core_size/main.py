"""How much code one must know: counts that are the same on every machine.

A Llama of six layers is trained over two workers, two layers for each process, in three
micro-batches, once for a few steps and once for more. The difference is that of steady steps. All
threads of all processes are traced.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from benchmarks.core_size import sources
from benchmarks.core_size.traced import PACKAGE, LineCounter
from benchmarks.processes import be_quiet, wide_console, worker_process
from benchmarks.training import Decoder, Sequences, fit, llama, random_tokens
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

NUM_WORKERS = 2
NUM_LAYERS = 6
NUM_MICROBATCHES = 3
# After the first step and before the tenth, whose batch is checked again.
FEW_STEPS, MANY_STEPS = 3, 8

Counts = Mapping[str, tuple[int, int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=0, help="print so many files of each process")
    options = parser.parse_args()

    be_quiet()
    with tempfile.TemporaryDirectory() as name:
        few = traced_run(Path(name), FEW_STEPS)
        many = traced_run(Path(name), MANY_STEPS)
    steady = {process: difference(few[process], many[process]) for process in few}
    console = wide_console()
    report(steady, console)
    if options.files:
        report_files(steady, options.files, console)


def traced_run(folder: Path, num_steps: int) -> dict[str, Counts]:
    """The counts of the coordinator and of the workers' sessions, added up."""
    program = [sys.executable, str(Path(__file__).with_name("traced.py")), str(folder)]
    counter = LineCounter()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker_process([], program=program)) for _ in range(NUM_WORKERS)
        ]
        sessions = [worker.pid for worker in workers]
        names = ["coordinator", *(worker.address for worker in workers)]
        stages = [StagePlan([name], (2 * i, 2 * i + 2)) for i, name in enumerate(names)]
        strategy = HeteroPipelineStrategy(names[1:], Plan(stages, NUM_MICROBATCHES))
        tokens = random_tokens(num_steps * NUM_MICROBATCHES, 16, 256)
        data = DataLoader(Sequences(tokens), batch_size=NUM_MICROBATCHES)
        module = Decoder(llama(64, NUM_LAYERS, 256))
        counter.start()
        fit(module, data, strategy)
        counter.stop()
    away: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for pid in sessions:
        for function, (calls, each) in json.loads((folder / f"{pid}.json").read_text()).items():
            away[function] += calls
            lines[function] += each
    return {
        "coordinator": counter.counts(),
        "workers": {function: (away[function], lines[function]) for function in away},
    }


def difference(few: Counts, many: Counts) -> Counts:
    """The calls and lines of one steady step, of functions that every step calls."""
    num_steps = MANY_STEPS - FEW_STEPS
    found = {}
    for function, (calls, lines) in many.items():
        calls_before, lines_before = few.get(function, (0, 0))
        if calls - calls_before >= num_steps:
            found[function] = (calls - calls_before, (lines - lines_before) // num_steps)
    return found


def lines_by_file(counts: Counts) -> Counter[str]:
    """The interpreted lines of one micro-batch."""
    found: Counter[str] = Counter()
    for function, (_, lines) in counts.items():
        found[function.rpartition(":")[0]] += lines
    return Counter({file: lines // NUM_MICROBATCHES for file, lines in found.items()})


def report(steady: Mapping[str, Counts], console: Console) -> None:
    functions = {function for counts in steady.values() for function in counts}
    first_lines: dict[str, set[int]] = {}
    for function in functions:
        file, _, line = function.rpartition(":")
        first_lines.setdefault(file, set()).add(int(line))
    code = sum(
        len(sources.lines_of_functions(PACKAGE / file, lines))
        for file, lines in first_lines.items()
    )
    entry = "lightning_hetero.strategy.strategy"
    slots = sources.slots()
    rows = {
        "interpreted lines per micro-batch, coordinator": lines_by_file(
            steady["coordinator"]
        ).total(),
        "interpreted lines per micro-batch, two workers": lines_by_file(steady["workers"]).total(),
        "code lines in the functions that a steady step runs": code,
        "files that a steady step runs": len(first_lines),
        f"modules that `import {entry}` loads": sources.loaded_modules(entry),
        "modules of the package": len(sources.package_files()),
        "code lines of the package": sources.package_code_lines(),
        "imports of wings by the core": sources.exceptions_of_the_contract(),
        "callables filled in from outside": len(slots),
    }
    table = Table(title=f"{NUM_LAYERS} layers, two workers, {NUM_MICROBATCHES} micro-batches")
    table.add_column("count")
    table.add_column("", justify="right")
    for name, value in rows.items():
        table.add_row(name, f"{value:,}")
    console.print(table)


def report_files(steady: Mapping[str, Counts], num_files: int, console: Console) -> None:
    for process, counts in steady.items():
        table = Table(title=f"interpreted lines per micro-batch, {process}")
        table.add_column("file")
        table.add_column("lines", justify="right")
        for file, lines in lines_by_file(counts).most_common(num_files):
            table.add_row(file, f"{lines:,}")
        console.print(table)
    for slot in sources.slots():
        console.print(f"slot: {slot}")


if __name__ == "__main__":
    main()
