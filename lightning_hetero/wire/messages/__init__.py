"""Every message, as a typed value. Decoding checks each field against these classes.

base.py        what all are made of: the base class, and the bounds of fields
greeting.py    the opening of a conversation
conversing.py  what any conversation has: signs of life, pauses, failures, its end
measuring.py   devices, layers and links, before anything is deployed
layers.py      the giving of layers to a stage
steps.py       what goes through the stages in a step
weights.py     a stage's weights, gradients and optimizers
observing.py   clocks, records of steps, and a worker's status
"""

from __future__ import annotations

from .conversing import Done, Failure, Goodbye, NeighborLost, Paused, Ping, Pong, Resumed
from .greeting import PROTOCOL_VERSION, Equipment, Hello, Welcome
from .layers import (
    Built,
    Deploy,
    Launch,
    Loaded,
    LoadTensor,
    OfferAnswered,
    OfferTensor,
    ParameterSpec,
)
from .measuring import (
    DescribeDevice,
    DeviceDescribed,
    LayerMeasured,
    LinkMeasured,
    MeasureLayer,
    MeasureLink,
    MeasureOptimizer,
    NotMeasured,
    OptimizerMeasured,
    PrepareLayers,
    Probe,
    ProbeAnswer,
    Sample,
)
from .observing import (
    AskClock,
    ClockTold,
    FetchRecord,
    LinkStatus,
    Record,
    StageRecord,
    StageStatus,
    Status,
)
from .steps import (
    AbortStep,
    Activation,
    Arguments,
    BeginStep,
    BuffersUpdated,
    CacheArgument,
    DropCaches,
    Gradient,
    LayerArguments,
    Narrowed,
    SetAttributes,
)
from .weights import (
    ApplyOptimizer,
    AverageWeights,
    BuildOptimizer,
    ClipGradients,
    FetchGradients,
    FetchOptimizerState,
    FetchTensors,
    GroupSpec,
    LoadOptimizerState,
    MeasureNorms,
    Norms,
    OptimizerState,
    SetTrained,
    TensorContent,
    Timings,
    ZeroGradients,
)

Message = (
    Hello
    | Welcome
    | Ping
    | Pong
    | Goodbye
    | Failure
    | NeighborLost
    | Paused
    | Resumed
    | Done
    | Deploy
    | Built
    | LoadTensor
    | Loaded
    | OfferTensor
    | OfferAnswered
    | Launch
    | BuildOptimizer
    | LoadOptimizerState
    | BeginStep
    | SetAttributes
    | BuffersUpdated
    | Arguments
    | Activation
    | Gradient
    | DropCaches
    | AbortStep
    | SetTrained
    | ZeroGradients
    | MeasureNorms
    | Norms
    | ClipGradients
    | ApplyOptimizer
    | Timings
    | AskClock
    | ClockTold
    | Record
    | FetchRecord
    | StageRecord
    | AverageWeights
    | FetchTensors
    | FetchGradients
    | TensorContent
    | FetchOptimizerState
    | OptimizerState
    | DescribeDevice
    | DeviceDescribed
    | PrepareLayers
    | MeasureLayer
    | LayerMeasured
    | MeasureOptimizer
    | OptimizerMeasured
    | MeasureLink
    | LinkMeasured
    | Probe
    | ProbeAnswer
    | NotMeasured
    | Status
)

__all__ = [
    "AbortStep",
    "Activation",
    "ApplyOptimizer",
    "Arguments",
    "AskClock",
    "AverageWeights",
    "BeginStep",
    "BuffersUpdated",
    "BuildOptimizer",
    "Built",
    "CacheArgument",
    "ClipGradients",
    "ClockTold",
    "Deploy",
    "DescribeDevice",
    "DeviceDescribed",
    "Done",
    "DropCaches",
    "Equipment",
    "Failure",
    "FetchGradients",
    "FetchOptimizerState",
    "FetchRecord",
    "FetchTensors",
    "Goodbye",
    "Gradient",
    "GroupSpec",
    "Hello",
    "Launch",
    "LayerArguments",
    "LayerMeasured",
    "LinkMeasured",
    "LinkStatus",
    "LoadOptimizerState",
    "LoadTensor",
    "Loaded",
    "MeasureLayer",
    "MeasureLink",
    "MeasureNorms",
    "MeasureOptimizer",
    "Message",
    "Narrowed",
    "NeighborLost",
    "Norms",
    "NotMeasured",
    "OfferAnswered",
    "OfferTensor",
    "OptimizerMeasured",
    "OptimizerState",
    "PROTOCOL_VERSION",
    "ParameterSpec",
    "Paused",
    "Ping",
    "Pong",
    "PrepareLayers",
    "Probe",
    "ProbeAnswer",
    "Record",
    "Resumed",
    "Sample",
    "SetAttributes",
    "SetTrained",
    "StageRecord",
    "StageStatus",
    "Status",
    "TensorContent",
    "Timings",
    "Welcome",
    "ZeroGradients",
]
