"""Apple GPUs: they share main memory, and work runs on after a call has returned.

Moments are taken by waiting for the device. An event of this backend gives its time only once, and
the copies to main memory wait for the device anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .device import Device
from .main_memory import resident_bytes


class Mps(Device, device_type="mps"):
    """The GPU of an Apple machine."""

    is_in_torch = torch.backends.mps.is_built()

    out_of_memory_texts = ("MPS backend out of memory",)

    @property
    def uses_main_memory(self) -> bool:
        return True

    def total_bytes(self) -> int:
        return torch.mps.recommended_max_memory()

    def used_bytes(self) -> int:
        # The system's resident memory may leave out Metal's memory.
        return max(resident_bytes(), torch.mps.driver_allocated_memory())

    def free_and_base_bytes(self) -> tuple[int, int]:
        free_bytes, base_bytes = super().free_and_base_bytes()
        # A part of main memory is not for Metal, and beyond it the system swaps.
        left_bytes = self.total_bytes() - torch.mps.driver_allocated_memory()
        return min(free_bytes, max(0, left_bytes)), base_bytes

    def limit_memory(self, num_bytes: int) -> None:
        torch.mps.set_per_process_memory_fraction(min(1.0, num_bytes / self.total_bytes()))

    def synchronize(self) -> None:
        torch.mps.synchronize()

    @classmethod
    def generator_states(cls) -> list[Tensor]:
        return [torch.mps.get_rng_state()] if torch.backends.mps.is_available() else []

    @classmethod
    def restore_generators(cls, states: list[Tensor]) -> None:
        for state in states:
            torch.mps.set_rng_state(state)

    @classmethod
    def seed_generators(cls, seed: int) -> None:
        if torch.backends.mps.is_available():
            torch.mps.manual_seed(seed)
