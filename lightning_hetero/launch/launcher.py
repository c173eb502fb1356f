"""Launchers start workers for a run: the interface, `Joining`, and commands such as `srun`.

A launcher starts a command somewhere, and starts it again if its engine can. Engines do not carry
tensors: each worker dials the coordinator, and neighbors dial each other. `Joining` only waits for
workers. A `Command` is a program such as `ssh` or `srun`, as a process here. Its output goes to a
file without a name; the last lines explain why it has ended.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Protocol, runtime_checkable

from ..errors import PlanError, WorkerError
from ..transport.address import Address
from ..transport.token import Token
from ..worker_sources import Launcher

logger = logging.getLogger(__name__)

# Only to ask the system for its routes; this sends no packet.
_ANY_PORT = 9
_FAR_AWAY = "192.0.2.1"
# For a command to end after its input has ended, and then after SIGTERM.
STOP_SECONDS = 5.0
_MOST_TOLD_BYTES = 1500
# What ends at once, as ssh to a machine that is starting, is started again after this time.
BETWEEN_STARTS_SECONDS = 3.0
# Lets the system end a process with its parent by SIGTERM (PR_SET_PDEATHSIG), then runs a program.
# The parent may have ended before.
_ENDING_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


@runtime_checkable
class RestartingLauncher(Launcher, Protocol):
    """A launcher for an engine that does not restart workers by itself."""

    def start_again(self, name: str) -> str:
        """Start the worker of a name once more if its command has ended.

        Returns:
            A sentence on the start and its reason; empty without a start.
        """


@dataclass
class Joining:
    """Waits for workers; you start them by ``lightning-hetero worker --join``.

    Plans call a worker by its own name (``--name``).

    Args:
        listen: Where this process waits for workers, as ``host:port``. An address beyond loopback
            needs a token.
        least: How many workers the run needs. If the plan names its workers, the run waits for
            these instead.
        most: How many workers the run takes, in the order of their arrival; by default all.
        wait_seconds: How long to wait for them.

    Raises:
        PlanError: If an argument is invalid.
    """

    listen: str = "0.0.0.0:7070"
    least: int = 1
    most: int | None = None
    wait_seconds: float = 300.0
    brings_token: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_wishes(self)

    def start(self, join: Address, token: Token | None) -> None:
        """Do not start workers: the user starts them."""

    def stop(self) -> None:
        """Leave the workers alone: they dial again by themselves."""

    def faults(self, is_late: bool) -> list[str]:
        """Always empty: a worker is unknown before it joins."""
        return []


def check_wishes(
    launcher: Launcher, num_started: float = math.inf, join: str | None = None
) -> None:
    """Check the numbers and the addresses of a launcher.

    Args:
        launcher: The launcher.
        num_started: How many workers it starts; infinite if unknown.
        join: The address for its workers to dial, if the user names it.

    Raises:
        PlanError: With the name of the argument.
    """
    name = type(launcher).__name__
    for address in filter(None, (join, launcher.listen)):
        Address.parse(address)
    if not _is_count(launcher.least):
        raise PlanError(
            f"The argument `least` of {name} is {launcher.least!r}; it must be a whole number "
            "from 1."
        )
    if launcher.least > num_started:
        raise PlanError(
            f"The argument `least` of {name} is {launcher.least}, and {name} starts "
            f"{num_started} at most; lower `least`, or let it start more workers."
        )
    if launcher.most is not None and not (
        _is_count(launcher.most) and launcher.most >= launcher.least
    ):
        raise PlanError(
            f"The argument `most` of {name} is {launcher.most!r}; it must be a whole number from "
            f"`least` ({launcher.least}), or None for all workers."
        )
    if not 0 < launcher.wait_seconds < math.inf:
        raise PlanError(
            f"The argument `wait_seconds` of {name} is {launcher.wait_seconds!r}; it must be a "
            "number of seconds above 0."
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def reachable(join: Address, towards: str = _FAR_AWAY) -> Address:
    """The address of a listener here, as seen from another machine.

    Args:
        join: Where this process listens, perhaps on all interfaces.
        towards: The other machine; by default one beyond all routers.
    """
    if join.host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not listened on
        return join
    try:
        # With UDP, this only chooses the interface.
        found = socket.getaddrinfo(towards, _ANY_PORT, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as asked:
                asked.connect(where)
                return Address(asked.getsockname()[0], join.port)
    except OSError:
        pass  # an alias of ssh, or a machine without a route
    return Address(socket.gethostname(), join.port)


@dataclass(frozen=True)
class Command:
    """A running command, with this process at its standard input.

    Args:
        name: Its name for people, such as ``ssh gpu1``.
        words: The program and its arguments.
        process: The process.
        printed: Its output.
        about: Its purpose in words.
        started_seconds: The moment of its start, by `time.monotonic`.
        start: Starts the same command.
    """

    name: str
    words: Sequence[str]
    process: subprocess.Popen[bytes]
    printed: IO[bytes]
    about: str
    started_seconds: float
    start: Callable[[], Command]

    @property
    def status(self) -> int | None:
        """Its exit status, once it has ended."""
        return self.process.poll()

    @property
    def printed_words(self) -> str:
        """The last lines of its output, to append to a sentence; empty without output."""
        return f" It printed: {self.last_words}" if self.last_words else ""

    @property
    def last_words(self) -> str:
        """The last lines of its output, as one line."""
        with contextlib.suppress(OSError, ValueError):
            size = os.fstat(self.printed.fileno()).st_size
            told = os.pread(
                self.printed.fileno(), _MOST_TOLD_BYTES, max(0, size - _MOST_TOLD_BYTES)
            )
            lines = told.decode(errors="replace").splitlines()
            return " ".join(line.strip() for line in lines[-4:] if line.strip())
        return ""

    def started_again(self, worker: str) -> tuple[Command, str]:
        """Start the command once more if it has ended, at most every few seconds.

        Args:
            worker: The name of the worker that the run misses.

        Returns:
            The command that runs, and a sentence with the reason and the last printed lines; this
            command and an empty text if nothing was started.
        """
        is_early = time.monotonic() < self.started_seconds + BETWEEN_STARTS_SECONDS
        if self.status is None or is_early:
            return self, ""
        said = f"`{self.name}` has ended with status {self.status}.{self.printed_words}"
        self.stop()
        return self.start(), f"{said} It is started once more, for the worker {worker}."

    def end_input(self) -> None:
        """End its standard input. This asks `ssh` and its worker to end."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def stop(self, patience_seconds: float = STOP_SECONDS) -> None:
        """Wait for its end; ask by SIGTERM, and kill it, if it does not end in time."""
        self.end_input()
        for ask in (self.process.terminate, self.process.kill):
            try:
                self.process.wait(patience_seconds)
                break
            except subprocess.TimeoutExpired:
                logger.warning("%s did not end within %g s", self.name, patience_seconds)
                ask()
        self.process.wait()
        self.printed.close()


def start_command(
    name: str,
    words: Sequence[str],
    line: str | None = None,
    ends_with_us: bool = False,
    about: str = "",
) -> Command:
    """Start a command; Ctrl-C does not reach it.

    Args:
        name: Its name for people.
        words: The program and its arguments.
        line: The first line of its standard input, if any; the input stays open.
        about: Its purpose in words.
        ends_with_us: Whether the system ends the command by SIGTERM when this process, or the
            calling thread, ends, if the system can. Leave it out if the command ends with its
            input.

    Raises:
        WorkerError: If the program cannot be started.
    """
    guarded = _ending_with_us(words) if ends_with_us else words
    printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
    try:
        process = subprocess.Popen(  # noqa: S603 - the user's own words, without a shell
            guarded,
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        printed.close()
        raise WorkerError(
            f"{words[0]!r} cannot be started: {error.strerror or error}. Install it, or name its "
            "path."
        ) from error
    if line is not None and process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
    again = partial(start_command, name, words, line, ends_with_us, about)
    return Command(name, words, process, printed, about, time.monotonic(), again)


def _ending_with_us(words: Sequence[str]) -> Sequence[str]:
    """A command line for the same words; the system ends its process together with this one."""
    if not sys.platform.startswith("linux") or shutil.which(words[0]) is None:
        return words
    python = [sys.executable, "-I", "-S", "-c", _ENDING_WITH_PARENT]
    return [*python, str(os.getpid()), *words]
