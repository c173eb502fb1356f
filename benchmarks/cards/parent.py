"""Starts a process for the jobs of one place, reads its results, and ends it in time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cards.folder import ResultFolder, plain_errors
from benchmarks.cards.jobs import PARTS, Job, Machine, Result, Side
from benchmarks.processes import ROOT, dying_with_parent, environment

START_SECONDS = 60.0
"""More for the first job of a process, which imports torch and starts workers."""
END_SECONDS = 10.0


class TimeOver(Exception):
    """The minutes of the whole script are over."""


class Clock:
    """The time that is left of the script.

    Args:
        seconds: All of it.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_seconds(self) -> float:
        return self._end - time.monotonic()


def python(side: Side | None = None, more: Mapping[str, str] | None = None) -> dict[str, Any]:
    """How Python is started: where, and with which variables."""
    own = {} if side is None else side.environment
    # Without a token there is no TLS, which the user's home would bring.
    variables = {**environment(), **own, **(more or {}), "LIGHTNING_HETERO_TOKEN_FILE": ""}
    if side is None or side.core is None:
        # A process on a card may compute with all cores.
        variables.pop("OMP_NUM_THREADS")
    return {"cwd": ROOT, "env": variables}


class Child:
    """A process that does jobs in turn.

    Args:
        machine: The machine.
        side: Where it computes.
        jobs: The jobs.
        folder: For its log and its temporary files.
        variables: More variables of its environment.
    """

    def __init__(
        self,
        machine: Machine,
        side: Side,
        jobs: Sequence[Job],
        folder: ResultFolder,
        variables: Mapping[str, str],
    ) -> None:
        self._jobs, self._buffer = jobs, b""
        self.log = folder.path / "log.txt"
        with plain_errors(folder.path):
            shutil.rmtree(folder.scratch, ignore_errors=True)
            folder.scratch.mkdir()
            log = self.log.open("ab")
        given = {
            "machine": machine.as_json(),
            "side": asdict(side),
            "jobs": [asdict(job) for job in jobs],
            "folder": str(folder.scratch),
        }
        reading, writing = os.pipe()
        with log:
            self._process = subprocess.Popen(
                [*dying_with_parent(), sys.executable, "-m", "benchmarks.cards.child"]
                + [str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
                # Ctrl-C reaches only the parent, which then ends this process and its workers.
                start_new_session=True,
                **python(side, variables),
            )
        os.close(writing)
        self._pipe = reading
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed below
            self._process.stdin.write(json.dumps(given).encode())
            self._process.stdin.close()

    def results(self, clock: Clock) -> Iterator[tuple[Job, Result]]:
        """Yield each job with its result. The last one may say that the process has ended, or was
        too slow; the jobs after it are not done then.

        Raises:
            TimeOver: If the script's time is over.
        """
        more_seconds = START_SECONDS
        for job in self._jobs:
            result = self._result_of(job, more_seconds, clock)
            more_seconds = 0.0
            yield job, result
            if "ended" in result:
                return

    def _result_of(self, job: Job, more_seconds: float, clock: Clock) -> Result:
        budget = PARTS[job.part].budget_seconds
        end = Clock(budget + more_seconds)
        partial: Result = {}
        while True:
            line = self._line(min(end.left_seconds, clock.left_seconds))
            if line:
                said = json.loads(line)
                if said["is_whole"]:
                    return dict(said["result"])
                partial = said["result"]
            elif line is not None:
                code = self._process.wait()
                failed = f"its process has ended with code {code}; see {self.log.name}"
                return {**partial, "failed": failed, "ended": True}
            elif clock.left_seconds <= 0:
                raise TimeOver
            else:
                return {**partial, "skipped": f"its {budget:.0f} s were over", "ended": True}

    def _line(self, seconds: float) -> bytes | None:
        """A line of the process; empty after its end, and None after these seconds."""
        end = Clock(seconds)
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, end.left_seconds))
            if not ready:
                return None
            part = os.read(self._pipe, 2**16)
            if not part:
                return b""
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def end(self) -> None:
        """End the process and its workers, which are its process group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        os.close(self._pipe)


@contextmanager
def running(*arguments: Any) -> Iterator[Child]:
    """A child that is ended at the end of the block."""
    child = Child(*arguments)
    try:
        yield child
    finally:
        child.end()


def output_of(module: str, *arguments: str, variables: Mapping[str, str] | None = None) -> str:
    """What a module of this repository prints.

    Raises:
        subprocess.CalledProcessError: If it fails.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, **python(None, variables)
    )
    return str(done.stdout.splitlines()[-1])


Say = Callable[[str], None]


def do(
    jobs: Sequence[Job],
    side: Side,
    machine: Machine,
    folder: ResultFolder,
    clock: Clock,
    variables: Mapping[str, str],
    say: Say,
) -> None:
    """Do the jobs of one place, and keep each result at once.

    Raises:
        TimeOver: If the script's time is over.
        FolderError: If a result cannot be kept.
    """
    with running(machine, side, jobs, folder, variables) as child:
        for job, result in child.results(clock):
            kept = {name: value for name, value in result.items() if name != "ended"}
            folder.keep(job, kept)
            say(line_of(job, kept))


def line_of(job: Job, result: Result) -> str:
    """A result in a line."""
    words = " ".join(filter(None, (job.where, job.model, job.batches, job.how)))
    return f"({PARTS[job.part].letter}) {words}: {_outcome(result)}"


def _outcome(result: Result) -> str:
    for kind in ("skipped", "failed"):
        if kind in result:
            return f"{kind}: {result[kind]}"
    if "tokens_per_second" in result:
        return f"{result['tokens_per_second']:,.0f} tokens/s"
    return "done"


def free_bytes(folder: Path) -> int:
    """Of the folder's disk."""
    return shutil.disk_usage(folder).free
