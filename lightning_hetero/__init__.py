"""Train one model on devices that were never meant to work together.

Each folder answers one question; the two ends of one conversation have the same file names.

    strategy/      what Lightning calls: the strategy, its hooks, plan, checkpoints, replanning
    callbacks/     what a user adds: monitor, timeline, weight average, profiler
    pipeline/      how a step runs: driver, turns, hand-over, rule, stages; no socket, no Trainer
    model/         what is cut: decoder layers, hollow layers, recipes, checkpoints
    devices/       what computes: one class per backend, and copies between devices
    protocol/      what is said: messages, frames, sessions; no I/O
    transport/     how it travels: connections, channels, TLS, handshakes
    worker/        the process on a device
    coordinator/   the Trainer's side
    launch/        who starts workers
    discovery/     where workers are
    mesh/          networks apart: WireGuard files, which only their command uses
    planner/       who gets what: pure functions from a profile to a plan
    profiler/      how fast it is: measurements of a model on its devices
    telemetry/     what happened: recorded steps, their predictions, metrics
    report/        what is shown: charts, diagrams, the page on a run
    doctor/        why a worker cannot be used
    verify/        which worker computes wrongly
    cli/           the command lightning-hetero, one file a command

    plan.py         Plan, StagePlan: who holds which layers
    errors.py       every exception, drawn as a tree
    units.py        amounts as a person writes them
    optional.py     libraries that are an extra
    atomic_file.py  files that are written whole or not at all
    version.py      the version of this package

Imports point one way: cli -> verify -> strategy -> callbacks -> profiler -> report, coordinator ->
telemetry, doctor, launch -> worker, discovery -> planner, transport -> pipeline -> devices ->
protocol, model -> plan -> errors.
"""

from lightning.pytorch.strategies import StrategyRegistry

from .callbacks.monitor import StageMonitor
from .callbacks.profiler import PipelineProfiler
from .callbacks.timeline import PipelineTimeline
from .model.lazy_weights import from_pretrained
from .plan import Plan, StagePlan
from .strategy import HeteroPipelineStrategy
from .version import __version__

__all__ = [
    "HeteroPipelineStrategy",
    "PipelineProfiler",
    "PipelineTimeline",
    "Plan",
    "StageMonitor",
    "StagePlan",
    "__version__",
    "from_pretrained",
]

StrategyRegistry.register(
    "hetero_pipeline",
    HeteroPipelineStrategy,
    description=HeteroPipelineStrategy.__doc__ or "",
    override=True,
)
