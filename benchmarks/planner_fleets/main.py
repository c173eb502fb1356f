"""How much shorter than the planner's step on many devices random changes of its plan make it.

Both predict steps by the planner's simulator and its account of memory, so the gap is that of the
search alone.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.planner_fleets.fleets import draw_fleet
from benchmarks.planner_fleets.tries import Tries
from lightning_hetero.planner.solver import solve
from lightning_hetero.planner.verdict import BY_SPEEDS, judge

NUM_DEVICES = (16, 32, 64, 128)

TRIES = 2000
"""Random changes of each plan."""

BOUND = 0.05
"""The aim: no plan that the tries find is faster by more than this share."""


@dataclass(frozen=True)
class Result:
    """One fleet.

    Args:
        num_devices: The devices, the coordinator included.
        seed: Of the fleet.
        teams: The numbers of workers of the plan's stages.
        plan_seconds: CPU seconds of planning.
        of_speeds: The plan's speed over the sum of all devices' speeds.
        gap: By how much the planner's step is longer than the shortest one found, as a share.
    """

    num_devices: int
    seed: int
    teams: list[int]
    plan_seconds: float
    of_speeds: float
    gap: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="*", default=NUM_DEVICES)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--fleets", type=int, default=4, help="fleets of each number of devices")
    parser.add_argument("--tries", type=int, default=TRIES)
    options = parser.parse_args()
    table = Table("devices", "seed", "plan, s", "of the sum of speeds", "gap", "teams")
    for num_devices in options.devices:
        for seed in range(options.first, options.first + options.fleets):
            table.add_row(*_cells(compare(seed, num_devices, options.tries)))
    Console().print(table)


def compare(seed: int, num_devices: int, num_tries: int) -> Result:
    """Plan for one fleet, and change the plan at random."""
    profile = draw_fleet(seed, num_devices)
    start = time.process_time()
    solution = solve(profile)
    planned = time.process_time() - start
    chosen, search = solution.chosen, solution.search
    best = Tries(search.costs, search.micro_batches, random.Random(seed)).best(chosen, num_tries)
    return Result(
        num_devices,
        seed,
        [len(team) for team in chosen.teams],
        planned,
        chosen.tokens_per_second / judge(solution).bounds[BY_SPEEDS],
        chosen.step_seconds / best.step_seconds - 1,
    )


def _cells(result: Result) -> list[str]:
    return [
        str(result.num_devices),
        str(result.seed),
        f"{result.plan_seconds:.1f}",
        f"{result.of_speeds:.0%}",
        f"{result.gap:.1%}" + (" !" if result.gap > BOUND else ""),
        " ".join(map(str, result.teams)),
    ]


if __name__ == "__main__":
    main()
