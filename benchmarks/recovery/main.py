"""What recovery costs: CPU time and bytes of a run in which nothing breaks, and the time from the
kill of a worker to the next step, beside a restart of the run from its last checkpoint.
"""

from __future__ import annotations

import argparse

from rich.console import Console

from benchmarks.processes import be_quiet, machine, wide_console
from benchmarks.recovery import cost, downtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="of the cost without a fault")
    parser.add_argument("--steps", type=int, default=40, help="of each of its runs")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument(
        "--every-seconds", type=float, default=3.0, help="between two snapshots, where there are"
    )
    parser.add_argument("--kills", type=int, default=3, help="of the time to the next step")
    parser.add_argument("--restarts", type=int, default=1, help="of the whole run, beside it")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--only-cost", action="store_true", help="of a run in which nothing breaks")
    only.add_argument("--only-downtime", action="store_true", help="from a kill to the next step")
    options = parser.parse_args()
    be_quiet()
    console = wide_console()
    if not options.only_downtime:
        show_cost(options, console)
    if not options.only_cost:
        show_downtime(options, console)
    console.print(machine())


def show_cost(options: argparse.Namespace, console: Console) -> None:
    """CPU time, kept bytes and the time of snapshots."""
    shape = cost.Shape(
        options.hidden_size, options.sequence_length, options.steps, options.every_seconds
    )
    cost.report(cost.measure(shape, options.rounds, console), shape, console)


def show_downtime(options: argparse.Namespace, console: Console) -> None:
    """From the kill of a worker to the next step, with recovery and by a restart."""
    case = downtime.Case(options.hidden_size, options.sequence_length, saved_step=4, killed_step=9)
    found = [downtime.recover(case) for _ in range(options.kills)]
    restarts = [downtime.restart(case) for _ in range(options.restarts)]
    downtime.report(found, restarts, case, console)


if __name__ == "__main__":
    main()
