"""Intel GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from .device import Accelerator


class Xpu(Accelerator, device_type="xpu"):
    """One Intel GPU."""

    is_in_torch = torch.xpu._is_compiled()

    out_of_memory_texts = ("out of memory", "OUT_OF_DEVICE_MEMORY")

    def untaken_bytes(self) -> int:
        # Some drivers do not report the memory of other processes.
        with contextlib.suppress(RuntimeError):
            return super().untaken_bytes()
        return self.total_bytes() - self.used_bytes()

    def sensor_functions(self) -> dict[str, Callable[[], float]]:
        # To read the power would take 100 ms.
        return {"temperature_celsius": lambda: torch.xpu.temperature(self.torch_device)}
