"""Local worker processes: they start with a listening socket of this process and end with it.

A worker's standard input is a pipe that only this process holds. When this process ends, by a
return, an exception or kill -9, the pipe closes and the worker exits, so no orphan is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from dataclasses import dataclass

from ..errors import WorkerError
from ..model.allowed_imports import Allowed
from ..transport.address import Address
from ..transport.deadlines import Deadlines
from ..transport.handshake import address_of, listen

logger = logging.getLogger(__name__)

# Importing torch takes seconds, and many on a busy machine. A process that dies is noticed sooner:
# its socket closes with it.
START_SECONDS = 60.0


@dataclass(frozen=True)
class LocalWorker:
    """A worker process on this machine."""

    name: str
    address: Address
    process: subprocess.Popen[bytes]

    def tell_to_end(self) -> None:
        """Ask the process to end; `stop` waits for it."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def stop(self, patience_seconds: float) -> None:
        """End the process; kill it if it does not end in time."""
        self.tell_to_end()
        try:
            self.process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            logger.warning("%s did not end within %s s; killing it", self.name, patience_seconds)
            self.process.kill()
            self.process.wait()


def local_worker_names(count: int) -> list[str]:
    """The names of local workers in a plan."""
    return [f"local-{number}" for number in range(1, count + 1)]


def start_local_workers(
    count: int, threads: int, allowed: Allowed | None = None
) -> list[LocalWorker]:
    """Start worker processes on free loopback ports, with this many compute threads each.

    They search for modules where this process does, but import only allowed ones for layers: other
    users of this machine can reach their ports too.

    Raises:
        WorkerError: If a process cannot be started; the others are ended then.
    """
    workers: list[LocalWorker] = []
    try:
        for name in local_worker_names(count):
            workers.append(_start(name, threads, allowed or Allowed()))
    except BaseException:
        stop_local_workers(workers)
        raise
    return workers


def stop_local_workers(workers: list[LocalWorker], deadlines: Deadlines | None = None) -> None:
    """End the processes."""
    for worker in workers:
        worker.tell_to_end()
    for worker in workers:
        worker.stop((deadlines or Deadlines()).stop_seconds)


def _start(name: str, threads: int, allowed: Allowed) -> LocalWorker:
    listener = listen(Address("127.0.0.1", 0))
    command = [sys.executable, "-m", "lightning_hetero", "worker"]
    command += ["--listen", str(address_of(listener)), "--listen-fd", str(listener.fileno())]
    command += ["--threads", str(threads), "--log-level", "WARNING", "--stop-with-stdin"]
    command += [f"--allow={package}" for package in allowed.packages]
    command += ["--script", *allowed.script] if allowed.script else []
    with listener:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own module
                command,
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                # Ctrl-C reaches only the coordinator, which then ends its workers in order.
                start_new_session=True,
                env={**os.environ, **_same_search_path(), "OMP_NUM_THREADS": str(threads)},
            )
        except OSError as error:
            raise WorkerError(f"The local worker {name} cannot be started: {error}.") from error
        return LocalWorker(name, address_of(listener), process)


def _same_search_path() -> dict[str, str]:
    """Environment variables that give another interpreter this one's module search path."""
    folders = [os.path.abspath(folder) for folder in sys.path]
    # Without PYTHONSAFEPATH, `python -m` puts the working directory first.
    return {"PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}


def threads_per_process(num_processes: int) -> int:
    """Compute threads for each of several processes on this machine."""
    return max(1, usable_cores() // num_processes)


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
