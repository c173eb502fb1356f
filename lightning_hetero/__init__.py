"""Train one model on devices that were never meant to work together.

    errors.py        every exception, drawn as a tree
    replacing.py     files that take another's place at once, whole or not at all
    plan.py          Plan, StagePlan: who holds which layers
    wire/            what is said: frames, tensors, messages, the rules of talking
    model/           what is cut: finding layers, hollowing them, the recipe that rebuilds them
    pipeline/        what is run: micro-batches, the rule, stages, the driver of training_step
    planning/        what goes where: makes plans
    runtime/         where it runs: the worker, the coordinator, what lies between them
    observing/       what happened: recorded steps on one clock, as a trace and as a chart
    pictures/        what is shown: the topology as SVG, PNG and Mermaid, the report of a run
    precision.py     where a precision plugin clips and steps, the stages do too
    manual.py        where a user's code zeroes gradients, the stages do too
    gradients.py     norms and clipping of all gradients, for those who look at them themselves
    bars.py          progress bars in the style of the Trainer's own
    callbacks/       Lightning callbacks that know of stages
    saving.py        checkpoints: what goes into them, and files written straight to the disk
    checkpoints.py   Lightning's hooks about checkpoints, which the strategy inherits
    moving.py        layers come home, at the end or to go out under another plan
    watching.py      notices stages that drift, and asks for a better plan
    doctor/          why a worker cannot be used, hop by hop
    picturing.py     draws a run's topology, beside its logs
    checks.py        what is refused before a run
    stepping.py      one training step, cut into micro-batches for the driver
    training.py      ties a Trainer's steps and optimizers to the layers on workers
    profiling/       what it takes: measures a model on its devices, and chooses the plan
    verifying/       who computes wrongly: each stage against one device
    deploying.py     how layers get to the workers: by a plan that is given, or measured for
    strategy.py      HeteroPipelineStrategy: Lightning's hooks, each a few lines
    cli/             the command lightning-hetero: a file for each of its commands
    version.py       the version of this package

Imports point one way: cli → strategy, callbacks → profiling → observing → pictures → runtime,
planning → pipeline → model, wire → plan → errors.
"""

from lightning.pytorch.strategies import StrategyRegistry

from .callbacks.monitor import StageMonitor
from .callbacks.profiler import PipelineProfiler
from .callbacks.timeline import PipelineTimeline
from .model.pretrained import from_pretrained
from .plan import Plan, StagePlan
from .strategy.strategy import HeteroPipelineStrategy
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
