"""How much longer the planner's step is than the shortest one that a brute force finds.

Both predict steps by the planner's simulator and its account of memory, so the gap is that of the
search alone. Real steps are the matter of the benchmark plan_quality.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.planner_optimality.brute_force import CLOSE, BruteForce
from benchmarks.planner_optimality.clusters import LAYERS, draw_cluster
from lightning_hetero.errors import PlanError
from lightning_hetero.planner.candidates import Candidate
from lightning_hetero.planner.profile import Profile
from lightning_hetero.planner.solver import solve

DEVELOPMENT = range(60)
"""Seeds of the clusters to look at while one changes the search."""

FIGURE = range(3000, 3200)
"""Seeds of the clusters for the table; they are not to be looked at one by one."""

BOUND = 0.025
"""The gap that the planner's rules allow: 2 % for a device, 0.5 % for micro-batches in flight."""


@dataclass(frozen=True)
class Result:
    """One cluster; the gap is None if nothing fits."""

    seed: int
    num_devices: int
    gap: float | None
    plan_seconds: float
    brute_force_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--development", action="store_true", help="take the development seeds")
    parser.add_argument("--clusters", type=int, help="take only so many of the seeds")
    options = parser.parse_args()
    seeds = DEVELOPMENT if options.development else FIGURE
    results = [compare(seed) for seed in seeds[: options.clusters]]
    console = Console()
    console.print(table_of(results))
    over = [(r.seed, r.gap) for r in results if r.gap is not None and r.gap > BOUND]
    console.print(f"over {BOUND:.1%}:", ", ".join(f"seed {s} {gap:.1%}" for s, gap in over))


def compare(seed: int) -> Result:
    """Plan one cluster, and look for a better plan by brute force."""
    profile = draw_cluster(seed)
    start = time.process_time()
    chosen = _planned(profile)
    planned = time.process_time()
    known = {} if chosen is None else {"known": chosen.step_seconds}
    best = BruteForce(profile, **known).best()
    ended = time.process_time()
    if chosen is None and best is not None:
        raise SystemExit(f"Seed {seed}: the planner found no plan, and brute force found one.")
    gap = None
    if chosen is not None:
        gap = 0.0 if best is None else chosen.step_seconds / best.step_seconds - 1
    return Result(seed, len(profile.devices), gap, planned - start, ended - planned)


def _planned(profile: Profile) -> Candidate | None:
    try:
        return solve(profile).chosen
    except PlanError:
        return None


def table_of(results: Sequence[Result]) -> Table:
    """Gaps and seconds by the number of devices, and of all clusters."""
    columns = ("devices", "clusters", "mean gap", "worst", f"over {BOUND:.1%}", "optimal")
    table = Table(*columns, "plan, s in all", "longest", "brute force, s in all")
    for num_devices in LAYERS:
        some = [result for result in results if result.num_devices == num_devices]
        if some:
            table.add_row(str(num_devices), *_cells(some))
    table.add_row("all", *_cells(results))
    return table


def _cells(results: Sequence[Result]) -> list[str]:
    gaps = [result.gap for result in results if result.gap is not None] or [0.0]
    unfit = sum(result.gap is None for result in results)
    return [
        f"{len(results)}" + (f" ({unfit} fit no plan)" if unfit else ""),
        f"{statistics.mean(gaps):.2%}",
        f"{max(gaps):.1%}",
        str(sum(gap > BOUND for gap in gaps)),
        str(sum(gap <= CLOSE for gap in gaps) if unfit < len(results) else 0),
        f"{sum(result.plan_seconds for result in results):.1f}",
        f"{max(result.plan_seconds for result in results):.2f}",
        f"{sum(result.brute_force_seconds for result in results):.1f}",
    ]


if __name__ == "__main__":
    main()
