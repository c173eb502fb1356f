"""One memory arena of the C library for all threads of the process, which keeps no more than asked.

glibc gives each thread an arena of its own, up to eight for a core. Micro-batches run on threads,
but one at a time: each would keep the memory of one micro-batch for itself, and give back and
fault in again what the next one could have used. On a CPU that is a third more memory for the
coordinator, and 3 % of its time. Arenas that are there already stay in use, therefore it is to be
asked for before there are threads.

What is freed between pieces that are not, the arena keeps. After work of another kind than what
comes next, as measuring is, that may be as much as training takes.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

_M_ARENA_MAX = -8
"""Of ``mallopt`` in glibc's ``malloc.h``."""


@cache
def share_one_arena() -> bool:
    """Let threads to come use the first arena; once for the process, and where it is glibc's.

    Returns:
        Whether it has been set. It has not where the user has chosen a number of arenas.
    """
    is_chosen = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if is_chosen or not _is_glibc():
        return False
    return bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1))


def give_back_free_memory() -> bool:
    """Give the system what nobody uses any more, where the C library is glibc.

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
