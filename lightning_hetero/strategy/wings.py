"""The wings that a run takes in: the core calls these functions, and imports no wing itself.

Each function imports its wing when it is called, so a room that nobody chooses is not loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from .._lightning import pl
from ..coordinator.deployment import Deployment
from ..coordinator.progress import Bars
from ..coordinator.session import Coordinator
from ..errors import PlanError
from ..events import Observers, RecordFile
from ..plan import Plan
from ..recovery import Recovery, too_few
from .arguments import StepOptions
from .deploy import PlanSource, WorkerSource
from .training_run import Guard


def plan_source(plan: str | Path | Plan, micro_batches: int | None) -> PlanSource:
    """Where the plans of a strategy come from, by its arguments.

    Raises:
        PlanError: If the plan's file is there already and cannot be read.
    """
    from .planning import PlanChoice

    return PlanChoice(plan, micro_batches)


def worker_source(workers: Any, token_file: str | Path | None) -> WorkerSource:
    """Where the workers of a strategy come from, by its arguments."""
    from ..coordinator.fleet import Fleet

    return Fleet(workers, token_file)


def run_guard(module: pl.LightningModule, options: StepOptions) -> Guard:
    """What looks for silent mistakes in a training."""
    from .step_guard import RunGuard

    return RunGuard(module, options)


def replace_lost(
    settings: Recovery, trainer: pl.Trainer, coordinator: Coordinator, plan: Plan
) -> None:
    """Let a run get over lost workers; call it before layers are sent.

    Raises:
        PlanError: If the plan has fewer workers than the user wants.
        SaveError: If the folder of snapshots cannot be written.
    """
    from ..coordinator.replacement import Replacements
    from ..coordinator.snapshots import Snapshots

    if missing := too_few(plan.workers, settings.least_workers):
        raise PlanError(f"The run cannot begin. {missing}")
    folder = Path(settings.folder or Path(trainer.default_root_dir, "recovery"))
    parts = coordinator.connections, coordinator.layers, coordinator.stages
    snapshots = Snapshots(settings, folder, *parts)
    coordinator.replace_lost_by(Replacements(settings, snapshots, *parts, coordinator.observers))


def observers_of(trainer: pl.Trainer) -> Observers:
    """Who reads the events of a Trainer's run: record, pictures, bars, callbacks."""
    from ..callbacks.lost_worker import CallbackObserver
    from ..report.run_files import RunFiles

    return Observers([RecordFile(), RunFiles(), Bars(trainer), CallbackObserver(trainer)])


def moving_averages(
    trainer: pl.Trainer, plan: Plan, present: Callable[[], Deployment]
) -> AbstractContextManager[None]:
    """Inside, layers move; the averages of their weights move along."""
    from ..callbacks import weight_average

    return weight_average.moving_averages(trainer, plan, present)
