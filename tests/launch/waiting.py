"""A training script that waits at the door for more workers than come.

Its arguments are the launcher's name, and where it waits or what the launcher calls.
"""

from __future__ import annotations

import signal
import sys

from lightning_hetero import HeteroPipelineStrategy, Joining, SlurmWorkers, SshWorkers
from lightning_hetero.worker_sources import Launcher

from ..models import TinyModule, fit
from ..transport.pairs import PATIENCE_SECONDS

SCRIPT = f"import sys; from {__name__} import main; main(*sys.argv[1:])"


def launcher_of(kind: str, where: str, command: str) -> Launcher:
    """A launcher whose workers are commands that never join."""
    if kind == "SshWorkers":
        return SshWorkers(["gpu1", "gpu2"], command, ssh=[where], listen="127.0.0.1:0")
    if kind == "SlurmWorkers":
        return SlurmWorkers(["-n1", "-n1"], command, srun=[where], listen="127.0.0.1:0")
    return Joining(where, least=2, wait_seconds=2 * PATIENCE_SECONDS)


def main(kind: str, where: str, command: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    fit(TinyModule(), HeteroPipelineStrategy(launcher_of(kind, where, command), "even"))


if __name__ == "__main__":
    main(*sys.argv[1:])
