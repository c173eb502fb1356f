"""The wings of a run: the core calls these functions, and does not import a wing itself.

Each function imports its wing when it is called, so an unused wing is not loaded.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from .._lightning import pl
from ..coordinator.deployment import Deployment
from ..coordinator.parts import DeploymentParts
from ..coordinator.progress import Bars
from ..errors import PlanError
from ..events import Observers, RecordFile, RunObserver
from ..model.layers import DecoderLayer
from ..optional import has_wing
from ..plan import Plan
from ..recovery import Recovery, too_few
from ..worker_sources import ClusterFile
from .arguments import StepOptions
from .deploy import PlanSource
from .run_events import CallbackObserver
from .training_run import Guard

if TYPE_CHECKING:
    from ..coordinator.listed_workers import ListedWorkers
    from ..coordinator.session import Coordinator


def plan_source(plan: str | Path | Plan, micro_batches: int | None) -> PlanSource:
    """Where the plans of a strategy come from, by its arguments.

    Raises:
        PlanError: If the plan's file is there already and cannot be read, or the plan is to be made
            and the wing for it is not installed.
    """
    if not has_wing("replan"):
        from .fixed_plan import FixedPlan

        return FixedPlan(plan, micro_batches)
    from ..replan.planning import PlanChoice

    return PlanChoice(plan, micro_batches)


def worker_source(workers: Any, token_file: str | Path | None) -> ListedWorkers:
    """Where the workers of a strategy come from, by its arguments."""
    from ..coordinator.listed_workers import ListedWorkers

    if isinstance(workers, (list, tuple)):
        return ListedWorkers(workers, token_file, _lookout)
    if isinstance(workers, ClusterFile):
        from ..launch.cluster import read_cluster

        cluster = read_cluster(workers.path)
        command = f"lightning-hetero up {shlex.quote(workers.path)}"
        token_file = token_file or cluster.token_file
        return ListedWorkers(cluster.addresses, token_file, _lookout, command)
    from ..coordinator.fleet import AnnouncedWorkers, LaunchedWorkers, LocalWorkers

    if isinstance(workers, int):
        return LocalWorkers(workers)
    if workers == "auto":
        return AnnouncedWorkers((), token_file, _lookout)
    return LaunchedWorkers(workers, token_file)


def _lookout(*run: Any) -> Any:
    from ..discovery.find import Lookout

    return Lookout(*run)


def deployment_parts(options: StepOptions) -> DeploymentParts:
    """The parts of a deployment, as far as they are installed."""
    checks = "guard", "coordinator.batch_trials", "coordinator.twins", "model.layer_code"
    missing = [name for name in checks if not has_wing(name)]
    if missing and options.batches.check != "off":
        rank_zero_warn(
            "Nothing checks this run for wrong numbers, or not all of it, since lightning_hetero "
            f"lacks {', '.join(missing)}; install the whole package, or set "
            "`check_first_batch='off'`."
        )
    parts: dict[str, Any] = {}
    if has_wing("coordinator.batch_trials"):
        from ..coordinator.batch_trials import TriedBatches

        parts["batches"] = TriedBatches
    if has_wing("coordinator.twins") and has_wing("model.layer_code"):
        from ..coordinator.twins import Twins

        parts["twins"] = Twins
    if has_wing("coordinator.moves"):
        from ..coordinator.moves import move

        parts["move"] = move
    if has_wing("coordinator.replicas"):
        from ..coordinator.replicas import HostedReplicas

        parts["hosted"] = HostedReplicas
    if has_wing("coordinator.token_slices"):
        from ..coordinator.token_slices import TokenSlices

        parts["slices"] = TokenSlices
    return DeploymentParts(**parts)


def halves_of_layers(layers: Sequence[DecoderLayer]) -> list[DecoderLayer]:
    """Cut each layer in two.

    Raises:
        ModelError: If a layer cannot be cut.
    """
    from ..model.half_layers import cut_layers

    return cut_layers(layers)


def run_guard(module: pl.LightningModule, options: StepOptions) -> Guard:
    """The watch for silent mistakes in a training."""
    if not (has_wing("guard") and has_wing("coordinator.batch_trials")):
        from .unguarded import Unguarded

        return Unguarded()
    from ..guard.step_guard import RunGuard

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

    if missing := too_few(plan.workers, settings.least_workers):
        raise PlanError(f"The run cannot begin. {missing}")
    folder = Path(settings.folder or Path(trainer.default_root_dir, "recovery"))
    part = Replacements(settings, folder, coordinator.stages, coordinator.observers)
    coordinator.connections.replace_lost_by(part)


def observers_of(trainer: pl.Trainer) -> Observers:
    """The readers of the events of a Trainer's run: record, pictures, bars, callbacks."""
    return Observers([RecordFile(_run_files), Bars(trainer), CallbackObserver(trainer)])


def _run_files(folder: str) -> RunObserver:
    from ..report.run_files import RunFiles

    return RunFiles(folder)


def moving_averages(
    trainer: pl.Trainer, plan: Plan, present: Callable[[], Deployment]
) -> AbstractContextManager[None]:
    """Inside, layers move; the averages of their weights move along."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if not any(getattr(each, "averages_on_stages", False) for each in callbacks):
        return nullcontext()
    from ..callbacks import weight_average

    return weight_average.moving_averages(trainer, plan, present)
