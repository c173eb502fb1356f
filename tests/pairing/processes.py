"""Pairing by the commands: a home folder for each machine, and a worker that shows a code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_hetero.transport.token import DEFAULT_FILE, FILE_VARIABLE

from ..transport.pairs import PATIENCE_SECONDS

COMMAND = [sys.executable, "-m", "lightning_hetero"]


@dataclass(frozen=True)
class Machine:
    """A home folder of its own."""

    home: Path

    @property
    def token_file(self) -> Path:
        return self.home / DEFAULT_FILE.relative_to("~")

    @property
    def environment(self) -> dict[str, str]:
        others = {name: value for name, value in os.environ.items() if name != FILE_VARIABLE}
        return {**others, "HOME": str(self.home)}

    def start(self, *words: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*prefix, *COMMAND, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
        )

    def pair(self, *words: str) -> tuple[int, str]:
        """The exit status of the command, and its words."""
        process = self.start("pair", *words)
        said, _ = process.communicate(timeout=100)
        return process.returncode, said


@dataclass(frozen=True)
class PairingWorker:
    """A worker that shows a code."""

    process: subprocess.Popen[str]
    address: str
    code: str

    def says(self, words: str) -> str:
        """The next line with these words."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if words in line:
                return line
        pytest.fail(f"{words!r} is not in {''.join(lines)}")

    def rest(self) -> tuple[int, str]:
        """The exit status, and the last words."""
        said, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, said


@contextmanager
def pairing_worker(
    machine: Machine, *options: str, prefix: Sequence[str] = ()
) -> Iterator[PairingWorker]:
    words = ("worker", "--pair", "--device", "cpu", "--threads", "1", *options)
    process = machine.start(*words, prefix=prefix)
    try:
        told = PairingWorker(process, "", "").says("lightning-hetero pair ").split()
        yield PairingWorker(process, *told[2:])
    finally:
        process.kill()
        process.communicate()
