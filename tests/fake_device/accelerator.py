"""The fake device for Lightning: `Trainer(accelerator=FakeAccelerator(), devices=[1])`."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator

from . import KIND, NUM_DEVICES


class FakeAccelerator(Accelerator):
    """Chooses the device of a thread, as Lightning's accelerator for CUDA does."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        """Nothing is left of a run."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices)) if isinstance(devices, int) else list(devices)

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(KIND, index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return NUM_DEVICES

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return KIND
