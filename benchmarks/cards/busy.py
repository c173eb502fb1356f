"""The busy share: how much of a step's time the card runs kernels or copies."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch.autograd import DeviceType

from lightning_hetero.devices.device import device_for


def busy_length(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals, which may overlap; in their unit."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def share_of(events: Iterable[Any], seconds: float) -> dict[str, Any]:
    """What the events of a trace say of a step that took so many seconds.

    Raises:
        RuntimeError: If the trace has no kernel.
    """
    intervals = [
        (event.time_range.start, event.time_range.end)  # in microseconds
        for event in events
        if event.device_type != DeviceType.CPU
    ]
    if not intervals:
        raise RuntimeError("The trace has no kernel of this card; is CUPTI allowed here?")
    share = busy_length(intervals) / 1e6 / seconds
    return {"busy_share": share, "step_seconds": seconds, "num_kernels": len(intervals)}


class BusyShare(pl.Callback):
    """Traces one optimizer step, the last of a run, in this process.

    Args:
        device: The traced card.
        num_steps: The optimizer steps of the run.

    Attributes:
        found: After the run, ``busy_share``, ``step_seconds`` and ``num_kernels``; before it empty.
    """

    def __init__(self, device: torch.device, num_steps: int) -> None:
        self._device, self._num_steps = device_for(device), num_steps
        kind = getattr(torch.profiler.ProfilerActivity, device.type.upper())
        self._profiler = torch.profiler.profile(activities=[kind])
        self._start = 0.0
        self.found: dict[str, Any] = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        count = trainer.accumulate_grad_batches
        if batch_idx == count * (self._num_steps - 1):
            self._profiler.start()
            self._device.synchronize()
            self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == trainer.accumulate_grad_batches * self._num_steps:
            self._device.synchronize()
            seconds = time.perf_counter() - self._start
            self._profiler.stop()
            self.found = share_of(self._profiler.events() or [], seconds)
