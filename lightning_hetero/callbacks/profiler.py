"""PipelineProfiler: has every device measure the model's layers before training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .._lightning import Callback
from ..plan import Dtype
from ..profiler.measure import ProfilingOptions


class PipelineProfiler(Callback):
    """Has the coordinator and every worker measure the model's own layers before training.

    `HeteroPipelineStrategy` finds this callback among the Trainer's callbacks. Without it,
    ``plan="auto"`` measures with these default values. A file keeps the measurements, so the next
    start measures only new devices.

    Args:
        budget_seconds: About how long measuring may take. Each kind of layer is run on each device
            in any case.
        micro_batch_sizes: The numbers of samples of the micro-batches to try; by default 1, 2, 4, …
            up to the training batch.
        dtypes: The dtypes to try for layers on workers, besides the Trainer's ``precision``; by
            default float32, and every useful dtype of a device if the precision is slow there.
        path: The file to read and write; by default a file in the user's cache folder
            (``$XDG_CACHE_HOME/lightning-hetero/profiles``, ``~/.cache`` by default).
        force: Measure again, even if the file has the measurements.
    """

    def __init__(
        self,
        budget_seconds: float = 60.0,
        micro_batch_sizes: Sequence[int] | None = None,
        dtypes: Sequence[Dtype] | None = None,
        path: str | Path | None = None,
        force: bool = False,
    ) -> None:
        self.profiling_options = ProfilingOptions(
            budget_seconds=budget_seconds,
            micro_batch_sizes=None if micro_batch_sizes is None else tuple(micro_batch_sizes),
            dtypes=None if dtypes is None else tuple(dtypes),
            path=None if path is None else Path(path),
            force=force,
        )
