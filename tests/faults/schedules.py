"""Random schedules of losses in one process: is each run the undisturbed one?

python -m tests.faults.schedules 10000                  so many, each of another case or seed
python -m tests.faults.schedules 1000 --first 2000      those from number 2000 on
python -m tests.faults.schedules 100 --only "a line"    cases whose name has this in it

It prints how often each thing was drawn and each cell of the roster's table was reached, and each
schedule that failed. Ctrl-C ends it with what there is.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lightning_hetero.coordinator.roster import TABLE

from ..coordinator.lost_schedules import CASES, MOVING_CASES, tried, undisturbed
from ..coordinator.session_net import cell_name
from .scene import be_quiet

_LINE_SECONDS = 60.0


@dataclass
class Found:
    """What became of the schedules so far.

    Args:
        counts: How often each thing has happened.
        schedules: By thing, the schedules in which it has happened.
        wrong: A line for each schedule that failed.
    """

    num_schedules: int = 0
    cpu_seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    schedules: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, counts: Counter[str], cpu_seconds: float) -> None:
        self.num_schedules += 1
        self.cpu_seconds += cpu_seconds
        self.counts += counts
        self.schedules.update(counts.keys())

    def show(self) -> None:
        table = Table("what happened", "times", "schedules with it")
        for name in sorted(self.counts):
            table.add_row(name, f"{self.counts[name]:,}", f"{self.schedules[name]:,}")
        console = Console(width=100)
        console.print(table)
        each_seconds = self.cpu_seconds / max(1, self.num_schedules)
        console.print(
            f"{self.num_schedules:,} schedules, {len(self.wrong)} of them wrong; "
            f"{each_seconds:.2f} s of CPU time each, beside the undisturbed run of each case"
        )
        missed = {cell_name(*cell) for cell in TABLE} - self.counts.keys()
        console.print(f"cells of the roster that no schedule reached: {sorted(missed)}")
        for line in self.wrong:
            console.print(line, style="red")


def try_schedules(found: Found, cases: list[tuple[str, str]], numbers: range) -> None:
    """Try the schedules of these numbers: the case changes from each to the next."""
    told = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            seed, case = divmod(number, len(cases))
            undisturbed(*cases[case])
            began = time.process_time()
            try:
                counts = tried(*cases[case], seed, Path(folder))
            except AssertionError as error:
                found.wrong.append(f"number {number}: {error}")
                sys.stderr.write(f"number {number}: {error}\n")
                counts = Counter({"wrong": 1})
            found.add(counts, time.process_time() - began)
            if time.monotonic() - told > _LINE_SECONDS:
                told = time.monotonic()
                sys.stderr.write(f"{found.num_schedules} schedules, the last one is {number}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0, help="the number of the first schedule")
    parser.add_argument("--only", default="", help="a part of the names of plan and options")
    options = parser.parse_args()
    be_quiet()
    logging.getLogger("lightning.fabric").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    cases = [case for case in [*CASES, *MOVING_CASES] if options.only in ", ".join(case)]
    found = Found()
    try:
        try_schedules(found, cases, range(options.first, options.first + options.count))
    except KeyboardInterrupt:
        sys.stderr.write("ended by Ctrl-C\n")
    finally:
        found.show()
    sys.exit("Something is not as it should be." if found.wrong else 0)


if __name__ == "__main__":
    main()
