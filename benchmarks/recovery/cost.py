"""What recovery costs in a run in which nothing breaks: CPU time of all processes, and bytes.

Three kinds of runs take turns over the same two workers: without recovery, with what is kept of the
messages, and with snapshots too. CPU time counts, since others on the machine change it less.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.overhead.operators import cpu_seconds
from benchmarks.processes import WorkerProcess, on_core, pin, two_cores, worker_process
from benchmarks.training import Decoder, Sequences, fit, llama, random_tokens
from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, StagePlan
from lightning_hetero.pipeline.boundary import Activation
from lightning_hetero.pipeline.codec import encode_activation
from lightning_hetero.pipeline.journal import FrameStore, Journal
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.protocol.frames import Frame, encode_frame

NUM_LAYERS = 6
BATCH_SIZE = 16
NUM_MICROBATCHES = 8
VOCABULARY = 512
# Steps that are not counted; connections, memory and the first-batch check come in them.
WARM_UP = 2
NEVER_SECONDS = 86_400.0
# Kept between two snapshots of the short loop.
_NUM_FRAMES = 160

WITHOUT, KEEPING, SNAPSHOTS = "without recovery", "what is sent is kept", "with snapshots too"
KINDS = (WITHOUT, KEEPING, SNAPSHOTS)


@dataclass(frozen=True)
class Shape:
    """What is trained, and for how long.

    Args:
        hidden_size: Of the model.
        sequence_length: In tokens.
        num_steps: Of each run, behind the warm-up.
        every_seconds: Between two snapshots.
    """

    hidden_size: int
    sequence_length: int
    num_steps: int
    every_seconds: float

    @property
    def config(self) -> LlamaConfig:
        """Of the model."""
        return llama(self.hidden_size, NUM_LAYERS, VOCABULARY)

    @property
    def boundary_bytes(self) -> int:
        """The activations of a batch at one boundary; the gradients are as many."""
        return BATCH_SIZE * self.sequence_length * self.hidden_size * 4


@dataclass(frozen=True)
class Taken:
    """What a run took.

    Args:
        cpu_seconds: Of all processes, per step.
        kept_bytes: Of the messages to the workers that the coordinator keeps, per step.
    """

    cpu_seconds: float
    kept_bytes: float


class Counting(pl.Callback):
    """Reads the CPU time of all processes, and what is kept, at the end of the steps."""

    def __init__(self, workers: list[WorkerProcess], num_steps: int) -> None:
        self._workers, self._num_steps = workers, num_steps
        self._pids: list[int] = []
        self._start = (0.0, 0)
        self.taken = Taken(0.0, 0.0)

    def on_train_start(self, *_: object) -> None:
        """The process of each session is there now."""
        self._pids = [os.getpid(), *(worker.pid for worker in self._workers)]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Begin behind the warm-up, and read at the end."""
        now = sum(map(cpu_seconds, self._pids)), _kept_bytes(trainer)
        if trainer.global_step == WARM_UP:
            self._start = now
        elif trainer.global_step == WARM_UP + self._num_steps:
            seconds, num_bytes = (end - begin for end, begin in zip(now, self._start, strict=True))
            self.taken = Taken(seconds / self._num_steps, num_bytes / self._num_steps)


def _kept_bytes(trainer: pl.Trainer) -> int:
    replacements = trainer.strategy.deployment.coordinator.replacements
    return 0 if replacements is None else replacements.kept_bytes


@dataclass(frozen=True)
class Snapshot:
    """A worker's part of a snapshot.

    Args:
        seconds: For which the worker computed nothing, since it copied its state.
        num_bytes: Of the copy.
    """

    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Args:
        rounds: What each kind of run took, round by round.
        snapshots: All that the workers took.
    """

    rounds: list[Mapping[str, Taken]]
    snapshots: list[Snapshot]


def measure(shape: Shape, num_rounds: int, console: Console) -> Measured:
    """Train in turns; the order of the kinds changes from round to round."""
    first_core, second_core = two_cores()
    pin(first_core)
    rounds: list[Mapping[str, Taken]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        files = [Path(folder, f"copies-{number}") for number in range(2)]
        workers = [
            stack.enter_context(worker_process(on_core(second_core), program=_timed(file)))
            for file in files
        ]
        for number in range(num_rounds):
            order = [*KINDS[number % 3 :], *KINDS[: number % 3]]
            rounds.append({kind: _run(shape, kind, workers, folder) for kind in order})
            said = ", ".join(f"{k}: {rounds[-1][k].cpu_seconds * 1e3:.1f} ms" for k in KINDS)
            console.print(f"round {number + 1}: {said}", style="dim")
        lines = [line.split() for file in files if file.exists() for line in file.open()]
    return Measured(rounds, [Snapshot(float(seconds), int(size)) for seconds, size in lines])


def _timed(file: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.recovery.timed_worker", str(file)]


def _run(shape: Shape, kind: str, workers: list[WorkerProcess], folder: str) -> Taken:
    addresses = [worker.address for worker in workers]
    stages = [
        StagePlan(["coordinator"], (0, 2)),
        StagePlan([addresses[0]], (2, 4)),
        StagePlan([addresses[1]], (4, NUM_LAYERS)),
    ]
    every_seconds = shape.every_seconds if kind == SNAPSHOTS else NEVER_SECONDS
    settings = Recovery(every_seconds=every_seconds, folder=folder)
    recovery = False if kind == WITHOUT else settings
    strategy = HeteroPipelineStrategy(addresses, Plan(stages, NUM_MICROBATCHES), recovery=recovery)
    num_sequences = (WARM_UP + shape.num_steps) * BATCH_SIZE
    data = DataLoader(
        Sequences(random_tokens(num_sequences, shape.sequence_length, VOCABULARY)),
        batch_size=BATCH_SIZE,
    )
    counting = Counting(workers, shape.num_steps)
    fit(Decoder(shape.config), data, strategy, callbacks=[counting])
    return counting.taken


def keeping_seconds(shape: Shape, repeats: int = 15) -> float:
    """The CPU time that keeping an activation of a micro-batch adds to sending it.

    It is the least of several, since this short loop is steady where whole runs are not.
    """
    num_values = shape.boundary_bytes // NUM_MICROBATCHES // 4
    message, tensors = encode_activation(1, Key(0), Activation(torch.zeros(num_values)))
    store = FrameStore()
    journal = Journal(store, lambda: {"forwards": 0, "backwards": 0})

    def encode() -> list[memoryview]:
        return encode_frame(Frame(message, tuple(tensors)))

    def keep() -> None:
        for _ in range(_NUM_FRAMES):
            journal.keep(message, encode, True)()

    def send() -> None:
        for _ in range(_NUM_FRAMES):
            encode()

    kept, sent = [], []
    with closing(store):
        for _ in range(repeats):
            kept.append(_thread_seconds(keep))
            # As behind a snapshot: the frames before it are dropped, and new ones take new memory.
            journal.mark()
            journal.cut()
            sent.append(_thread_seconds(send))
    return (min(kept) - min(sent)) / _NUM_FRAMES


def _thread_seconds(act: Callable[[], None]) -> float:
    start = time.thread_time()
    act()
    return time.thread_time() - start


def report(found: Measured, shape: Shape, console: Console) -> None:
    """Print what each kind takes, beside a run without recovery."""
    table = Table(
        title=f"recovery without a fault, {len(found.rounds)} rounds of {shape.num_steps} steps, "
        f"hidden {shape.hidden_size}, sequences of {shape.sequence_length}"
    )
    table.add_column("run")
    columns = "CPU time of a step", "more than without", "middle half", "least to least"
    for column in (*columns, "kept per step"):
        table.add_column(column, justify="right")
    least = {kind: min(each[kind].cpu_seconds for each in found.rounds) for kind in KINDS}
    for kind in KINDS:
        taken = [each[kind] for each in found.rounds]
        ratios = [each[kind].cpu_seconds / each[WITHOUT].cpu_seconds - 1 for each in found.rounds]
        quarter, middle, rest = _quarters(ratios)
        kept = median(each.kept_bytes for each in taken) if kind == KEEPING else 0
        table.add_row(
            kind,
            f"{median(each.cpu_seconds for each in taken) * 1e3:.1f} ms",
            "" if kind == WITHOUT else f"{middle:+.2%}",
            "" if kind == WITHOUT else f"{quarter:+.2%} to {rest:+.2%}",
            "" if kind == WITHOUT else f"{least[kind] / least[WITHOUT] - 1:+.2%}",
            f"{kept / 2**20:.2f} MiB" if kept else "",
        )
    console.print(table)
    between, entering = 2 * shape.boundary_bytes, 2 * shape.boundary_bytes
    console.print(
        f"stated by the shape: {entering / 2**20:.2f} MiB per step on the coordinator (activations "
        "to the first worker, gradients to the last one, and some arguments), "
        f"{between / 2**20:.2f} MiB on the workers together"
    )
    # The coordinator keeps activations to the first worker and gradients to the last one; the
    # workers keep activations and gradients between them.
    num_frames, seconds = 4 * NUM_MICROBATCHES, keeping_seconds(shape)
    step_seconds = min(each[WITHOUT].cpu_seconds for each in found.rounds)
    console.print(
        f"keeping a frame of {shape.boundary_bytes / NUM_MICROBATCHES / 1024:.0f} KiB adds "
        f"{seconds * 1e6:.0f} us of CPU time, so the {num_frames} frames with tensors of a step "
        f"that are kept add {num_frames * seconds / step_seconds:.2%} to it"
    )
    if found.snapshots:
        held_up = median(each.seconds for each in found.snapshots)
        size = median(each.num_bytes for each in found.snapshots)
        console.print(
            f"{len(found.snapshots)} snapshots of a worker, each of {size / 2**20:.2f} MiB, held "
            f"it up for {held_up * 1e3:.2f} ms (median), the longest for "
            f"{max(each.seconds for each in found.snapshots) * 1e3:.2f} ms"
        )


def _quarters(ratios: list[float]) -> tuple[float, float, float]:
    if len(ratios) == 1:
        return (ratios[0],) * 3
    quarter, middle, rest = quantiles(ratios, n=4, method="inclusive")
    return quarter, middle, rest
