"""Lightning callbacks that know of stages."""

from .averaging import StageWeightAveraging
from .profiler import PipelineProfiler

__all__ = ["PipelineProfiler", "StageWeightAveraging"]
