"""One stage on the coordinator and a worker, a pinned core each, against peers in the same rounds.

A round runs, one after the other: the first core alone, the second one alone, a model of half the
layers, the replicas, and the case's peers. All must have the same losses. Then both cores train
alone at the same time, which tells what this machine has for two processes that send nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.peers.arena import (
    BESIDE,
    CUT,
    DDP,
    REPLICAS,
    SHARED,
    SHARING,
    SPLIT_REPLICAS,
    UNEQUAL_DDP,
    Arena,
    Setting,
)
from benchmarks.peers.main import SERVER, SHORT, run_round, why_not
from benchmarks.peers.report import ONE_CORE, SLOWED_CORE, Measured
from benchmarks.peers.throttle import How
from benchmarks.peers.workload import NUM_LAYERS

PLANNED = "hetero"
AUTO = 'plan="auto"'
HALVES_HERE = 7
"""Of the line of 16 halves: with the head, which takes 1.5 halves, the coordinator has 8.5."""


@dataclass(frozen=True)
class Case:
    """Replicas on two cores.

    Args:
        name: In the options.
        micro_batches: Of a step.
        own: How many of them the coordinator runs.
        goal: Times one core.
        peers: That run in the same rounds.
        speed: Of the second core, where the first one's is 1.
        has_adapters: Whether adapters alone train.
        in_flight: The bound on micro-batches in flight; None for the plan's default.
    """

    name: str
    micro_batches: int
    own: int
    goal: float
    peers: tuple[str, ...]
    speed: float = 1
    has_adapters: bool = False
    in_flight: int | None = None

    @property
    def title(self) -> str:
        trained = "adapters" if self.has_adapters else "all weights"
        core = "" if self.speed == 1 else f", worker's core at {self.speed:g}"
        return f"{self.micro_batches} micro-batches, {trained}{core}"

    @property
    def splits(self) -> dict[str, int]:
        """What the first process has, by the peer; the plan of `PLANNED` is not given."""
        count = self.micro_batches
        equal = count // 2
        own = dict.fromkeys((*SHARING, UNEQUAL_DDP, SERVER), self.own)
        return {**own, DDP: equal, CUT: HALVES_HERE, PLANNED: NUM_LAYERS // 2}


FEW = (2, 4, 8)
SLOW_PEERS = (BESIDE, DDP, UNEQUAL_DDP, SERVER, PLANNED)
SLOW_IN_FLIGHT = 8
"""While a slow worker runs one micro-batch, the coordinator runs up to five."""
MOST_CORRECTIONS = 5
SPEED_TOLERANCE = 0.05
"""Relative to the case's speed."""

CASES = [
    Case("adapters", 16, 7, 1.85, (BESIDE, DDP), has_adapters=True),
    Case("weights", 16, 7, 1.75, (BESIDE, DDP)),
    *(Case(f"few-{count}", count, count // 2, 1.70, (SPLIT_REPLICAS, CUT, DDP)) for count in FEW),
    *(
        Case(f"few-{count}-adapters", count, count // 2, 1.70, (CUT, DDP), has_adapters=True)
        for count in FEW
    ),
    Case("half", 16, 10, 1.35, SLOW_PEERS, 0.5, in_flight=SLOW_IN_FLIGHT),
    Case("quarter", 16, 13, 1.13, SLOW_PEERS, 0.25, in_flight=SLOW_IN_FLIGHT),
]


class Contest:
    """The rounds of a case.

    Args:
        case: What runs.
        cores: Of the coordinator and of the worker.
        how: How the second core is slowed.
        options: The steps of a run, the model, and the bound on micro-batches in flight.
        console: Says why a peer does not run.
    """

    def __init__(
        self,
        case: Case,
        cores: tuple[int, int],
        how: How,
        options: argparse.Namespace,
        console: Console,
    ) -> None:
        self.case = case
        self._console = console
        ending = ", adapters" if case.has_adapters else ""
        self._arena = Arena(
            cores,
            Setting(case.title, case.speed),
            how,
            options.steps,
            case.micro_batches,
            plan="auto" if PLANNED in case.peers else None,
            in_flight=options.in_flight or case.in_flight,
            trains=options.model + ending,
        )
        self._measured = Measured(self._arena.setting, (NUM_LAYERS, SHORT))
        self._at_once: list[float] = []
        self._peers = [REPLICAS]
        for peer in case.peers:
            reason = why_not(peer, self._arena)
            if reason is None:
                self._peers.append(peer)
            else:
                console.print(f"{peer} skipped: {reason}")

    def set_speed(self) -> None:
        """Let the second core have so much time that it has the case's speed: at each stop it loses
        more than the time that it stands still, and not the same at every share."""
        if self.case.speed == 1:
            return
        speed = self._second_speed()
        for _ in range(MOST_CORRECTIONS):
            if abs(speed / self.case.speed - 1) <= SPEED_TOLERANCE:
                break
            self._set_share(min(1, self._arena.setting.share * self.case.speed / speed))
            speed = self._second_speed()
        self._console.print(
            f"{self.case.name}: with {self._arena.setting.share:.2f} of its time the second core "
            f"has {speed:.2f} × the first one's speed"
        )

    def _second_speed(self) -> float:
        """Of the second core, in speeds of the first one."""
        first, second = (self._arena.alone(ONE_CORE, core).tokens_per_second for core in (0, 1))
        return second / first

    def _set_share(self, share: float) -> None:
        setting = replace(self._arena.setting, share=share)
        self._arena = replace(self._arena, setting=setting)
        self._measured = replace(self._measured, setting=setting)

    def run_round(self) -> None:
        """Everything once."""
        splits = {peer: split for peer, split in self.case.splits.items() if peer in self._peers}
        run_round(self._arena, self._measured, self._peers, splits)
        self._leave_out_lines()
        measured = self._measured
        speeds = [outcome.tokens_per_second for outcome in self._arena.both_alone(ONE_CORE)]
        self._at_once.append(sum(speeds) / measured.outcomes[ONE_CORE][-1].tokens_per_second)
        ratios = [f"{peer} {measured.ratios(peer)[-1]:.2f}" for peer in measured.outcomes]
        ratios.append(f"both alone at once {self._at_once[-1]:.2f}")
        self._console.print(f"{self.case.name}: × one core: {', '.join(ratios)}")

    def _leave_out_lines(self) -> None:
        """Where the planner takes no replicas, its plan runs once, and the table has the given
        plan alone."""
        planned = self._measured.outcomes.get(PLANNED)
        if planned is None or SHARED in planned[-1].plan:
            return
        speed = self._measured.ratios(PLANNED)[-1]
        self._console.print(
            f"{self.case.name}: {AUTO} takes no replicas, but {planned[-1].plan}: {speed:.2f} × "
            "one core. The replicas have the given shares."
        )
        self._peers.remove(PLANNED)
        del self._measured.outcomes[PLANNED]

    def report(self) -> None:
        """Print the medians of the rounds' ratios."""
        measured, case = self._measured, self.case
        speed, costs = measured.second_speed, measured.costs
        bound = costs.replicas_bound(case.own, case.micro_batches, speed)
        best = costs.balanced_share(case.micro_batches, speed)
        table = Table(title=case.title)
        for column in ("run", "here", "tokens/s", "× one core", "of the rounds", "replicas ×"):
            table.add_column(column, justify="right")
        for peer, outcomes in measured.outcomes.items():
            ratios = measured.ratios(peer)
            table.add_row(
                AUTO if peer == PLANNED else peer,
                "" if peer in (ONE_CORE, SLOWED_CORE) else str(outcomes[-1].split),
                f"{median(outcome.tokens_per_second for outcome in outcomes):.0f}",
                f"{median(ratios):.3f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{median(measured.ratios(REPLICAS, peer)):.3f}",
            )
        reached = median(measured.ratios(REPLICAS))
        self._console.print(table)
        head = costs.rest_seconds / costs.layer_seconds
        self._console.print(
            f"{case.name}: {reached:.3f} × one core; goal {case.goal:g}; bound {bound:.3f}, of "
            f"which {reached / bound:.0%} is reached. The second core has {speed:.2f} × the first "
            f"one's speed, and all but the layers takes as long as {head:.2f} layers; with these, "
            f"{best} of {case.micro_batches} micro-batches here are fastest. Both cores alone at "
            f"the same time do {median(self._at_once):.2f} × one core, where their sum one after "
            f"the other is {1 + speed:.2f}."
        )


def run(cases: Sequence[Contest], num_rounds: int) -> None:
    """All rounds, and their tables."""
    for contest in cases:
        contest.set_speed()
    for _ in range(num_rounds):
        for contest in cases:
            contest.run_round()
    for contest in cases:
        contest.report()
