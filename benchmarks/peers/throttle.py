"""Slows a process, with its children, to a share of its core: by the kernel's quota or by stopping
them in turns.

A worker serves each session in a child of its own, so the children to come are slowed too.

A quota is the exact one, and needs root and a cgroup tree (version 1 or 2) that may be written to.
Otherwise a small process stops the slow one and lets it go on again every few milliseconds; it runs
on the slow core, so that its own work costs nobody else anything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import psutil

from benchmarks.processes import environment, on_core

How = Literal["cgroup", "signals"]
PERIOD_SECONDS = 0.008
# The kernel's shortest quota.
_LEAST_SECONDS = 0.001
CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def slowed(pid: int, share: float, how: How, core: int) -> Iterator[None]:
    """Let the process and its children have this share of their core."""
    if share == 1:
        yield
    elif how == "cgroup":
        with _quota(pid, share):
            yield
    else:
        with _duty_cycle(pid, share, core):
            yield


def best_way() -> How:
    """A quota where one may be set."""
    try:
        with _quota(None, 0.5):
            return "cgroup"
    except OSError:
        return "signals"


@contextmanager
def _quota(pid: int | None, share: float) -> Iterator[None]:
    """A cgroup of our own with a quota, and the process with its children in it."""
    is_second_version = (CGROUPS / "cgroup.controllers").exists()
    parent = CGROUPS if is_second_version else CGROUPS / "cpu"
    group = parent / f"lightning-hetero-{os.getpid()}"
    microseconds = round(max(PERIOD_SECONDS, _LEAST_SECONDS / share) * 1e6)
    group.mkdir()
    try:
        if is_second_version:
            _write(group / "cpu.max", f"{round(microseconds * share)} {microseconds}")
        else:
            _write(group / "cpu.cfs_period_us", microseconds)
            _write(group / "cpu.cfs_quota_us", round(microseconds * share))
        before = None if pid is None else _cpu_group(pid, is_second_version)
        if pid is not None:
            for each in _family(pid):
                _write(group / "cgroup.procs", each)
        yield
        if pid is not None:
            for each in (group / "cgroup.procs").read_text().split():
                # It may have ended meanwhile.
                with contextlib.suppress(OSError):
                    _write(parent / str(before).lstrip("/") / "cgroup.procs", each)
    finally:
        _remove(group)


def _family(pid: int) -> list[int]:
    """The process and all its children; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]
    return []


def _signal(pid: int, number: signal.Signals) -> bool:
    """Send a signal to the process and its children; whether it is still alive."""
    family = _family(pid)
    for each in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)
    return bool(family)


def _write(file: Path, value: object) -> None:
    # A file that the kernel does not offer must not be made.
    with file.open("r+") as stream:
        stream.write(str(value))


def _remove(group: Path) -> None:
    """Remove the cgroup; a process that has just ended is still counted for a moment."""
    for _ in range(100):
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                _write(group.parent / "cgroup.procs", pid)
        with contextlib.suppress(OSError):
            return group.rmdir()
        time.sleep(0.05)
    return group.rmdir()


def _cpu_group(pid: int, is_second_version: bool) -> str:
    """The cgroup that the process is in now."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if is_second_version and not controllers or "cpu" in controllers.split(","):
            return group
    return "/"


@contextmanager
def _duty_cycle(pid: int, share: float, core: int) -> Iterator[None]:
    """A process that stops and continues the other one."""
    command = [*on_core(core), sys.executable, "-m", "benchmarks.peers.throttle"]
    command += [str(pid), str(share)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment())
    try:
        yield
    finally:
        process.terminate()
        process.wait()
        _signal(pid, signal.SIGCONT)


def alternate(pid: int, share: float) -> None:
    """Let the process run for its share of each period, until it or the caller ends."""
    parent = os.getppid()
    start = time.monotonic()
    while os.getppid() == parent and _signal(pid, signal.SIGCONT):
        _sleep_until(start + share * PERIOD_SECONDS)
        _signal(pid, signal.SIGSTOP)
        # A period that came late is not made up for: it would run the process at full speed.
        start = max(start + PERIOD_SECONDS, time.monotonic())
        _sleep_until(start)
    _signal(pid, signal.SIGCONT)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    alternate(int(sys.argv[1]), float(sys.argv[2]))
