"""The strategy and the callbacks for projects with `pytorch_lightning`.

Lightning is published under two names, and the classes of one name are not the classes of the
other. The import of this module takes `pytorch_lightning` for the whole process.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ._lightning import SECOND_NAME, require

require(SECOND_NAME)

from .callbacks.lost_worker import RecoveryCallback  # noqa: E402
from .callbacks.monitor import StageMonitor  # noqa: E402
from .callbacks.profiler import PipelineProfiler  # noqa: E402
from .callbacks.timeline import PipelineTimeline  # noqa: E402
from .callbacks.weight_average import StageWeightAveraging  # noqa: E402
from .strategy.strategy import HeteroPipelineStrategy  # noqa: E402

__all__ = [
    "HeteroPipelineStrategy",
    "PipelineProfiler",
    "PipelineTimeline",
    "RecoveryCallback",
    "StageMonitor",
    "StageWeightAveraging",
]


def __getattr__(name: str) -> Any:
    return getattr(import_module(__name__.rpartition(".")[0]), name)
