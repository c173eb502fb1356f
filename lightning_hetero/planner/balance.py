"""Balance: when to replace a run's plan by a better one, by the seconds of its stages alone.

    steps   1 2     3 .. 7   8 .. 12   13 .. 17     18
            ignored └ window ┘└ window ┘└ window ┘  layers move here, if another plan would have
                                                    saved 5 % of the step in each window

A balance works without measurements before the run, and does not look for the time of a change. It
takes medians over separate windows, so noise is harmless: it would have to point the same way in
each of them.

The known seconds of a process may be wrong, such as with unlike layers. Then a move disappoints,
and the next one leads back. Such a return ends all moves until a stage drifts, and each return
doubles the windows of a move. So a run does not go to and fro.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from ..plan import COORDINATOR, Plan
from ..units import in_micro_batches
from .drift import THRESHOLD, WARM_UP, WINDOW, StageSeconds, medians
from .feasibility import with_both_ends
from .profile import Profile
from .replan import LEAST_GAIN, Known, Replanned, replan, share_saved

NUM_WINDOWS = 3
"""The number of windows; a plan has to save enough in each."""

MOST_WINDOWS = 12
"""The most windows that a move needs after moves that led back."""

LEAST_CHANGE = 0.05
"""Share by which the seconds of a process must change before a better plan is searched again."""

Seconds = Mapping[str, StageSeconds]


@dataclass(frozen=True)
class Judged:
    """The result of the latest windows.

    Args:
        seconds: The seconds of the processes.
        change: A better plan; None to keep the present one.
    """

    seconds: Seconds
    change: Replanned | None


@dataclass
class Balance:
    """Decides when layers or shares move.

    Args:
        plan: The present plan.
        num_windows: Windows that a move needs.
        rests: Whether layers and shares stay until a stage drifts.
        proposed: The proposed and the replaced plans of this run.
        profile: The times with which layers moved last; None before the first move.
    """

    plan: Plan
    num_windows: int = NUM_WINDOWS
    rests: bool = False
    proposed: list[Plan] = field(default_factory=list)
    profile: Profile | None = None
    _num_steps: int = 0
    _steps: list[Seconds] = field(default_factory=list)
    _windows: deque[Seconds] = field(default_factory=deque)
    # The seconds of the last search without a better plan; a search takes time.
    _searched: Seconds = field(default_factory=dict)

    def note(self, seconds: Seconds, known: Known) -> Judged | None:
        """Note the seconds of a step.

        Returns:
            The result of the latest windows; None until they are complete.
        """
        self._num_steps += 1
        if self._num_steps <= WARM_UP:
            return None
        self._steps.append(seconds)
        if len(self._steps) < WINDOW:
            return None
        self._windows.append(medians(self._steps))
        self._steps.clear()
        while len(self._windows) > self.num_windows:
            self._windows.popleft()
        if len(self._windows) < self.num_windows or self.rests:
            return None
        now = medians([*self._windows])
        return Judged(now, self._better(now, known))

    def _better(self, now: Seconds, known: Known) -> Replanned | None:
        if _are_alike(now, self._searched):
            return None
        found = replan(self.plan, known, now)
        if found is None or share_saved(found.plan, self.plan, known, now) < LEAST_GAIN:
            self._searched = now
            return None
        each = [share_saved(found.plan, self.plan, known, window) for window in self._windows]
        return found if min(each) >= LEAST_GAIN else None

    def propose(self, change: Replanned) -> None:
        """Note that the run is to change to another plan."""
        if change.plan in self.proposed:
            self.num_windows = min(2 * self.num_windows, MOST_WINDOWS)
            self.rests = True
        self.proposed += [self.plan, change.plan]
        self.profile = change.profile
        self._windows.clear()

    def stay(self) -> None:
        """Keep the plan until a stage drifts."""
        self.rests = True

    def note_drift(self) -> None:
        """Allow moves again after a lasting change of a stage."""
        self.rests = False

    def after_move(self, plan: Plan) -> Balance:
        """The balance of the next plan."""
        if {*plan.workers} != {*self.plan.workers}:
            return Balance(plan)
        return Balance(plan, self.num_windows, self.rests, self.proposed, self.profile)


def _are_alike(seconds: Seconds, others: Seconds) -> bool:
    return seconds.keys() == others.keys() and all(
        abs(stage.total - others[name].total) <= LEAST_CHANGE * others[name].total
        for name, stage in seconds.items()
    )


def seen(plan: Plan, seconds: Seconds) -> str:
    """How the slowest process compares with its neighbors, as the start of a sentence."""
    slowest = _slowest(seconds)
    others = _neighbors(plan, slowest) & seconds.keys() or seconds.keys() - {slowest}
    if not others:
        return f"{_with_stages(plan, slowest)} is alone"
    mean = statistics.mean(seconds[name].total for name in others)
    times = seconds[slowest].total / mean if mean else float("inf")
    return (
        f"{_with_stages(plan, slowest)} takes {times:.2g} times as long as its neighbors "
        f"({1e3 * seconds[slowest].total:.3g} ms for a micro-batch)"
    )


def moves(before: Plan, after: Plan) -> str:
    """The shares or layers that change hands between two plans, as the end of a sentence."""
    if before.differs_in_shares_only(after):
        return ", ".join(_shares(before, after))
    return ", ".join(_layers(before, after))


def why_it_rests(plan: Plan, known: Known, seconds: Seconds) -> str:
    """Why a process keeps its work although it takes much longer than the others; empty if the
    slowest process does not."""
    slowest = _slowest(seconds)
    others = [stage.total for name, stage in seconds.items() if name != slowest]
    if not others or seconds[slowest].total <= (1 + THRESHOLD) * statistics.mean(others):
        return ""
    if slowest == COORDINATOR and known.at_present(plan, seconds).keeps_own:
        if not any(stage.is_local and stage.layer_indices for stage in plan.stages):
            return "It has no layer to give away."
        return (
            "Its layers stay, because their time is not known apart from that of the head. Use "
            "plan='auto' or the callback `PipelineProfiler`, which measure them."
        )
    if known.profile is None and known.costs is not None:
        free = replan(plan, replace(known, costs=None), seconds)
        if free is not None and free.is_worth_it:
            return (
                f"It would save {free.gain:.0%} of the step if {moves(plan, free.plan)}, but the "
                "memory there does not suffice."
            )
    return f"No other place of whole layers would save {LEAST_GAIN:.0%} of the step."


def _slowest(seconds: Seconds) -> str:
    return max(seconds, key=lambda name: seconds[name].total)


def _neighbors(plan: Plan, name: str) -> set[str]:
    """The other processes of the same and of the adjacent stages."""
    stages = with_both_ends(plan)
    places = [place for place, stage in enumerate(stages) if name in stage.workers]
    near = {near for place in places for near in (place - 1, place, place + 1)}
    found = {worker for n, stage in enumerate(stages) if n in near for worker in stage.workers}
    return found - {name}


def _with_stages(plan: Plan, name: str) -> str:
    """A process with the numbers of its stages."""
    if name == COORDINATOR:
        return "the coordinator"
    numbers = [n for n, stage in enumerate(plan.remote_stages, start=1) if name in stage.workers]
    return f"stage {' and '.join(map(str, numbers))} on {name}"


def _shares(before: Plan, after: Plan) -> Iterator[str]:
    for old, new in zip(before.stages, after.stages, strict=True):
        if old != new:
            pairs = zip(new.workers, new.present_shares, strict=True)
            each = ", ".join(f"{_named(name)} runs {share}" for name, share in pairs)
            yield f"of {in_micro_batches(sum(new.present_shares))} {each}"


def _layers(before: Plan, after: Plan) -> Iterator[str]:
    old, new = _holders(before), _holders(after)
    moved = [(n, old[n], new[n]) for n in sorted(old) if old[n] != new[n]]
    for (_, (source, target)), run in groupby(
        enumerate(moved), key=lambda pair: (pair[1][0] - pair[0], pair[1][1:])
    ):
        numbers = [layer for _, (layer, *_) in run]
        what = f"layer {numbers[0]} goes"
        if len(numbers) > 1:
            what = f"layers {numbers[0]} to {numbers[-1]} go"
        yield f"{what} from {source} to {target}"


def _holders(plan: Plan) -> dict[int, str]:
    return {
        number: " and ".join(map(_named, stage.workers))
        for stage in plan.stages
        for number in stage.layer_indices
    }


def _named(name: str) -> str:
    return "the coordinator" if name == COORDINATOR else name
