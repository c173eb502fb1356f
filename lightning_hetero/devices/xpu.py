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

    def free_and_base_bytes(self, kept_bytes: int) -> tuple[int, int]:
        # Some drivers do not tell what other processes take.
        with contextlib.suppress(RuntimeError):
            return super().free_and_base_bytes(kept_bytes)
        return self.total_bytes(), 0

    def sensor_functions(self) -> dict[str, Callable[[], float]]:
        # To read the power would take 100 ms.
        return {"temperature_celsius": lambda: torch.xpu.temperature(self.torch_device)}
