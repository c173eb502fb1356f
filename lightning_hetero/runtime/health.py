"""How a device is: memory, temperature, power. What cannot be read is left out."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

import torch

HWMON = Path("/sys/class/hwmon")
"""Where Linux shows sensors."""

# Drivers of processors' sensors; a machine has many others, of disks and mainboards.
_PROCESSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")


def health_of(device: torch.device, hwmon: Path = HWMON) -> dict[str, float]:
    """Bytes, degrees and watts by names that end in their units.

    On CUDA memory is the allocator's word, elsewhere what the process has of main memory. Sensors
    of a GPU are read through NVIDIA's library where it is installed (``nvidia-ml-py``), those of a
    processor from Linux.
    """
    if device.type == "cuda":
        found = {
            "memory_bytes": float(torch.cuda.memory_allocated(device)),
            "memory_peak_bytes": float(torch.cuda.max_memory_allocated(device)),
        }
        return found | _cuda_sensors(device)
    return _process_memory() | (processor_sensors(hwmon) if device.type == "cpu" else {})


def _cuda_sensors(device: torch.device) -> dict[str, float]:
    found: dict[str, float] = {}
    # Without the library torch raises ModuleNotFoundError, a device that lacks a sensor the others.
    with contextlib.suppress(ImportError, RuntimeError, AttributeError):
        found["temperature_celsius"] = float(torch.cuda.temperature(device))
        found["power_watts"] = torch.cuda.power_draw(device) / 1000
    return found


def processor_sensors(hwmon: Path = HWMON) -> dict[str, float]:
    """The hottest of a processor's temperatures, and its power where a driver tells it."""
    celsius: list[float] = []
    watts: list[float] = []
    for folder in hwmon.glob("hwmon*"):
        if _text(folder / "name") in _PROCESSORS:
            celsius += _numbers(folder, "temp*_input")
            watts += _numbers(folder, "power*_average")
    found = {}
    if celsius:
        found["temperature_celsius"] = max(celsius) / 1e3
    if watts:
        found["power_watts"] = sum(watts) / 1e6
    return found


def _numbers(folder: Path, pattern: str) -> list[float]:
    return [float(text) for text in map(_text, folder.glob(pattern)) if text.lstrip("-").isdigit()]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _process_memory() -> dict[str, float]:
    unit = 1 if sys.platform == "darwin" else 1024
    peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    resident = _resident_bytes()
    if resident is None:
        return {"memory_peak_bytes": peak}
    # The kernel brings the peak up to date later than what it is the peak of.
    return {"memory_bytes": resident, "memory_peak_bytes": max(peak, resident)}


def _resident_bytes() -> float | None:
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return None
    return float(int(pages) * resource.getpagesize())
