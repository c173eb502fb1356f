"""What it costs to look: a run with one worker, with StageMonitor, with PipelineTimeline, without.

They take turns within one run, so that nothing else differs; who begins alternates.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.overhead.operators import cpu_seconds
from benchmarks.processes import on_core, pin, two_cores, worker_process
from benchmarks.training import Decoder, Sequences, random_tokens
from lightning_hetero import HeteroPipelineStrategy, PipelineTimeline, Plan, StageMonitor, StagePlan

WITHOUT = "without"
MONITOR = "StageMonitor"
TIMELINE = "PipelineTimeline that records nothing"
NAMES = (WITHOUT, MONITOR, TIMELINE)
# Steps that nobody looks at; memory is taken in them.
WARM_UP = 5


@dataclass(frozen=True)
class Turn:
    """What so many steps took, of the clock and of both processes."""

    seconds: float
    cpu_seconds: float


class TakingTurns(pl.Callback):
    """Has nobody look for so many steps, then the one, then the other, and so on.

    Args:
        num_steps: Of each turn, in which the one who looks does so from beginning to end.
        worker_pid: The other process.
    """

    def __init__(self, num_steps: int, worker_pid: int) -> None:
        self._num_steps = num_steps
        self._pids = os.getpid(), worker_pid
        self._callbacks: dict[str, pl.Callback] = {
            WITHOUT: pl.Callback(),
            MONITOR: StageMonitor(),
            TIMELINE: PipelineTimeline(steps=()),
        }
        self._order: list[str] = []
        self._present = WITHOUT
        self._start = Turn(0.0, 0.0)
        self.turns: dict[str, list[Turn]] = {name: [] for name in NAMES}

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        """A turn begins, or the present one goes on."""
        if self._is_at_boundary(trainer):
            if not self._order:
                self._order = [*NAMES] if len(self.turns[WITHOUT]) % 2 else [*reversed(NAMES)]
            self._present = self._order.pop()
            self._start = self._now()
            self._callback.on_train_start(trainer, module)
        self._callback.on_train_batch_start(trainer, module, *args)

    def on_before_optimizer_step(self, *args: Any) -> None:
        self._callback.on_before_optimizer_step(*args)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        """The present turn goes on, or ends."""
        self._callback.on_train_batch_end(trainer, module, *args)
        if self._is_at_boundary(trainer) and trainer.global_step > WARM_UP:
            self._callback.on_train_end(trainer, module)
            now, start = self._now(), self._start
            turn = Turn(now.seconds - start.seconds, now.cpu_seconds - start.cpu_seconds)
            self.turns[self._present].append(turn)

    @property
    def _callback(self) -> pl.Callback:
        return self._callbacks[self._present]

    def _is_at_boundary(self, trainer: pl.Trainer) -> bool:
        step = trainer.global_step - WARM_UP
        return step >= 0 and step % self._num_steps == 0

    def _now(self) -> Turn:
        return Turn(time.perf_counter(), sum(map(cpu_seconds, self._pids)))


def measure(
    config: LlamaConfig,
    length: int,
    batch_size: int,
    num_local_layers: int,
    rounds: int,
    steps: int,
) -> Mapping[str, list[Turn]]:
    """The turns of each, round by round; one core for each process."""
    first_core, second_core = two_cores()
    pin(first_core)
    num_steps = WARM_UP + rounds * len(NAMES) * steps
    data = Sequences(random_tokens(num_steps * batch_size, length, config.vocab_size))
    with tempfile.TemporaryDirectory() as folder, worker_process(on_core(second_core)) as worker:
        stages = [
            StagePlan(["coordinator"], (0, num_local_layers)),
            StagePlan([worker.address], (num_local_layers, config.num_hidden_layers)),
        ]
        turns = TakingTurns(steps, worker.pid)
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy=HeteroPipelineStrategy([worker.address], Plan(stages, micro_batches=8)),
            max_epochs=1,
            callbacks=[turns],
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Decoder(config), DataLoader(data, batch_size=batch_size))
        return turns.turns


def report_turns(turns: Mapping[str, list[Turn]], steps: int, console: Console) -> None:
    """Print what looking adds to a step."""
    bare = turns[WITHOUT]
    mean = median(turn.seconds for turn in bare) / steps
    cpu = median(turn.cpu_seconds for turn in bare) / steps
    table = Table(
        title=f"looking on, over {len(bare)} rounds of {steps} steps each; without it a step takes "
        f"{mean * 1e3:.0f} ms and {cpu * 1e3:.0f} ms of CPU time"
    )
    table.add_column("what")
    for column in ("seconds", "middle half", "CPU time of both", "middle half"):
        table.add_column(column, justify="right")
    for name in NAMES[1:]:
        pairs = list(zip(turns[name], bare, strict=True))
        seconds = [one.seconds / other.seconds - 1 for one, other in pairs]
        cpu_time = [one.cpu_seconds / other.cpu_seconds - 1 for one, other in pairs]
        table.add_row(name, *_shown(seconds), *_shown(cpu_time))
    console.print(table)


def _shown(ratios: list[float]) -> tuple[str, str]:
    middle = f"{ratios[0]:+.2%}"
    if len(ratios) > 1:
        low, _, high = quantiles(ratios, n=4, method="inclusive")
        middle = f"{low:+.2%} to {high:+.2%}"
    return f"{median(ratios):+.2%}", middle
