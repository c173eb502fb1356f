"""A worker that is killed comes back, and the run is the one in which nothing happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, StagePlan

from ..conftest import worker_process
from ..equality import assert_same, differing
from ..models import TinyModule, fit, loader
from .dying_worker import dying

NUM_STEPS = 5
# The first snapshot is taken at once, or there is none.
ALWAYS, NEVER = 0.0, 3600.0


def plan_over(names: Sequence[str]) -> Plan:
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


def run(names: Sequence[str], folder: Path, every_seconds: float, **options: Any) -> Left:
    """Train over two workers, with evaluations and checkpoints."""
    settings = Recovery(folder=folder / "recovery", every_seconds=every_seconds)
    strategy = HeteroPipelineStrategy(list(names), plan_over(names), recovery=settings)
    options = {
        "max_epochs": 2,
        "gradient_clip_val": 0.05,
        "accumulate_grad_batches": 2,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
        "logger": CSVLogger(folder, name="logs", version="0"),
        "enable_checkpointing": True,
        "callbacks": [ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")],
        **options,
    }
    data = loader(6 * NUM_STEPS, 6, padded=True)
    module = fit(TinyModule(), strategy, data, loader(6, 6, padded=True), **options)
    metrics = folder / "logs" / "0" / "metrics.csv"
    files: dict[str, Any] = {"metrics": metrics.read_bytes()}
    for path in folder.glob("*.ckpt"):
        files[path.name] = torch.load(path, weights_only=True)
    assert not list((folder / "recovery").iterdir())
    return Left(module, files)


@pytest.fixture(scope="module")
def undisturbed(worker_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """The same run without a loss."""
    names = [worker.address for worker in worker_processes[:2]]
    return run(names, tmp_path_factory.mktemp("undisturbed"), NEVER)


def assert_same_run(found: Left, expected: Left) -> None:
    assert found.module.losses == expected.module.losses
    assert differing(found.module, expected.module) == []
    for checkpoint in (*found.files.values(), *expected.files.values()):
        if isinstance(checkpoint, dict):
            checkpoint.pop("callbacks", None)  # they name the folder
    assert_same(found.files, expected.files, tolerance=0.0)


CASES = [
    ("begin", 3, ALWAYS),
    ("arguments", 11, ALWAYS),
    ("forward", 8, ALWAYS),
    ("forward", 20, NEVER),
    ("backward", 8, ALWAYS),
    ("backward", 11, NEVER),
    ("sending", 9, ALWAYS),
    ("norms", 2, ALWAYS),
    ("clip", 2, ALWAYS),
    ("clip", 1, NEVER),
    ("step", 2, ALWAYS),
    ("step", 2, NEVER),
    ("timings", 2, ALWAYS),
    ("weights", 20, NEVER),
    ("optimizer's state", 1, NEVER),
    ("snapshot", 2, ALWAYS),
    ("evaluation", 2, ALWAYS),
    ("evaluation", 3, NEVER),
]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("place", "call", "every_seconds"), CASES)
def test_a_killed_process_comes_back(
    place: str, call: int, every_seconds: float, which: int, undisturbed: Left, tmp_path: Path
) -> None:
    died = tmp_path / "died"
    with worker_process() as other, worker_process(before=dying(place, call, died)) as victim:
        names = [victim.address, other.address] if which == 0 else [other.address, victim.address]
        folder = tmp_path / "run"
        found = run(names, folder, every_seconds)
    assert died.exists()
    assert_same_run(found, undisturbed)
