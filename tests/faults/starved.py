"""Many starts of a run on a machine that is far too busy: none may be lost to a "frozen" worker.

python -m tests.faults.starved                         100 starts at a load of 60
python -m tests.faults.starved --starts 20 --load 30   fewer

Each start is a process of its own with two workers that serve one start after the other. Other
processes only keep the cores busy. Every run must end with the losses of a quiet one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console

from ..conftest import worker_process
from ..forked import running_script

NUM_PROCESSES = 3
NUM_STEPS = 4
MOST_SECONDS = 1800.0
SPINS = "while True: pass"
TRAINS = f"""
import sys
import warnings
from lightning_hetero import HeteroPipelineStrategy
from tests.faults.scene import be_quiet
from tests.models import TinyModule, loader, trainer
be_quiet()
module = TinyModule()
strategy = HeteroPipelineStrategy(sys.argv[1:], "even", check_first_batch="off")
trainer(strategy, max_steps={NUM_STEPS}).fit(module, loader({NUM_STEPS * 4}, 4))
print(module.losses)
"""


@dataclass(frozen=True)
class Start:
    """The end of one run.

    Args:
        seconds: From its start to its end.
        losses: As it printed them; empty if it was lost.
        sentence: The last line that it said.
    """

    seconds: float
    losses: str
    sentence: str


def start_once(workers: Sequence[str]) -> Start:
    """Train for some steps in a process of its own."""
    begun = time.monotonic()
    with running_script(TRAINS, *workers) as script:
        losses, said = script.communicate(timeout=MOST_SECONDS)
    lines = [line for line in said.splitlines() if line.strip()]
    return Start(time.monotonic() - begun, losses.strip(), lines[-1] if lines else "")


def starts_in_a_row(count: int) -> list[Start]:
    """Starts on the same two workers, one after the other."""
    with worker_process() as first, worker_process() as second:
        return [start_once([first.address, second.address]) for _ in range(count)]


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Inside, so many processes compute all the time."""
    busy = [subprocess.Popen([sys.executable, "-c", SPINS]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    """Exit with 1 if a start was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--load", type=int, default=60, help="processes that want a core")
    parser.add_argument("--at-once", type=int, default=6, help="starts at the same time")
    options = parser.parse_args()
    console = Console(width=140)
    (quiet,) = starts_in_a_row(1)
    console.print(f"quiet: {quiet.seconds:.1f} s, losses {quiet.losses}")
    share, left = divmod(options.starts, options.at_once)
    counts = [share + (number < left) for number in range(options.at_once)]
    num_busy = max(0, options.load - NUM_PROCESSES * options.at_once)
    with busy_processes(num_busy), ThreadPoolExecutor(options.at_once) as pool:
        found = [start for row in pool.map(starts_in_a_row, counts) for start in row]
        load = os.getloadavg()[0]
    lost = [start for start in found if start.losses != quiet.losses]
    for start in lost:
        console.print(f"lost after {start.seconds:.0f} s: {start.losses} {start.sentence}")
    seconds = sorted(start.seconds for start in found)
    console.print(
        f"{len(found)} starts on {os.cpu_count()} cores, {len(lost)} lost; the load at the end "
        f"was {load:.0f}; a start took {seconds[len(seconds) // 2]:.0f} s, the longest "
        f"{seconds[-1]:.0f} s"
    )
    sys.exit(bool(lost) or not quiet.losses)


if __name__ == "__main__":
    main()
