"""Whether what PipelineTimeline and StageMonitor tell is true, by clocks that are not theirs.

One run over one worker, each process on a core of its own. Callbacks of the benchmark read the
clock on the wall around every step, and the kernel's account of the CPU time of the threads that
compute. The trace's steps are held against the one, the time that a stage says it did something
against the other, and what the monitor logged against the trace.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.overhead.operators import SOCKET_THREADS
from benchmarks.processes import (
    be_quiet,
    machine,
    on_core,
    pin,
    two_cores,
    wide_console,
    worker_process,
)
from benchmarks.training import Decoder, Sequences, random_tokens
from lightning_hetero import HeteroPipelineStrategy, PipelineTimeline, Plan, StageMonitor, StagePlan
from lightning_hetero.coordinator.telemetry import Telemetry
from lightning_hetero.telemetry.recorded_step import RecordedStep

NUM_LAYERS = 8
NUM_LOCAL_LAYERS = 3
NUM_MICROBATCHES = 8
BATCH_SIZE = 16
MOST_OFF = 0.02


class Marks(pl.Callback):
    """The clock on the wall and CPU time around each step.

    A step ends when the worker has answered something that was asked for behind its last message:
    then its optimizer has stepped, and it does nothing.

    Args:
        worker_pid: The other process.
    """

    def __init__(self, worker_pid: int) -> None:
        self._pid = worker_pid
        self._start_seconds = 0.0
        self._cpu_before: tuple[float, dict[int, float]] = 0.0, {}
        self.wall_seconds: list[float] = []
        self.cpu_seconds: list[tuple[float, float]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._cpu_before, self._start_seconds = self._read_cpu(), time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        telemetry = Telemetry.of(trainer.strategy.deployment.coordinator)
        telemetry.records(telemetry.ask_records(with_spans=False))
        self.wall_seconds.append(time.perf_counter() - self._start_seconds)
        (here, there), (here_before, there_before) = self._read_cpu(), self._cpu_before
        # The worker's thread that computes is the one that has done most since.
        computing = max(seconds - there_before.get(n, 0.0) for n, seconds in there.items())
        self.cpu_seconds.append((here - here_before, computing))

    def _read_cpu(self) -> tuple[float, dict[int, float]]:
        """Of this process without the threads of its sockets, and of each of the worker's."""
        sockets = {t.native_id for t in threading.enumerate() if t.name.startswith(SOCKET_THREADS)}
        idle = sum(_cpu_of_thread("self", thread) for thread in sockets)
        here = time.process_time() - idle
        threads = [int(task.name) for task in Path(f"/proc/{self._pid}/task").iterdir()]
        return here, {thread: _cpu_of_thread(self._pid, thread) for thread in threads}


def _cpu_of_thread(process: int | str, thread: int | None) -> float:
    return int(Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


@dataclass(frozen=True)
class Seen:
    """What was told of the recorded steps, and what is known of them."""

    steps: Sequence[RecordedStep]
    logged: dict[str, float]
    wall_seconds: Sequence[float]
    cpu_seconds: Sequence[tuple[float, float]]


def observe(num_steps: int, length: int) -> Seen:
    """Train; the second half of the steps is recorded, and logged in one row."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        vocab_size=2048,
        use_cache=False,
    )
    data = Sequences(random_tokens(2 * num_steps * BATCH_SIZE, length, config.vocab_size))
    first_core, second_core = two_cores()
    pin(first_core)
    with tempfile.TemporaryDirectory() as folder, worker_process(on_core(second_core)) as worker:
        stages = [
            StagePlan(["coordinator"], (0, NUM_LOCAL_LAYERS)),
            StagePlan([worker.address], (NUM_LOCAL_LAYERS, NUM_LAYERS)),
        ]
        plan = Plan(stages, micro_batches=NUM_MICROBATCHES)
        marks = Marks(worker.pid)
        timeline = PipelineTimeline(range(num_steps, 2 * num_steps), max_steps=num_steps)
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy=HeteroPipelineStrategy([worker.address], plan),
            max_epochs=1,
            callbacks=[marks, timeline, StageMonitor(every_n_steps=num_steps)],
            logger=CSVLogger(folder, "", ""),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Decoder(config), DataLoader(data, batch_size=BATCH_SIZE))
        logged = _last_row(Path(folder, "metrics.csv"))
    last = slice(num_steps, None)
    return Seen(timeline.recorded, logged, marks.wall_seconds[last], marks.cpu_seconds[last])


def _last_row(path: Path) -> dict[str, float]:
    with path.open() as file:
        *_, last = csv.DictReader(file)
    return {name: float(value) for name, value in last.items() if value}


@dataclass(frozen=True)
class Comparison:
    """Two numbers that should be the same."""

    what: str
    told: float
    known: float
    source: str
    unit: str = "ms"
    is_required: bool = True

    @property
    def off(self) -> float:
        """By which share of what is known, or by how much where these are shares."""
        difference = self.told - self.known
        return difference if self.unit == "%" else difference / self.known


def comparisons(seen: Seen) -> list[Comparison]:
    """Of one step, on average or in the median."""
    count, traced = len(seen.steps), [step.seconds for step in seen.steps]
    worst = max(range(count), key=lambda n: abs(traced[n] / seen.wall_seconds[n] - 1))
    mean = sum(traced) / count
    by_trace = 1 - sum(
        process.computing_seconds for step in seen.steps for process in step.processes
    ) / sum(len(step.processes) * step.seconds for step in seen.steps)
    found = [
        _ms("a step in the trace", median(traced), median(seen.wall_seconds), "wall, median"),
        _ms("the same", traced[worst], seen.wall_seconds[worst], "wall, the worst step"),
        _ms("a step by the monitor", seen.logged["pipeline/step_seconds"], mean, "trace"),
        _percent("bubble by the monitor", seen.logged["pipeline/bubble_share"], by_trace, "trace"),
    ]
    for stage in (0, 1):
        found += _of_stage(seen, stage)
    return found


def _of_stage(seen: Seen, stage: int) -> list[Comparison]:
    count, who = len(seen.steps), "coordinator" if stage == 0 else "worker"

    def share(*names: str) -> float:
        return sum(seen.logged.get(f"stage/{stage}/{name}_share", 0.0) for name in names)

    computing = sum(step.processes[stage].computing_seconds for step in seen.steps) / count
    cpu = sum(both[stage] for both in seen.cpu_seconds) / count
    active = share("busy", "transferring", "other") * seen.logged["pipeline/step_seconds"]
    return [
        _percent(f"{who}: shares together", share("busy", "transferring", "waiting", "other"), 1),
        _ms(
            f"{who}: busy by the monitor",
            share("busy") * seen.logged["pipeline/step_seconds"],
            computing,
            "trace",
        ),
        _ms(f"{who}: not waiting", active, cpu, "CPU time", False),
    ]


def _ms(what: str, told: float, known: float, source: str, is_required: bool = True) -> Comparison:
    return Comparison(what, 1e3 * told, 1e3 * known, source, "ms", is_required)


def _percent(what: str, told: float, known: float, source: str = "") -> Comparison:
    return Comparison(what, 100 * told, 100 * known, source, "%")


def report(found: Sequence[Comparison], console: Console) -> list[Comparison]:
    """Print each; returns those that are off by too much and must not be."""
    table = Table("what", "told", "known", "from", "off")
    for each in found:
        off = f"{each.off:+.2f} points" if each.unit == "%" else f"{each.off:+.2%}"
        numbers = (f"{value:.2f} {each.unit}" for value in (each.told, each.known))
        table.add_row(each.what, *numbers, each.source, off)
    console.print(table)
    most = {"ms": MOST_OFF, "%": 100 * MOST_OFF}
    return [each for each in found if each.is_required and abs(each.off) > most[each.unit]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="recorded, after as many others")
    parser.add_argument("--sequence-length", type=int, default=64)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be 1 or more")
    be_quiet()
    console = wide_console()
    wrong = report(comparisons(observe(options.steps, options.sequence_length)), console)
    console.print(machine())
    if wrong:
        sys.exit(f"More than {MOST_OFF:.0%} off: {', '.join(each.what for each in wrong)}.")


if __name__ == "__main__":
    main()
