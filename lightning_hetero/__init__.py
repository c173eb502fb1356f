"""Train one model on devices that were never meant to work together.

Each folder answers one question. The two ends of one conversation have the same file names, and so
have a rule of the planner and what carries it out (`planner/membership.py`,
`replan/membership.py`).

    strategy/      what Lightning calls: the strategy, its hooks, plan, checkpoints
    callbacks/     what a user adds: monitor, timeline, weight average, profiler
    pipeline/      how a step runs: driver, turns, hand-over, rule, stages; no socket, no Trainer
    model/         what is cut: decoder layers, hollow layers, recipes; no file per family
    devices/       what computes: one class per backend, and copies between devices
    protocol/      what is said: messages, frames, sessions; no I/O
    transport/     how it travels: connections, channels, TLS, handshakes
    worker/        the process on a device
    coordinator/   the Trainer's side
    launch/        who starts workers
    discovery/     where workers are
    pairing/       how a worker gets the token: a code, typed once
    planner/       who gets what: pure functions from a profile to a plan
    replan/        which plan a run has: measured at its start, changed between steps
    profiler/      how fast it is: measurements of a model on its devices
    telemetry/     what happened: the timeline of recorded steps, and its predictions
    report/        what is shown: charts, diagrams, the page on a run
    doctor/        why a worker cannot be used
    guard/         whether a step is still right: checks of the user's code
    verify/        which worker computes wrongly
    cli/           the command lightning-hetero, one file a command

    plan.py         Plan, StagePlan: who holds which layers
    window.py       windows, Window: several batches as one
    worker_sources.py  ClusterFile, Launcher: where workers come from
    recovery.py     Recovery: how a run gets over faults
    errors.py       every exception, drawn as a tree
    events.py       what happens in a run, for those who look at it
    units.py        amounts as a person writes them
    optional.py     parts that may be missing: libraries of an extra, and wings
    atomic_file.py  files that are written whole or not at all
    written_blocks.py  blocks of a file with their checksums
    yaml_file.py    YAML files: read, and what is wrong with one
    version.py      the version of this package

    pytorch_lightning.py   the door for projects that import `pytorch_lightning`
    _lightning.py          Lightning, by the name that the project imports

A wing is a part that may be missing; the files called ``wings.py`` import it. Some changes pass
through several rooms:

    an option of a stage   plan.py -> coordinator/worker_stages.py -> protocol/values.py
                           (StageSpec) -> worker/session.py -> the file that acts
    a metric of a stage    protocol/fields.py (Totals), pipeline/recorder.py, callbacks/monitor.py;
                           a sensor: devices/device.py (health)
    a transport            beside transport/connection.py; transport/handshake.py dials,
                           transport/reception.py accepts; worker/supervisor.py, cli/worker.py and
                           launch/local.py hand the listener on; between machines all bytes are
                           under TLS, so `secured` in transport/tls.py has a place for bytes beside
    a format of weights    beside model/four_bit.py; model/stored.py lists the formats
    the objective of plans planner/candidates.py (step_seconds, is_below); seconds count too in
                           bounds.py, team_estimate.py, team_walk.py, arrangements.py,
                           simulation.py, search.py, changes.py, replan.py, membership.py,
                           experts.py, remedies.py and verdict.py; layer_split.py, replicas.py,
                           replica_teams.py and worker_orders.py go by speed; a user asks for it
                           by Wishes in planner/solver.py, filled in by cli/options.py,
                           cli/plan.py and replan/planning.py; a device has watts in
                           planner/profile.py
    an end of the model    follow `embedding` and `head`: plan.py, model/layers.py, model/head.py,
                           model/hollow.py, model/placeholders.py, model/recipe.py,
                           coordinator/deployment.py (layers_of_stage), pipeline/placement.py,
                           pipeline/stage.py (HEAD_LAYERS), pipeline/sliced_loss.py; measured in
                           pipeline/bench.py, profiler/trials.py, embedding_and_head.py,
                           leaving_head.py and named_in_code.py; planner/ (`Left` in costs.py, and
                           all that reads `left`); a loss in place of hidden states:
                           pipeline/boundary.py (has_loss), coordinator/handover.py, twins.py,
                           token_slices.py and answer_checks.py; in slices: token_slices.py and
                           trial_slices.py of pipeline/; shown in report/topology.py, tried in
                           verify/rehearsal.py
    how replicas agree     plan.py (ReplicaOptimizer), protocol/values.py (StageSpec),
                           worker_stages.py (is_split); replicas.py of both ends; and when:
                           coordinator/optimizers.py (add_up), coordinator/steps.py,
                           strategy/training_step.py, worker/session.py; after a loss:
                           snapshots.py of both ends, pipeline/journal.py; its time:
                           planner/step_model.py (exchange_seconds), simulation.py, bounds.py
    signs of life          transport/deadlines.py has period and patience of heartbeats;
                           transport/channel.py sends and counts them
    an optimizer           pipeline/optimizer.py; optimizers.py of strategy/ (hooks and closure),
                           coordinator/ and worker/; answer_checks.py checks its state;
                           guard/audit.py steps single parameters again; pipeline/bench.py and
                           coordinator/dry_run.py step to measure
    a kind of clipping     strategy/strategy.py (clip_grad_norm_), strategy/optimizers.py,
                           coordinator/optimizers.py, protocol/messages.py (ClipGradients),
                           worker/optimizers.py, pipeline/optimizer.py (Clipping)
    keys and values        pipeline/stage.py (StageCaches), pipeline/token_slices.py;
                           model/kv_cache.py is the model's own cache; their bytes:
                           profiler/token_slices.py, planner/token_slices.py
    something off a device devices/copies.py and streams.py (pinned memory), as in
                           worker/streamed_weights.py; main_memory.py only measures

Imports point one way: cli -> verify -> strategy -> callbacks, guard, replan -> profiler -> report,
coordinator -> telemetry, doctor, launch -> worker, discovery, pairing -> planner, transport ->
pipeline -> devices -> protocol, model -> plan, _lightning -> errors.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import HeteroError
from .version import __version__

if TYPE_CHECKING:
    from .callbacks.lost_worker import RecoveryCallback
    from .callbacks.monitor import StageMonitor
    from .callbacks.profiler import PipelineProfiler
    from .callbacks.timeline import PipelineTimeline
    from .launch.launcher import Joining
    from .launch.ray import RayWorkers
    from .launch.slurm import SlurmWorkers
    from .launch.ssh import SshWorkers
    from .model.lazy_weights import from_pretrained
    from .plan import Plan, StagePlan
    from .recovery import Recovery
    from .strategy.strategy import HeteroPipelineStrategy
    from .window import Window, windows
    from .worker_sources import ClusterFile

__all__ = [
    "ClusterFile",
    "HeteroPipelineStrategy",
    "Joining",
    "PipelineProfiler",
    "PipelineTimeline",
    "Plan",
    "RayWorkers",
    "Recovery",
    "RecoveryCallback",
    "SlurmWorkers",
    "SshWorkers",
    "StageMonitor",
    "StagePlan",
    "Window",
    "__version__",
    "from_pretrained",
    "windows",
]

# By public name, its module. It is imported when the name is first used: torch and Lightning take
# seconds, and most commands need neither.
_MODULES = {
    "ClusterFile": "worker_sources",
    "HeteroPipelineStrategy": "strategy.strategy",
    "Joining": "launch.launcher",
    "PipelineProfiler": "callbacks.profiler",
    "PipelineTimeline": "callbacks.timeline",
    "Plan": "plan",
    "RayWorkers": "launch.ray",
    "Recovery": "recovery",
    "RecoveryCallback": "callbacks.lost_worker",
    "SlurmWorkers": "launch.slurm",
    "SshWorkers": "launch.ssh",
    "StageMonitor": "callbacks.monitor",
    "StagePlan": "plan",
    "Window": "window",
    "from_pretrained": "model.lazy_weights",
    "windows": "window",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = found  # The next look-up does not come here.
        return found
    if not name.startswith("_"):
        try:
            return import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _strategy() -> Any:
    import_module("._lightning", __name__).require("lightning.pytorch")
    return __getattr__("HeteroPipelineStrategy")()


def _strategy_of_pytorch_lightning() -> Any:
    return import_module(".pytorch_lightning", __name__).HeteroPipelineStrategy()


def _refuse() -> NoReturn:
    raise HeteroError(
        "Fabric cannot use the strategy 'hetero_pipeline'; a Trainer can. Import Trainer and "
        "LightningModule from `lightning.pytorch`, or both from `pytorch_lightning`."
    )


# By module with a registry of strategies: the name of the registry, and what makes our strategy.
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", _strategy),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", _refuse),
    "pytorch_lightning.strategies": ("StrategyRegistry", _strategy_of_pytorch_lightning),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", _refuse),
}


def _register_in(module: ModuleType) -> None:
    registry, make = _REGISTRIES[module.__name__]
    getattr(module, registry).register(
        "hetero_pipeline",
        make,
        description="Trains one model on this process and on workers, as a pipeline.",
        override=True,
    )


class _RegisterOnImport:
    """Registers the strategy in a registry as soon as its module has been imported by anyone."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _REGISTRIES else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register_in(module)

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


for _name in _REGISTRIES:
    if _name in sys.modules:
        _register_in(sys.modules[_name])
sys.meta_path.insert(0, _RegisterOnImport)
