"""The processor: it computes in main memory, and a call returns when its work is done."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from .device import Device, processor_name
from .main_memory import give_back_free_memory, total_main_memory

# Drivers of processors' sensors; a machine has others too, of disks and mainboards.
_SENSOR_DRIVERS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
_LINUX_SENSORS = Path("/sys/class/hwmon")


class Cpu(Device, device_type="cpu"):
    """The processors of this machine."""

    out_of_memory_texts = ("can't allocate memory", "not enough memory")
    needs_triton = False
    # A processor takes long for half precision.
    trial_size = 256

    @property
    def uses_main_memory(self) -> bool:
        return True

    @property
    def has_flash_attention(self) -> bool:
        return False

    def synchronize(self) -> None:
        """Return at once: a call returns after its work."""

    def total_bytes(self) -> int:
        return total_main_memory()

    def free_cache(self) -> None:
        give_back_free_memory()

    @classmethod
    def generator_states(cls) -> list[Tensor]:
        return [torch.get_rng_state()]

    @classmethod
    def restore_generators(cls, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])

    @classmethod
    def seed_generators(cls, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    @property
    def name(self) -> str:
        return processor_name()

    @property
    def title(self) -> str:
        num_threads = torch.get_num_threads()
        return f"{self.name}, {num_threads} thread{'' if num_threads == 1 else 's'}"

    def sensors(self) -> dict[str, float]:
        return _temperature() | _power()


def _temperature() -> dict[str, float]:
    """The temperature of the processor's hottest part, if the system shows it."""
    if not hasattr(psutil, "sensors_temperatures"):
        return {}
    found = psutil.sensors_temperatures()
    degrees = [each.current for driver in _SENSOR_DRIVERS for each in found.get(driver, ())]
    return {"temperature_celsius": float(max(degrees))} if degrees else {}


def _power() -> dict[str, float]:
    """The processor's power, as shown by Linux for some processors; psutil does not read it."""
    watts = []
    for file in _LINUX_SENSORS.glob("hwmon*/power*_average"):
        with contextlib.suppress(OSError, ValueError):
            if (file.parent / "name").read_text().strip() in _SENSOR_DRIVERS:
                watts.append(int(file.read_text()) / 1e6)
    return {"power_watts": sum(watts)} if watts else {}
