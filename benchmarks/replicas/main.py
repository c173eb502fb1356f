"""Replicas: one stage on several processes, each with its share of the micro-batches.

On two pinned cores, the second one whole or slowed, beside one core alone, a line of layers, DDP of
torch and a parameter server; with sleeping layers on four processes; with a worker that is slowed
in mid-run; and predicted by the planner. Rounds are interleaved, and medians of the rounds' ratios
are printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from benchmarks.peers.throttle import best_way
from benchmarks.processes import be_quiet, machine, pin, two_cores, wide_console
from benchmarks.replicas import predicted, sleeping, slowed
from benchmarks.replicas import two_cores as on_two_cores
from lightning_hetero.transport.token import FILE_VARIABLE

SLEEPING, SLOWED, PREDICTED = "sleeping", "slowed", "predicted"
CASES = [*(case.name for case in on_two_cores.CASES), SLEEPING, SLOWED, PREDICTED]
MODELS = ("small", "large", "tiny")


def main() -> None:
    options = parse(sys.argv[1:])
    # Or a run that is ended would leave its cgroup.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    be_quiet()
    # The token in the user's home would put all runs under TLS.
    os.environ[FILE_VARIABLE] = ""
    console = wide_console()
    how = best_way() if options.throttle == "auto" else options.throttle
    cores = two_cores()
    console.print(f"{machine()}; model {options.model}; the second core is slowed by {how}")
    chosen = [case for case in on_two_cores.CASES if case.name in options.cases]
    contests = [on_two_cores.Contest(case, cores, how, options, console) for case in chosen]
    on_two_cores.run(contests, options.rounds)
    if SLEEPING in options.cases:
        sleeping.run(options.rounds, options.steps, options.milliseconds / 1e3, console)
    # From here on this process is the coordinator, which has a core of its own.
    pin(cores[0])
    if SLOWED in options.cases:
        slowed.run(cores, how, options, console, options.slowed_to)
    if PREDICTED in options.cases:
        predicted.run(cores[1], how, options, console)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="per run; the first is not timed")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--in-flight", type=int, help="of the strategy (default: its own)")
    parser.add_argument("--throttle", choices=["auto", "cgroup", "signals"], default="auto")
    parser.add_argument(
        "--milliseconds", type=float, default=100, help="a sleeping layer's forward at speed 1"
    )
    parser.add_argument(
        "--slowed-to", type=float, default=0.5, help="the worker's share of its core in mid-run"
    )
    parser.add_argument(
        "--budget-seconds", type=float, default=30, help="for measuring what is predicted"
    )
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps is 1, and the first step is not timed; give 2 or more")
    return options


if __name__ == "__main__":
    main()
