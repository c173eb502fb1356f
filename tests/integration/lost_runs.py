"""Runs over workers that are killed, and what they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, RecoveryCallback, StagePlan

from ..conftest import WorkerProcess
from ..equality import assert_same, differing
from ..models import TinyModule, fit, loader

NUM_STEPS = 5
# The first snapshot is taken at once, or there is none.
ALWAYS, NEVER = 0.0, 3600.0


def turn_by_turn(names: Sequence[str]) -> Plan:
    """A plan in which the first worker has the layers before and behind those of the second."""
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan([names[0]], (1, 2)),
        StagePlan([names[1]], (2, 4)),
        StagePlan([names[0]], (4, 5)),
    ]
    return Plan(stages, micro_batches=3)


@dataclass(frozen=True)
class Left:
    """What a run has left.

    Args:
        module: The trained module.
        files: What its files hold, by their names.
    """

    module: TinyModule
    files: dict[str, Any]


def run(
    names: Sequence[str],
    folder: Path,
    every_seconds: float,
    plan: Plan | None = None,
    **options: Any,
) -> Left:
    """Train over workers, with evaluations and checkpoints.

    Args:
        names: All workers of the strategy.
        folder: Takes the files.
        every_seconds: The time between two snapshots.
        plan: Who has which layers; by default the first two workers turn by turn.
        options: The Trainer's, ``wait_seconds``, ``micro_batching``, and the ``module``'s class.
    """
    make: Callable[[], TinyModule] = options.pop("module", TinyModule)
    settings = Recovery(
        folder=folder / "recovery",
        every_seconds=every_seconds,
        wait_seconds=options.pop("wait_seconds", 30.0),
    )
    strategy = HeteroPipelineStrategy(
        list(names),
        plan or turn_by_turn(names),
        micro_batching=options.pop("micro_batching", "step"),
        recovery=settings,
    )
    options = {
        "max_epochs": 2,
        "gradient_clip_val": 0.05,
        "accumulate_grad_batches": 2,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
        "logger": CSVLogger(folder, name="logs", version="0"),
        "enable_checkpointing": True,
        **options,
    }
    callbacks = [ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")]
    options["callbacks"] = [*callbacks, *options.get("callbacks", ())]
    data = loader(6 * NUM_STEPS, 6, padded=True)
    module = fit(make(), strategy, data, loader(6, 6, padded=True), **options)
    metrics = folder / "logs" / "0" / "metrics.csv"
    files: dict[str, Any] = {"metrics": metrics.read_bytes()}
    for path in folder.glob("*.ckpt"):
        files[path.name] = torch.load(path, weights_only=True)
    assert not list((folder / "recovery").iterdir())
    return Left(module, files)


def assert_same_run(found: Left, expected: Left) -> None:
    """Find every bit as the undisturbed run has left it."""
    assert found.module.losses == expected.module.losses
    assert differing(found.module, expected.module) == []
    for checkpoint in (*found.files.values(), *expected.files.values()):
        if isinstance(checkpoint, dict):
            checkpoint.pop("callbacks", None)  # they name the folder
    assert_same(found.files, expected.files, tolerance=0.0)


class Observing(RecoveryCallback):
    """Notes what it is told, and calls a function before some batches of the first epoch."""

    def __init__(self, before: dict[int, Callable[[], None]]) -> None:
        self.before = before
        self.told: list[tuple[str, str]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx in self.before:
            self.before[batch_idx]()

    def on_worker_lost(self, trainer: Any, name: str, step: int) -> None:
        assert trainer.training
        assert step > 0
        self.told.append(("lost", name))

    def on_worker_restored(self, trainer: Any, name: str, step: int, seconds: float) -> None:
        assert step > 0
        assert seconds > 0
        self.told.append(("restored", name))


def kill_session(worker: WorkerProcess) -> None:
    """Kill the process of the present session."""
    session = worker.session
    session.kill()
    session.wait(20)


def end(worker: WorkerProcess) -> None:
    """Kill the whole worker, as the system does when its machine is gone."""
    worker.process.kill()
    worker.process.wait()
