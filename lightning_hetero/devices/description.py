"""What this process computes on: the device's name, its memory, what it multiplies in, versions.

What this process runs on, as it tells whoever it talks to.

How a device is: memory, temperature, power. What cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import resource
import shutil
import socket
import statistics
import sys
import sysconfig
import time
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
import transformers
from transformers.utils.import_utils import is_flash_attn_2_available

from ..plan import Dtype
from ..protocol.messages import DeviceDescribed, Equipment
from ..protocol.tensors import dtype_name
from ..version import __version__
from .memory import free_cached_memory, synchronize

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_OPTIONAL_LIBRARIES = ("peft", "bitsandbytes")


def equipment_here(device: torch.device) -> Equipment:
    """The equipment of this process, if it computes on the device."""
    versions = _versions()
    return Equipment(
        versions=versions,
        device=str(device),
        device_name=_device_name(device),
        memory_bytes=_memory_bytes(device),
        dtypes=[dtype_name(dtype) for dtype in _DTYPES if _computes_in(device, dtype)],
        capabilities=_capabilities(device, versions),
    )


def _versions() -> dict[str, str]:
    found: dict[str, str | None] = {
        "lightning-hetero": __version__,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "transformers": transformers.__version__,
        **{name: _version_of(name) for name in _OPTIONAL_LIBRARIES},
    }
    return {name: version for name, version in found.items() if version}


def _version_of(library: str) -> str | None:
    """Without importing it, which may take seconds."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return _processor()
    library = getattr(torch, device.type)
    if hasattr(library, "get_device_name"):
        return str(library.get_device_name(device))
    return f"{device.type} of {_processor()}"


def _processor() -> str:
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def _computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        square = torch.ones(2, 2, dtype=dtype, device=device)
        return bool((square @ square).sum() == 8)
    except (RuntimeError, TypeError):
        return False


def _capabilities(device: torch.device, versions: dict[str, str]) -> list[str]:
    is_gpu = device.type != "cpu"
    found = {
        "sdpa": True,
        "flash_attention_2": is_gpu and is_flash_attn_2_available(),
        "nf4": "bitsandbytes" in versions,
        "compile": _compiles(device),
    }
    return [name for name, is_there in found.items() if is_there]


def _compiles(device: torch.device) -> bool:
    """Whether `torch.compile` finds what it makes programs with: all of it wants Python's headers,
    and a GPU also triton."""
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return False
    compilers = (os.environ.get("CXX"), "c++", "g++", "clang++")
    has_compiler = any(shutil.which(name) for name in compilers if name)
    is_gpu = device.type != "cpu"
    return has_compiler and (not is_gpu or importlib.util.find_spec("triton") is not None)


# A dtype in which a device multiplies so many times slower than in float32 is of no use there.
_ABSURDLY_SLOWER = 4.0
# Large enough to keep a GPU busy; a processor takes long for half precision.
_TRIED_SIZE = 2048
_TRIED_SIZE_ON_CPU = 256
_CANDIDATES: tuple[Dtype, ...] = ("bfloat16", "float16")


def describe_device(device: torch.device, kept_bytes: int = 0) -> DeviceDescribed:
    """What this process has; tries its dtypes for a moment.

    Args:
        device: Where it computes.
        kept_bytes: What it holds there and gives back when the memory is asked for.
    """
    free_bytes, base_bytes = _memory(device, kept_bytes)
    equipment = equipment_here(device)
    threads = f", {_count(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    return DeviceDescribed(
        equipment.device_name + threads,
        f"{_machine()}/{_memory_name(device)}",
        free_bytes,
        base_bytes,
        ["float32", *(dtype for dtype in _CANDIDATES if _is_useful(device, dtype))],
        equipment.versions,
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _memory_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
    return "main" if device.type in ("cpu", "mps") else str(device)


def _memory(device: torch.device, kept_bytes: int) -> tuple[int, int]:
    """What is free on the device, and what this process takes of it."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        # The driver's own share is gone already from what is free; what is kept is reserved.
        return free_bytes + torch.cuda.memory_reserved(device), 0
    free_cached_memory(device)  # what a run before has freed is not taken
    return free_main_memory() + kept_bytes, max(0, resident_bytes() - kept_bytes)


def free_main_memory() -> int:
    """What the machine has free, or this process's control group or limit still allows."""
    found = [_available_bytes()]
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / f"memory.{name}" for name in ("max", "current"))
        found.append(int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):
        pass  # no such group, or no limit
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes != resource.RLIM_INFINITY:
        found.append(limit_bytes - _virtual_bytes())
    return max(0, min(found))


def _available_bytes() -> int:
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Where nobody says what is free, half of what there is.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def resident_bytes() -> int:
    """Main memory that this process takes."""
    return _statm(1, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _maxrss_unit())


def _virtual_bytes() -> int:
    return _statm(0, 0)


def _statm(column: int, otherwise: int) -> int:
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return otherwise
    return int(pages.read_text().split()[column]) * os.sysconf("SC_PAGE_SIZE")


def _maxrss_unit() -> int:
    return 1 if sys.platform == "darwin" else 1024


def _is_useful(device: torch.device, dtype: Dtype) -> bool:
    try:
        seconds = _multiply_seconds(device, getattr(torch, dtype))
    except RuntimeError:
        return False
    return seconds < _ABSURDLY_SLOWER * _multiply_seconds(device, torch.float32)


def _multiply_seconds(device: torch.device, dtype: torch.dtype) -> float:
    size = _TRIED_SIZE_ON_CPU if device.type == "cpu" else _TRIED_SIZE
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    run = partial(_seconds, device, matrix)
    run()
    return statistics.median(run() for _ in range(3))


def _seconds(device: torch.device, matrix: torch.Tensor) -> float:
    synchronize(device)
    start = time.perf_counter()
    torch.mm(matrix, matrix)
    synchronize(device)
    return time.perf_counter() - start


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
