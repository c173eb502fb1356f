"""Workers on this machine, started by a run.

They start with a listening socket of this process and end with it. The standard input of such a
worker is one end of a pair of sockets, the leash; only this process holds the other end. Over the
leash the worker gets the run's token, which keeps other users of the machine out, and reports when
it is ready. When this process ends, by a return, an exception or kill -9, the leash closes and the
worker exits. So orphans are impossible.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import WorkerError
from ..model.allowed_imports import Allowed
from ..transport.address import Address
from ..transport.deadlines import Deadlines
from ..transport.handshake import address_of, listen
from ..transport.peer_process import cpu_seconds_of
from ..transport.tls import Credentials
from ..transport.token import Token

logger = logging.getLogger(__name__)

# Importing torch takes seconds of computing, and minutes on a busy machine. If a worker uses no CPU
# time for so long, it does not import any more.
START_SECONDS = 60.0
# How often the waiting thread looks at the process of its worker.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class LocalWorker:
    """A worker process on this machine.

    Args:
        name: Its name in plans.
        address: Where it listens.
        process: The process.
        leash: This process's end of the worker's standard input.
        credentials: Prove possession of this run's token.
    """

    name: str
    address: Address
    process: subprocess.Popen[bytes]
    leash: socket.socket
    credentials: Credentials

    def wait_until_ready(
        self,
        idle_seconds: float = START_SECONDS,
        cpu_seconds: Callable[[int], float | None] | None = None,
    ) -> None:
        """Wait until the worker has imported its libraries, however long the machine needs.

        Args:
            idle_seconds: How long the process may go without CPU time during its start.
            cpu_seconds: Returns the CPU time of a process, if it is known.

        Raises:
            WorkerError: If the process ends, or goes without CPU time for too long.
        """
        find = cpu_seconds or cpu_seconds_of
        self.leash.settimeout(min(_LOOK_SECONDS, idle_seconds))
        used_seconds, since = find(self.process.pid), time.monotonic()
        while (is_ready := self._hears()) is None:
            before, used_seconds = used_seconds, find(self.process.pid)
            if used_seconds is None or used_seconds != before:
                since = time.monotonic()
            elif time.monotonic() - since > idle_seconds:
                raise WorkerError(
                    f"The local worker {self.name} (process {self.process.pid}) hangs while it "
                    f"starts: it has used no CPU time for {idle_seconds:.0f} s. Look for the "
                    "cause of its wait, such as a network drive with the libraries, and start "
                    "again."
                )
        if not is_ready:
            raise WorkerError(
                f"The local worker {self.name} (process {self.process.pid}) ended while it "
                "started; its output shows the reason."
            )

    def _hears(self) -> bool | None:
        """True if the worker is ready, false if it is gone, and None while it is silent."""
        try:
            return bool(self.leash.recv(1))
        except TimeoutError:
            return None
        except OSError:
            return False

    def tell_to_end(self) -> None:
        """Ask the process to end; `stop` waits for it."""
        # A forked process, such as one of a data loader, may hold a copy of the leash.
        with contextlib.suppress(OSError):
            self.leash.shutdown(socket.SHUT_RDWR)
        self.leash.close()

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
    devices: Sequence[str],
    threads: int,
    allowed: Allowed | None = None,
    token: Token | None = None,
) -> list[LocalWorker]:
    """Start a worker process on a free loopback port for each of these devices.

    They search for modules where this process does, but import only allowed ones for layers. Other
    users of this machine can reach their ports. So they serve only processes with a new token,
    known to this process and the workers only. They are not ready yet; see `wait_until_ready`.

    Args:
        devices: The device of each worker, as torch calls it.
        threads: The compute threads of each on the CPU.
        allowed: The allowed classes of layers; by default the classes of torch and transformers.
        token: The token, if others are to use the workers too.

    Raises:
        WorkerError: If a process cannot be started; the others are ended then.
    """
    workers: list[LocalWorker] = []
    token = token or Token.new()
    credentials = Credentials(token)
    try:
        for name, device in zip(local_worker_names(len(devices)), devices, strict=True):
            listener = listen(Address("127.0.0.1", 0))
            where = address_of(listener)
            process, leash = _start(name, listener, device, threads, allowed or Allowed())
            workers.append(LocalWorker(name, where, process, leash, credentials))
            leash.sendall(token.to_text().encode() + b"\n")
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


def _start(
    name: str, listener: socket.socket, device: str, threads: int, allowed: Allowed
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a listening process; returns the process and this process's end of its leash."""
    command = [sys.executable, "-m", "lightning_hetero", "worker"]
    command += ["--listen", str(address_of(listener)), "--listen-fd", str(listener.fileno())]
    command += ["--device", device, "--threads", str(threads), "--log-level", "WARNING"]
    command.append("--stop-with-stdin")
    command += [f"--allow={package}" for package in allowed.packages]
    command += ["--script", *allowed.script] if allowed.script else []
    leash, its_end = socket.socketpair()
    with listener, its_end:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own module
                command,
                stdin=its_end.fileno(),
                pass_fds=[listener.fileno()],
                # Ctrl-C reaches only the coordinator, which then ends its workers in order.
                start_new_session=True,
                env={**os.environ, **_same_search_path(), "OMP_NUM_THREADS": str(threads)},
            )
        except OSError as error:
            leash.close()
            raise WorkerError(f"The local worker {name} cannot be started: {error}.") from error
    return process, leash


def _same_search_path() -> dict[str, str]:
    """Environment variables to give another interpreter this one's module search path."""
    folders = [os.path.abspath(folder) for folder in sys.path]
    # Without PYTHONSAFEPATH, `python -m` puts the working directory first.
    return {"PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}


def threads_per_process(num_processes: int) -> int:
    """Compute threads for each of several processes on this machine."""
    return max(1, usable_cores() // num_processes)


def usable_cores() -> int:
    """The number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
