"""A project, how it trains, and what a training run of it leaves."""

from __future__ import annotations

import importlib
import importlib.util
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

SEED = 1
NUM_STEPS = 10


@dataclass(frozen=True)
class Project:
    """A project, where its model has its layers, and how it trains.

    Args:
        name: Its distribution.
        package: What is imported; the project is skipped without it.
        arguments: For `HeteroPipelineStrategy`.
        train: Takes the arguments of a Trainer and a folder for what the project writes.
        lightning: The name by which the project imports Lightning.
    """

    name: str
    package: str
    arguments: dict[str, Any]
    train: Callable[[dict[str, Any], Path], None]
    lightning: str = "lightning.pytorch"

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    @property
    def strategy_module(self) -> str:
        """Where a user of this project imports the strategy from."""
        is_other = self.lightning == "pytorch_lightning"
        return "lightning_hetero.pytorch_lightning" if is_other else "lightning_hetero"


@dataclass
class Trained:
    """The losses of a training run's steps, and the weights behind the last one, by name."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def trained(project: Project, strategy: Any, folder: Path) -> Trained:
    """Train a project, with the same seed for every strategy."""
    lightning = importlib.import_module(project.lightning)
    found = Trained()

    class Recorder(lightning.Callback):  # type: ignore[misc, name-defined]
        """What every step's loss was, and the weights at the end."""

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            found.losses.append(float(outputs["loss"]))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            state = pl_module.state_dict()
            found.weights = {name: tensor.detach().clone() for name, tensor in state.items()}

    lightning.seed_everything(SEED, verbose=False)
    options = {"strategy": strategy, "callbacks": [Recorder()], "default_root_dir": folder}
    project.train({**OPTIONS, **options}, folder)
    return found


OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    # In float32 the last bits, which another order of sums changes, grow from step to step.
    "precision": "64-true",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of every Trainer here."""


def without_dropout(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    return module


def wave(number: int, length: int) -> list[float]:
    """A series to forecast."""
    noise = random.Random(number)
    return [math.sin(time / 7 + number) + noise.gauss(0.0, 0.1) for time in range(length)]
