"""CUDA MPS: a daemon of NVIDIA's driver that divides a card among processes.

Nobody has run this on a card yet; it is written from NVIDIA's documentation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PATIENCE_SECONDS = 20.0


class NoMps(Exception):
    """MPS does not run here; the message is the reason."""


@contextmanager
def mps_daemon() -> Iterator[Mapping[str, str]]:
    """Run a daemon of its own, beside any other, and end it.

    Yields:
        The variables of processes that use it.

    Raises:
        NoMps: If it does not start.
    """
    if shutil.which(CONTROL) is None:
        raise NoMps(f"there is no {CONTROL} here")
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            f"CUDA_MPS_{name}_DIRECTORY": str(Path(folder, name.lower()))
            for name in ("PIPE", "LOG")
        }
        for path in variables.values():
            Path(path).mkdir()
        environment = {**os.environ, **variables}
        _control(["-d"], environment)
        try:
            yield variables
        finally:
            _control([], environment, "quit\n")


def _control(options: list[str], environment: Mapping[str, str], order: str | None = None) -> None:
    try:
        subprocess.run(
            [CONTROL, *options],
            env=environment,
            input=order,
            text=True,
            # The daemon would keep a pipe open for its whole life.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=PATIENCE_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoMps(f"{CONTROL} {' '.join(options) or order}: {error}") from error
