"""A worker that notes how long each snapshot holds it up: ``timed_worker.py FILE worker ...``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from lightning_hetero.cli import main
from lightning_hetero.worker.snapshots import SessionSnapshots


def note_copies(file: Path) -> None:
    """Append the seconds of each copy of the state, in which the worker computes nothing."""
    frames = SessionSnapshots._frames

    def timed(side: SessionSnapshots, *args: Any) -> list[bytes]:
        start = time.perf_counter()
        found = [*frames(side, *args)]
        with file.open("a") as lines:
            lines.write(f"{time.perf_counter() - start} {sum(map(len, found))}\n")
        return found

    SessionSnapshots._frames = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    note_copies(Path(sys.argv.pop(1)))
    main()
