"""The processes of local workers, found as any other process of this machine is."""

from __future__ import annotations

import psutil


def local_workers() -> list[psutil.Process]:
    """The local workers that this process has started and not yet ended, in their order."""
    children = [child for child in psutil.Process().children() if _is_local_worker(child)]
    return sorted(children, key=lambda child: child.create_time())


def _is_local_worker(process: psutil.Process) -> bool:
    try:
        return "--stop-with-stdin" in process.cmdline()
    except psutil.Error:
        return False  # it has ended meanwhile
