"""The time from the kill of a worker to the end of the step that it interrupted, part by part.

It stands beside what the parts should take, and beside a restart: the same run without recovery,
ended by the same kill, and started again as a new process from its last checkpoint. Both have to
repeat the same number of steps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.processes import WorkerProcess, environment, worker_process
from benchmarks.training import Decoder, Sequences, llama, random_tokens
from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, StagePlan
from lightning_hetero.coordinator.telemetry import Telemetry
from lightning_hetero.devices.description import equipment_here
from lightning_hetero.doctor.visit import Options, visit
from lightning_hetero.errors import WorkerLost
from lightning_hetero.protocol.fields import ACTIONS
from lightning_hetero.transport.address import Address

NUM_LAYERS = 6
BATCH_SIZE = 8
NUM_MICROBATCHES = 4
VOCABULARY = 512
NEVER_SECONDS = 86_400.0
MOST_TIMES, MORE_SECONDS = 1.3, 1.0
_WHO = "downtime"


@dataclass(frozen=True)
class Case:
    """What is trained, and when the worker is killed.

    Args:
        hidden_size: Of the model.
        sequence_length: In tokens.
        saved_step: Behind this step is the latest snapshot, or the checkpoint.
        killed_step: In this step the worker is killed.
    """

    hidden_size: int
    sequence_length: int
    saved_step: int
    killed_step: int

    @property
    def config(self) -> LlamaConfig:
        """Of the model."""
        return llama(self.hidden_size, NUM_LAYERS, VOCABULARY)


@dataclass(frozen=True)
class Downtime:
    """The parts of the time from a kill to the end of its step.

    Args:
        detecting_seconds: From the kill until the coordinator knows.
        serving_seconds: From there until another process served.
        restoring_seconds: From there until that process had the layers and the snapshot.
        repeating_seconds: From there until it had caught up.
        finishing_seconds: From there until the step was over.
        sent_bytes: What the process was sent before it repeated.
        bytes_per_second: The bandwidth of the link to the worker, measured before the run.
        own_seconds: What the stage computes in a step.
        step_seconds: A step in which nothing happens.
        num_repeated: Steps that the process repeated.
    """

    detecting_seconds: float
    serving_seconds: float
    restoring_seconds: float
    repeating_seconds: float
    finishing_seconds: float
    sent_bytes: int
    bytes_per_second: float
    own_seconds: float
    step_seconds: float
    num_repeated: int

    @property
    def down_seconds(self) -> float:
        """From the kill until the process had caught up."""
        return (
            self.detecting_seconds
            + self.serving_seconds
            + self.restoring_seconds
            + self.repeating_seconds
        )

    @property
    def expected(self) -> dict[str, float]:
        """What each part should take."""
        return {
            "detection": self.detecting_seconds,
            "process start": self.serving_seconds,
            "bytes / bandwidth": self.sent_bytes / self.bytes_per_second,
            "replay": self.num_repeated * self.own_seconds,
        }

    @property
    def most_seconds(self) -> float:
        """The bound."""
        return MOST_TIMES * sum(self.expected.values()) + MORE_SECONDS


class Killing(pl.Callback):
    """Kills a worker's process, and notes the moments of all steps.

    Args:
        victim: The worker.
        case: Tells in which step.
        settings: Its `every_seconds` is set so that the snapshot is taken behind the right step.
    """

    def __init__(self, victim: WorkerProcess, case: Case, settings: Recovery | None) -> None:
        self._victim, self._case, self._settings = victim, case, settings
        self._starts: list[float] = []
        self.step_seconds: list[float] = []
        self.killed_at = self.over_at = self.own_seconds = 0.0

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Have the worker add up the seconds of its actions."""
        _telemetry(trainer).start_recording(_WHO, keeps_spans=False)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Kill, if this is the step."""
        case, step = self._case, trainer.global_step + 1
        if self._settings is not None:
            # The snapshot behind a step is taken before the next one.
            is_due = step == case.saved_step + 1
            object.__setattr__(self._settings, "every_seconds", 0.0 if is_due else NEVER_SECONDS)
        if step == case.killed_step:
            telemetry = _telemetry(trainer)
            totals = telemetry.records(telemetry.ask_records(with_spans=False))[2].totals
            seconds = sum(totals.seconds.get(kind, 0.0) for kind in ACTIONS)
            self.own_seconds = seconds / max(1, totals.num_steps)
            self.killed_at = time.perf_counter()
            os.kill(self._victim.pid, signal.SIGKILL)
        self._starts.append(time.perf_counter())

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note how long the step took, or when the interrupted one was over."""
        if trainer.global_step == self._case.killed_step:
            self.over_at = time.perf_counter()
        else:
            self.step_seconds.append(time.perf_counter() - self._starts[-1])


def _telemetry(trainer: pl.Trainer) -> Any:
    return Telemetry.of(trainer.strategy.deployment.coordinator)


def _strategy(addresses: list[str], recovery: Recovery | bool) -> HeteroPipelineStrategy:
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan([addresses[0]], (1, 3)),
        StagePlan([addresses[1]], (3, NUM_LAYERS)),
    ]
    return HeteroPipelineStrategy(
        addresses, Plan(stages, NUM_MICROBATCHES), recovery=recovery, check_first_batch="off"
    )


def _trainer(strategy: HeteroPipelineStrategy, callbacks: list[pl.Callback]) -> pl.Trainer:
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _data(case: Case) -> DataLoader[Any]:
    num_sequences = (case.killed_step + 2) * BATCH_SIZE
    tokens = random_tokens(num_sequences, case.sequence_length, VOCABULARY)
    return DataLoader(Sequences(tokens), batch_size=BATCH_SIZE)


@contextmanager
def _two_workers() -> Iterator[list[WorkerProcess]]:
    with worker_process([]) as first, worker_process([]) as second:
        yield [first, second]


def recover(case: Case) -> Downtime:
    """The run with recovery; its parts are those that the coordinator has noted."""
    with tempfile.TemporaryDirectory() as folder, _two_workers() as workers:
        victim = workers[1]
        seen = visit(
            Address.parse(victim.address), Options(None, equipment_here(torch.device("cpu")))
        )
        settings = Recovery(every_seconds=NEVER_SECONDS, folder=folder)
        killing = Killing(victim, case, settings)
        strategy = _strategy([worker.address for worker in workers], settings)
        losses: list[Any] = []

        class Taking(pl.Callback):
            def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
                losses.extend(trainer.strategy.deployment.coordinator.replacements.losses)

        _trainer(strategy, [killing, Taking()]).fit(Decoder(case.config), _data(case))
    (loss,) = losses
    return Downtime(
        loss.began_seconds - killing.killed_at,
        loss.served_seconds - loss.began_seconds,
        loss.restored_seconds - loss.served_seconds,
        loss.end_seconds - loss.restored_seconds,
        killing.over_at - loss.end_seconds,
        loss.num_bytes,
        seen.bytes_per_second,
        killing.own_seconds,
        median(killing.step_seconds[1:]),
        loss.step - loss.first_step + 1,
    )


def restart(case: Case) -> float:
    """From the kill until the step is over in a run that was started again."""
    with tempfile.TemporaryDirectory() as folder, _two_workers() as workers:
        told = [vars(case), [vars(worker) for worker in workers], folder]
        first = _child([*told, False])
        second = _child([*told, True])
        return second["over_at"] - first["killed_at"]


def _child(told: list[Any]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.recovery.downtime", json.dumps(told)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment())
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_child(
    case: Case, workers: list[WorkerProcess], folder: Path, is_again: bool
) -> dict[str, float]:
    """A run without recovery, until it is ended by the kill; or the same from its checkpoint."""
    killing = Killing(workers[1], case, None)
    if is_again:
        killing.on_train_batch_start = lambda *_: killing._starts.append(0.0)
    checkpoint = ModelCheckpoint(folder, "saved", every_n_train_steps=case.saved_step)
    trainer = _trainer(_strategy([w.address for w in workers], False), [killing, checkpoint])
    saved = folder / "saved.ckpt"
    try:
        trainer.fit(Decoder(case.config), _data(case), ckpt_path=saved if is_again else None)
    except WorkerLost:
        if is_again:
            raise
    return {"killed_at": killing.killed_at, "over_at": killing.over_at}


def report(found: list[Downtime], restarts: list[float], case: Case, console: Console) -> None:
    """Print the parts, the bound and the restart."""
    table = Table(
        title=f"from the kill of a worker to its next step, {len(found)} kills, hidden "
        f"{case.hidden_size}, {found[0].num_repeated} steps to repeat"
    )
    table.add_column("part")
    for column in ("measured", "expected"):
        table.add_column(column, justify="right")
    measured = {
        "detection": [each.detecting_seconds for each in found],
        "process start": [each.serving_seconds for each in found],
        "bytes / bandwidth": [each.restoring_seconds for each in found],
        "replay": [each.repeating_seconds for each in found],
    }
    for part, seconds in measured.items():
        expected = median(each.expected[part] for each in found)
        table.add_row(part, f"{median(seconds):.2f} s", f"{expected:.2f} s")
    down, bound = (median(getattr(e, n) for e in found) for n in ("down_seconds", "most_seconds"))
    table.add_row("in all", f"{down:.2f} s", f"at most {bound:.2f} s", style="bold")
    console.print(table)
    one = found[0]
    console.print(
        f"sent: {one.sent_bytes / 2**20:.1f} MiB at {one.bytes_per_second / 2**20:.0f} MiB/s; the "
        f"stage computes {median(e.own_seconds for e in found) * 1e3:.0f} ms of a step of "
        f"{median(e.step_seconds for e in found) * 1e3:.0f} ms; after it had caught up the step "
        f"was over in {median(e.finishing_seconds for e in found):.2f} s. Expected in all: "
        f"{MOST_TIMES} x (detection + process start + bytes / bandwidth + replay) + "
        f"{MORE_SECONDS:g} s."
    )
    if restarts:
        whole = median(each.down_seconds + each.finishing_seconds for each in found)
        console.print(
            f"a restart of the whole run from its last checkpoint, with as many steps to repeat: "
            f"{median(restarts):.2f} s from the kill to the end of the step; with recovery "
            f"{whole:.2f} s"
        )


def main(told: str) -> None:
    case, workers, folder, is_again = json.loads(told)
    processes = [WorkerProcess(**each) for each in workers]
    print(json.dumps(run_child(Case(**case), processes, Path(folder), is_again)))


if __name__ == "__main__":
    from benchmarks.processes import be_quiet

    be_quiet()
    main(sys.argv[1])
