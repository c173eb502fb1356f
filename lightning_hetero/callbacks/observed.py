"""What callbacks that look at the stages need of the strategy."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from ..coordinator.deployment import Deployment
from ..planner.profile import Profile


def deployment_of(trainer: pl.Trainer) -> Deployment | None:
    """The layers on workers; None where the model runs on this process alone."""
    return cast("Deployment | None", getattr(trainer.strategy, "deployment", None))


def profile_of(trainer: pl.Trainer) -> Profile | None:
    """What was measured before the run, if anything was."""
    choice = getattr(trainer.strategy, "plan_choice", None)
    return cast("Profile | None", getattr(choice, "profile", None))


def warn_of_no_stages(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Say that there is nothing to look at, where there is not."""
    if deployment_of(trainer) is None:
        rank_zero_warn(
            f"{type(callback).__name__} has nothing to look at: the model runs on one process, "
            "without stages on workers."
        )


def run_folder(trainer: pl.Trainer, dirpath: Path | None) -> Path:
    """Where a run's files go: beside its logs."""
    return dirpath or Path(trainer.log_dir or trainer.default_root_dir)
