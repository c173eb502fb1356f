"""A command that keeps workers running elsewhere, such as `ssh` or `srun`, as a process here.

What the command prints goes to a file without a name, whose end explains why the command has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from ..errors import WorkerError

logger = logging.getLogger(__name__)

# For a command to end after its input has ended, and then after SIGTERM.
STOP_SECONDS = 5.0
_MOST_TOLD_BYTES = 1500
# Lets the system end a process with its parent by SIGTERM (PR_SET_PDEATHSIG), then runs a program.
# The parent may have ended before.
_ENDING_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Command:
    """A command that runs, with this process at its standard input.

    Args:
        name: Its name for people, such as ``ssh gpu1``.
        words: The program and its arguments.
        process: The process.
        printed: What it prints.
    """

    name: str
    words: Sequence[str]
    process: subprocess.Popen[bytes]
    printed: IO[bytes]

    def say(self, line: str) -> None:
        """Send a line to its standard input, which stays open."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.write(line.encode() + b"\n")
                self.process.stdin.flush()

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.process.poll()

    @property
    def last_words(self) -> str:
        """The last lines that it has printed, as one line."""
        with contextlib.suppress(OSError, ValueError):
            size = os.fstat(self.printed.fileno()).st_size
            told = os.pread(
                self.printed.fileno(), _MOST_TOLD_BYTES, max(0, size - _MOST_TOLD_BYTES)
            )
            lines = told.decode(errors="replace").splitlines()
            return " ".join(line.strip() for line in lines[-4:] if line.strip())
        return ""

    def end_input(self) -> None:
        """End its standard input, which asks `ssh` and a worker on it to end."""
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


def start_command(name: str, words: Sequence[str], ends_with_us: bool = False) -> Command:
    """Start a command; Ctrl-C does not reach it.

    Args:
        name: Its name for people.
        words: The program and its arguments.
        ends_with_us: Whether the end of this process, or of the calling thread, ends the command by
            SIGTERM where the system can do that. A command that ends with its input needs it not.

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
    return Command(name, words, process, printed)


def _ending_with_us(words: Sequence[str]) -> Sequence[str]:
    """A command line that runs these words in a process that ends with this one."""
    if not sys.platform.startswith("linux") or shutil.which(words[0]) is None:
        return words
    python = [sys.executable, "-I", "-S", "-c", _ENDING_WITH_PARENT]
    return [*python, str(os.getpid()), *words]


def stop_commands(commands: Sequence[Command]) -> None:
    """End several commands at the same time."""
    for command in commands:
        command.end_input()
    for command in commands:
        command.stop()
