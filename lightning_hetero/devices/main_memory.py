"""Main memory: free bytes, this process's bytes, and the arenas of the C library.

glibc gives each thread an arena of its own, up to eight per core. Micro-batches run on threads, but
one at a time: each arena would keep the memory of one micro-batch, and the next micro-batch would
fault in pages again, although another arena holds them. On a CPU that costs the coordinator a third
more memory and 3 % of its time. Existing arenas stay in use, so call `share_one_arena` before the
process starts threads.

An arena keeps free pieces below a piece in use. After other work than training, such as measuring,
they may take as much memory as training does; `give_back_free_memory` returns them.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from functools import cache
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from torch import Tensor

_M_ARENA_MAX = -8
"""Parameter of ``mallopt`` in glibc's ``malloc.h``."""

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def total_main_memory() -> int:
    """Bytes of main memory of this machine."""
    return int(psutil.virtual_memory().total)


def free_main_memory() -> int:
    """Bytes still available to this process, by the machine, its control group and its limit."""
    found = [int(psutil.virtual_memory().available)]
    try:
        limit, used = (_CONTROL_GROUP / f"memory.{name}" for name in ("max", "current"))
        found.append(int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):
        pass  # no such group, or no limit
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes != resource.RLIM_INFINITY:
        found.append(limit_bytes - int(psutil.Process().memory_info().vms))
    return max(0, min(found))


def is_in_main_memory(tensor: Tensor) -> bool:
    """Whether the processor computes with a tensor."""
    return tensor.device.type == "cpu"


def resident_bytes() -> int:
    """Main memory taken by this process."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The peak of main memory taken by this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    # The kernel updates the peak later than the present value.
    return max(peak_bytes, resident_bytes())


@cache
def share_one_arena() -> bool:
    """Make future threads use the first arena, if the C library is glibc.

    Returns:
        Whether the number of arenas was set. A number chosen by the user stays.
    """
    is_chosen = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if is_chosen or not _is_glibc():
        return False
    return bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1))


def give_back_free_memory() -> bool:
    """Return free memory to the system, if the C library is glibc.

    Returns:
        Whether there was any.
    """
    return _is_glibc() and bool(ctypes.CDLL(None).malloc_trim(0))


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):
        # Windows has no confstr, other libraries do not know the name.
        return False
