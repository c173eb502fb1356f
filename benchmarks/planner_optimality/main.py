"""How much longer the planner's step is than the shortest one that a brute force finds.

Both predict steps by the planner's simulator and its account of memory, so the gap is that of the
search alone. Real steps are the matter of the benchmark plan_quality.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.table import Table

from benchmarks.planner_optimality.brute_force import CLOSE, BruteForce
from benchmarks.planner_optimality.brute_teams import BruteTeams
from benchmarks.planner_optimality.clusters import (
    LAYERS,
    draw_cluster,
    draw_small_cluster,
    with_heads,
)
from lightning_hetero.errors import PlanError
from lightning_hetero.planner.candidates import Candidate
from lightning_hetero.planner.profile import Profile
from lightning_hetero.planner.solver import Wishes, solve

DEVELOPMENT = range(60)
"""Seeds of the clusters to look at while one changes the search."""

FIGURE = range(3000, 3200)
"""Seeds of the clusters for the table; they are not to be looked at one by one."""

SMALL = range(5000, 6000)
"""Seeds of the small clusters on which replicas are compared."""

BOUND = 0.025
"""The gap that the planner's rules allow: 2 % for a device, 0.5 % for micro-batches in flight."""


EVERY = 50
"""Clusters between two lines on how far the command is."""

LINE, REPLICAS, MIXTURE, NO_PLAN = "line", "replicas", "line with replicas", "none fits"


@dataclass(frozen=True)
class Result:
    """One cluster; the gap is None if nothing fits.

    Args:
        seed: Of the cluster.
        row: The number of its devices, or the kind of its best plan.
        gap: By how much the planner's step is longer than the shortest one, as a share.
        plan_seconds: CPU seconds of planning.
        brute_force_seconds: CPU seconds of the brute force.
    """

    seed: int
    row: str
    gap: float | None
    plan_seconds: float
    brute_force_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--development", action="store_true", help="take the development seeds")
    parser.add_argument("--replicas", action="store_true", help="compare plans with replicas")
    parser.add_argument("--heads", action="store_true", help="let the head leave too, in lines")
    parser.add_argument("--clusters", type=int, help="take only so many of the seeds")
    parser.add_argument("--first", type=int, help="the first seed to take")
    options = parser.parse_args()
    seeds = SMALL if options.replicas else FIGURE
    seeds = DEVELOPMENT if options.development else seeds
    first = seeds.start if options.first is None else options.first
    seeds = range(first, seeds.stop)[: options.clusters]
    of_seed = compare_replicas if options.replicas else partial(compare, heads=options.heads)
    console = Console()
    results: list[Result] = []
    # An end in the middle leaves the table of what was done.
    with contextlib.suppress(KeyboardInterrupt):
        for seed in seeds:
            results.append(of_seed(seed))
            if len(results) % EVERY == 0:
                over_bound = sum((result.gap or 0.0) > BOUND for result in results)
                console.print(f"{len(results)} of {len(seeds)}: {over_bound} over {BOUND:.1%}")
    console.print(table_of(results, "best plan" if options.replicas else "devices"))
    over = [(r.seed, r.gap) for r in results if r.gap is not None and r.gap > BOUND]
    console.print(f"over {BOUND:.1%}:", ", ".join(f"seed {s} {gap:.1%}" for s, gap in over))


def compare(seed: int, heads: bool = False) -> Result:
    """Plan one cluster in a line, and look for a better line by brute force; with ``heads`` the
    head may leave the coordinator."""
    profile = draw_cluster(seed)
    profile = with_heads(profile, seed) if heads else profile
    start = time.process_time()
    chosen = _planned(profile, Wishes(replicas=False))
    planned = time.process_time()
    known = {} if chosen is None else {"known": chosen.step_seconds}
    best = BruteForce(profile, **known).best()
    seconds = planned - start, time.process_time() - planned
    return Result(seed, str(len(profile.devices)), _gap(seed, chosen, best), *seconds)


def compare_replicas(seed: int) -> Result:
    """Plan one small cluster, and look for a better plan with or without replicas by brute
    force."""
    profile = draw_small_cluster(seed)
    start = time.process_time()
    chosen = _planned(profile, Wishes())
    planned = time.process_time()
    known = {} if chosen is None else {"known": chosen.step_seconds}
    best = BruteTeams(profile, **known).best()
    seconds = planned - start, time.process_time() - planned
    return Result(seed, kind_of(best or chosen), _gap(seed, chosen, best), *seconds)


def kind_of(plan: Candidate | None) -> str:
    """Whether a plan is a line, replicas of one stage, or a line with such a stage."""
    if plan is None:
        return NO_PLAN
    if not plan.has_replicas:
        return LINE
    return REPLICAS if len(plan.teams) == 1 else MIXTURE


def _gap(seed: int, chosen: Candidate | None, best: Candidate | None) -> float | None:
    if chosen is None and best is not None:
        raise SystemExit(f"Seed {seed}: the planner found no plan, and brute force found one.")
    if chosen is None:
        return None
    return 0.0 if best is None else chosen.step_seconds / best.step_seconds - 1


def _planned(profile: Profile, wishes: Wishes) -> Candidate | None:
    try:
        return solve(profile, wishes).chosen
    except PlanError:
        return None


def table_of(results: Sequence[Result], title: str) -> Table:
    """Gaps and seconds by the number of devices or the kind of the best plan, and of all."""
    columns = (title, "clusters", "mean gap", "worst", f"over {BOUND:.1%}", "optimal")
    table = Table(*columns, "plan, s in all", "longest", "brute force, s in all")
    for row in [*map(str, LAYERS), LINE, REPLICAS, MIXTURE, NO_PLAN]:
        some = [result for result in results if result.row == row]
        if some:
            table.add_row(row, *_cells(some))
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
