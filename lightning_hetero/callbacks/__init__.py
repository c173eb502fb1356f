"""Lightning callbacks that know of stages."""

from .averaging import StageWeightAveraging
from .monitor import StageMonitor
from .profiler import PipelineProfiler
from .timeline import PipelineTimeline

__all__ = ["PipelineProfiler", "PipelineTimeline", "StageMonitor", "StageWeightAveraging"]
