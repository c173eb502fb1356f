"""What this process computes on: the device's name, its memory, what it multiplies in, versions."""

from __future__ import annotations

import os
import resource
import socket
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..pipeline.memory import free_cached_memory, synchronize
from ..plan import Dtype
from .equipment import equipment_here

# A dtype in which a device multiplies so many times slower than in float32 is of no use there.
_ABSURDLY_SLOWER = 4.0
# Large enough to keep a GPU busy; a processor takes long for half precision.
_TRIED_SIZE = 2048
_TRIED_SIZE_ON_CPU = 256
_CANDIDATES: tuple[Dtype, ...] = ("bfloat16", "float16")


@dataclass(frozen=True)
class DeviceDescription:
    """One process and its device.

    Args:
        device: What it is, with the number of compute threads where it is a processor.
        memory: Which memory it has; processes that name the same one share it.
        free_bytes: What is free of it now.
        base_bytes: What this process takes already.
        dtypes: What the device multiplies in at a reasonable speed.
        versions: Libraries and drivers that its speed may depend on.
    """

    device: str
    memory: str
    free_bytes: int
    base_bytes: int
    dtypes: list[Dtype]
    versions: dict[str, str]


def describe_device(device: torch.device, kept_bytes: int = 0) -> DeviceDescription:
    """What this process has; tries its dtypes for a moment.

    Args:
        device: Where it computes.
        kept_bytes: What it holds there and gives back when the memory is asked for.
    """
    free_bytes, base_bytes = _memory(device, kept_bytes)
    equipment = equipment_here(device)
    threads = f", {_count(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    return DeviceDescription(
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
