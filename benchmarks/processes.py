"""What several benchmarks need: cores, worker processes, memory, the machine in a line."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class WorkerProcess:
    """A worker that listens."""

    address: str
    worker_pid: int

    @property
    def pid(self) -> int:
        """The process that serves the present session, or will serve the next one."""
        children = psutil.Process(self.worker_pid).children()
        return max(children, key=lambda child: child.create_time()).pid


def be_quiet() -> None:
    """No advice from Lightning, and one compute thread."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def two_cores() -> tuple[int, int]:
    """The first two cores that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit(f"This benchmark pins two processes to two cores, and here is only {cores}.")
    return cores[0], cores[1]


def pin(core: int) -> None:
    """Keep this process, its threads to come included, on one core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def on_core(core: int) -> list[str]:
    """What goes before a command that shall run on one core."""
    return ["taskset", "-c", str(core)]


def dying_with_parent() -> list[str]:
    """What goes before a command whose process shall not outlive a killed parent."""
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def environment() -> dict[str, str]:
    """That of a process with one compute thread which finds this repository."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@contextmanager
def worker_process(
    before: Sequence[str],
    host: str = "127.0.0.1",
    program: Sequence[str] | None = None,
    device: str = "cpu",
    token_file: Path | None = None,
    allow: str | None = None,
) -> Iterator[WorkerProcess]:
    """A worker with one compute thread, ended at the end.

    Args:
        before: What goes before the command, such as `on_core`.
        host: Where it listens, on a free port.
        program: What is run instead of ``python -m lightning_hetero``.
        device: What it computes on.
        token_file: The token by which it knows its coordinator, over TLS; None for its default.
        allow: The package from which it may import classes of layers.
    """
    command = [*before, *(program or [sys.executable, "-m", "lightning_hetero"])]
    command += ["worker", "--listen", f"{host}:0", "--threads", "1", "--device", device]
    command += ["--token-file", str(token_file)] if token_file else []
    command += ["--allow", allow] if allow else []
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    said: deque[str] = deque(maxlen=20)
    try:
        for line in process.stderr:
            said.append(line)
            if "listening on" in line:
                break
        else:
            raise RuntimeError(f"The worker has ended before it listened: {''.join(said)}")
        # What nobody reads would fill the pipe and stop the worker.
        threading.Thread(target=said.extend, args=[process.stderr], daemon=True).start()
        yield WorkerProcess(line.split("listening on ")[1].split(",")[0], process.pid)
    finally:
        process.terminate()
        process.wait()


def memory_bytes(pid: int | str, entry: str) -> int:
    """``VmRSS`` or ``VmHWM`` of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kibibytes,) = re.findall(rf"{entry}:\s+(\d+) kB", status)
    return int(kibibytes) * 1024


def wide_console() -> Console:
    """A console whose tables are not squeezed when they go to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def machine() -> str:
    """The processor, Python and torch, for result tables."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text() if info.exists() else "")
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, Python {platform.python_version()}, torch {torch.__version__}"
