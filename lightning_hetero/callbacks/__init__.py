"""Lightning callbacks for stages."""

from .lost_worker import RecoveryCallback
from .monitor import StageMonitor
from .profiler import PipelineProfiler
from .timeline import PipelineTimeline
from .weight_average import StageWeightAveraging

__all__ = [
    "PipelineProfiler",
    "PipelineTimeline",
    "RecoveryCallback",
    "StageMonitor",
    "StageWeightAveraging",
]
