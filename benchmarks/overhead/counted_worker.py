"""A worker that counts its operators: ``counted_worker.py FILE worker --listen ...``."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.overhead.operators import OperatorClock
from lightning_hetero.cli import main

if __name__ == "__main__":
    OperatorClock(Path(sys.argv.pop(1))).start()
    main()
