"""A worker that reads its frozen weights layer by layer: its memory and its step, beside the disk.

LoRA on a frozen Llama in fp32, all layers on one worker, with the weights in memory and with
`weights: disk`. The last run has the worker in a memory control group that is smaller than its
weights, so that each pass reads them from the disk again; it needs root and version 1 of the
groups. The same group without `weights` ends the worker, or lets it swap.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from peft import LoraConfig, get_peft_model
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.processes import (
    WorkerProcess,
    be_quiet,
    machine,
    memory_bytes,
    wide_console,
    worker_process,
)
from benchmarks.training import Sequences, adamw, build, llama, random_tokens
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.plan import Weights
from lightning_hetero.worker.streamed_weights import measured_reading

MIB = 2**20
GROUP = Path("/sys/fs/cgroup/memory")
VOCABULARY = 1000
NUM_STEPS = 4
BATCH_SIZE, NUM_MICROBATCHES = 8, 2


class Adapted(pl.LightningModule):
    """Adapters on frozen layers."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        lora = LoraConfig(r=8, target_modules="all-linear")
        self.model = get_peft_model(build(llama(hidden_size, num_layers, VOCABULARY)), lora)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw([p for p in self.parameters() if p.requires_grad])

    @property
    def frozen_bytes(self) -> int:
        """The frozen weights of the layers."""
        named = self.named_parameters()
        return sum(p.nbytes for name, p in named if ".layers." in name and not p.requires_grad)


@dataclass
class Watch(pl.Callback):
    """The seconds of each step, the bytes that the worker has read from disks in it, and the most
    memory of the worker's session."""

    worker: WorkerProcess
    seconds: list[float] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    most_bytes: dict[str, int] = field(default_factory=dict)

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter(), self._read

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start[0])
        self.read_bytes.append(self._read - self._start[1])

    @property
    def _read(self) -> int:
        read: int = psutil.Process(self.worker.pid).io_counters().read_bytes
        return read

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Inside, a thread looks at the memory a hundred times a second."""
        ended = threading.Event()
        thread = threading.Thread(target=self._sample, args=[ended])
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _sample(self, ended: threading.Event) -> None:
        while not ended.wait(0.01):
            with suppress(OSError, ValueError, psutil.Error):
                for entry in ("RssAnon", "RssFile"):
                    found = memory_bytes(self.worker.pid, entry)
                    self.most_bytes[entry] = max(found, self.most_bytes.get(entry, 0))


@contextmanager
def limited(worker: WorkerProcess, most_bytes: int | None) -> Iterator[None]:
    """Inside, the worker and its sessions to come have at most so much memory, files included."""
    if most_bytes is None:
        yield
        return
    group = GROUP / f"streamed-weights-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(most_bytes))
        for process in [psutil.Process(worker.worker_pid), *_children(worker)]:
            (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        while group.exists():  # a worker forks its next session meanwhile
            for line in (group / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    (GROUP / "cgroup.procs").write_text(line)
            with suppress(OSError):
                group.rmdir()


def _children(worker: WorkerProcess) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(worker.worker_pid).children(recursive=True)
    return found


def train(
    options: argparse.Namespace, weights: Weights | None, most_bytes: int | None
) -> tuple[Watch, float]:
    """A run on a worker of its own, and its loss."""
    with worker_process([]) as worker, limited(worker, most_bytes):
        stage = StagePlan([worker.address], (0, options.layers), "layers", weights=weights)
        strategy = HeteroPipelineStrategy([worker.address], Plan([stage], NUM_MICROBATCHES))
        watch = Watch(worker)
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            callbacks=[watch],
            max_steps=NUM_STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        tokens = random_tokens(BATCH_SIZE * NUM_STEPS, options.tokens, VOCABULARY)
        with watch.sampling():
            data = DataLoader(Sequences(tokens), batch_size=BATCH_SIZE)
            trainer.fit(Adapted(options.hidden, options.layers), data)
        return watch, float(trainer.callback_metrics.get("loss", torch.nan))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--runs", type=int, nargs="*", default=[0, 1, 2], help="which of the runs")
    parser.add_argument("--tokens", type=int, default=64, help="the length of a sequence")
    options = parser.parse_args()
    be_quiet()
    # As `benchmarks/memory` says, the heap of a processor's worker grows with holes otherwise.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)
    frozen_bytes = Adapted(options.hidden, options.layers).frozen_bytes
    # Python and torch take a part of it before the first layer is there.
    group_bytes = 256 * MIB + frozen_bytes // 2
    runs: list[tuple[str, Weights | None, int | None]] = [
        ("in memory", None, None),
        ("disk", "disk", None),
    ]
    if os.access(GROUP, os.W_OK) and (GROUP / "memory.limit_in_bytes").exists():
        runs.append((f"disk, a group of {group_bytes / MIB:.0f} MiB", "disk", group_bytes))
    reading = measured_reading(torch.device("cpu"))["disk"].bytes_per_second
    table = Table(
        title=f"{frozen_bytes / MIB:.0f} MiB of frozen weights in {options.layers} layers, "
        f"the disk reads {reading / MIB:.0f} MiB/s"
    )
    columns = ("weights", "own memory, MiB", "pages of files, MiB", "step, s", "read in it, MiB")
    for column in (*columns, "reading alone, s"):
        table.add_column(column, justify="right")
    for title, weights, most_bytes in [runs[n] for n in options.runs if n < len(runs)]:
        watch, _ = train(options, weights, most_bytes)
        last = min(range(1, NUM_STEPS), key=lambda step: watch.seconds[step])
        table.add_row(
            title,
            *(f"{watch.most_bytes[entry] / MIB:.0f}" for entry in ("RssAnon", "RssFile")),
            f"{watch.seconds[last]:.2f}",
            f"{watch.read_bytes[last] / MIB:.0f}",
            f"{watch.read_bytes[last] / reading:.2f}",
        )
    console = wide_console()
    console.print(table)
    console.print(machine())


if __name__ == "__main__":
    main()
