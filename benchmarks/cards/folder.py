"""The folder of the results: one file for each finished job, one start at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cards.jobs import Job, Machine, Result
from lightning_hetero.atomic_file import replacing

_FULL = (errno.ENOSPC, errno.EDQUOT)


class FolderError(Exception):
    """The folder cannot be used; the message says what to do."""


class ResultFolder:
    """Keeps results, and finds those of earlier starts.

    Args:
        path: The folder, which is made.

    Raises:
        FolderError: If it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw, self.scratch = path / "raw", path / "scratch"
        with plain_errors(path):
            self.raw.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other starts out of the folder until the block, or this process, ends.

        Raises:
            FolderError: If another start writes into it.
        """
        path = self.path / "lock"
        with plain_errors(self.path), path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise FolderError(
                    f"Process {file.read().strip()} writes its results into {self.path}. Wait for "
                    "its end, or name another folder with `--output`; the two would slow each "
                    "other down."
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def check_machine(self, machine: Machine, again: bool) -> None:
        """Note the machine, or see that earlier results are of the same one.

        Raises:
            FolderError: If they are of another one, and `again` is not set.
        """
        path = self.path / "machine.json"
        if path.exists() and not again:
            earlier = _read(path)
            differing = [k for k, v in _as_read(machine.as_json()).items() if earlier.get(k) != v]
            if differing:
                raise FolderError(
                    f"The results in {self.path} are of another machine or other options, by their "
                    f"{', '.join(differing)}. Name another folder with `--output`, or replace them "
                    "with `--again`."
                )
        self._write(path, machine.as_json())

    def results(self, jobs: Sequence[Job]) -> dict[Job, Result]:
        """The results of these jobs that are there."""
        paths = {job: self._path(job) for job in jobs}
        return {job: _read(path) for job, path in paths.items() if path.exists()}

    def keep(self, job: Job, result: Result) -> None:
        """Write a result, whole or not at all.

        Raises:
            FolderError: If it cannot be written.
        """
        self._write(self._path(job), result)

    def forget(self) -> None:
        """Remove all results."""
        with plain_errors(self.path):
            shutil.rmtree(self.raw)
            self.raw.mkdir()

    def write_report(self, text: str) -> Path:
        """Write the report, and return its path.

        Raises:
            FolderError: If it cannot be written.
        """
        path = self.path / "report.md"
        with plain_errors(self.path), replacing(path) as file:
            file.write(text.encode())
        return path

    def _path(self, job: Job) -> Path:
        return self.raw / f"{job.key}.json"

    def _write(self, path: Path, content: Result) -> None:
        with plain_errors(self.path), replacing(path) as file:
            file.write(json.dumps(content, indent=1).encode())


@contextmanager
def plain_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the system into sentences."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise FolderError(
                f"The disk of {folder} is full. Make room and start again, which goes on with the "
                "results that are there; or name a folder on another disk with `--output`."
            ) from error
        raise FolderError(
            f"The folder {folder} cannot be used: {error.strerror}. Name another one with "
            "`--output`."
        ) from error


def _read(path: Path) -> Any:
    with plain_errors(path.parent):
        return json.loads(path.read_text("utf-8"))


def _as_read(content: Any) -> Any:
    """As it is after it was written: lists instead of tuples."""
    return json.loads(json.dumps(content))
