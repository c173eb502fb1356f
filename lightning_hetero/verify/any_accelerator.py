"""Lightning's accelerator for a kind of device that Lightning does not know, such as Intel's."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.strategies import SingleDeviceStrategy


class AnyAccelerator(Accelerator):
    """Trains on devices of torch's present accelerator, by its functions for any kind of them."""

    def setup_device(self, device: torch.device) -> None:
        """Make a device the current one, as Lightning does with CUDA."""
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        """Nothing is left of a run."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Nothing: the check measures by itself."""
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        """The numbers of the devices."""
        return list(range(devices)) if isinstance(devices, int) else list(devices)

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """The devices of these numbers."""
        kind = torch.accelerator.current_accelerator()
        return [] if kind is None else [torch.device(kind.type, number) for number in devices]

    @staticmethod
    def auto_device_count() -> int:
        """How many devices there are."""
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        """Whether there is an accelerator."""
        return torch.accelerator.is_available()

    @staticmethod
    def name() -> str:
        """The name that Lightning shows."""
        return "accelerator"


def options_for(device: torch.device) -> dict[str, Any]:
    """The Trainer's options to train on a device alone."""
    name, devices = device.type, 1 if device.index is None else [device.index]
    if name in AcceleratorRegistry:
        return {"accelerator": name, "devices": devices}
    # Lightning would choose the processor.
    strategy = SingleDeviceStrategy(device)
    return {"accelerator": AnyAccelerator(), "devices": devices, "strategy": strategy}
