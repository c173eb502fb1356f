"""Random scenarios over worker processes: is each run that of plain Lightning?

python -m tests.scenarios.main                    seeds from 0 on, until Ctrl-C
python -m tests.scenarios.main 100 --first 2000   so many, from that seed on
python -m tests.scenarios.main --seed 2017        the scenario of one seed
python -m tests.scenarios.main --table            which scenario of the tests tries which pair

They have more options at once than those of the tests, and any two shapes follow each other. It
prints each seed whose run is another one than it should be.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ..conftest import WorkerProcess, worker_process
from ..faults.scene import be_quiet
from . import cover
from .run import check
from .scenario import EVENTS, OPTIONS, SHAPES, Scenario, verdict

MOST_OPTIONS = 5


def drawn(seed: int) -> Scenario:
    """The scenario of a seed, which runs."""
    draw = random.Random(seed)
    while True:
        chosen = draw.sample(OPTIONS, draw.randrange(MOST_OPTIONS + 1))
        shape, then = draw.choice([*SHAPES]), draw.choice([*SHAPES])
        options = tuple(option for option in OPTIONS if option in chosen)
        scenario = Scenario(shape, options, draw.choice(EVENTS), then)
        if verdict(scenario) is None:
            return scenario


def try_seeds(seeds: Iterable[int], fleet: Sequence[WorkerProcess]) -> list[int]:
    """Try the scenarios of these seeds, until Ctrl-C; returns the seeds that are wrong."""
    wrong = []
    try:
        for seed in seeds:
            scenario = drawn(seed)
            with tempfile.TemporaryDirectory() as folder:
                try:
                    check(scenario, fleet, Path(folder))
                except Exception:
                    wrong.append(seed)
                    sys.stderr.write(traceback.format_exc())
            said = "wrong" if seed in wrong else "equal"
            sys.stdout.write(f"seed {seed}: {said}: {scenario}\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("ended by Ctrl-C\n")
    return wrong


def table() -> Table:
    """Of each two values, the scenario of the tests that tries them, or why there is none."""
    found = Table("a value", "another one", "tried by")
    for pair in cover.all_pairs():
        found.add_row(*pair, cover.tried_by(pair))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", help="how many; without it, until Ctrl-C")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    parser.add_argument("--seed", type=int, help="the seed of the only one")
    parser.add_argument("--table", action="store_true", help="print the pairs of the tests")
    options = parser.parse_args()
    if options.table:
        Console(width=140).print(table())
        return
    be_quiet()
    logging.getLogger("lightning.fabric").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    first = options.first if options.seed is None else options.seed
    number = options.count if options.seed is None else 1
    seeds = count(first) if number is None else range(first, first + number)
    with ExitStack() as stack:
        wrong = try_seeds(seeds, [stack.enter_context(worker_process()) for _ in range(3)])
    sys.exit(f"Wrong seeds: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
