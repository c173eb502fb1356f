"""Layers and shares move where a stage takes longer than its neighbors, and rest where none does.

A fleet is simulated: devices of given speeds, whose seconds a step reports. The step that a plan
takes is what the planner's simulator plays, so nothing here waits.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.balance import (
    NUM_WINDOWS,
    Balance,
    moves,
    seen,
    why_it_rests,
)
from lightning_hetero.planner.candidates import Candidate
from lightning_hetero.planner.drift import WINDOW, StageSeconds
from lightning_hetero.planner.feasibility import candidate_of
from lightning_hetero.planner.profile import Profile, Timing
from lightning_hetero.planner.replan import Known, MoveCosts, PlanChange
from lightning_hetero.planner.solver import even_plan

from .profiles import coordinator, device, ends, profile

HEAD_SECONDS = 1e-3


@dataclass
class Fleet:
    """Devices that take so many seconds for one layer and one micro-batch.

    Args:
        layer_seconds: By device.
        plan: Where the layers are.
        noise: The standard deviation of a step's seconds, as a share of them.
        weights: What each layer takes of a usual one; empty where all are alike.
        profile: Measurements, if there are any.
    """

    layer_seconds: dict[str, float]
    plan: Plan
    noise: float = 0.0
    weights: Sequence[float] = ()
    profile: Profile | None = None
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    num_steps: int = 0
    moved: list[tuple[int, Plan]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.balance = Balance(self.plan)

    @property
    def known(self) -> Known:
        return Known(self.profile or self.balance.profile)

    def seconds(self) -> dict[str, StageSeconds]:
        """What the processes report of a step."""
        found = {COORDINATOR: 0.0}
        for stage in self.plan.stages:
            size = sum(self.weight(number) for number in stage.layer_indices)
            pairs = zip(stage.workers, stage.present_shares, strict=True)
            for name, share in pairs:
                part = size * share / sum(stage.present_shares) * self.layer_seconds[name]
                found[name] = found.get(name, 0.0) + part * self.dice.gauss(1, self.noise)
        ends = {name: HEAD_SECONDS if name == COORDINATOR else 0.0 for name in found}
        return {name: StageSeconds(value, ends[name]) for name, value in found.items()}

    def weight(self, number: int) -> float:
        return self.weights[number] if self.weights else 1.0

    def run(self, num_steps: int) -> Fleet:
        for _ in range(num_steps):
            self.num_steps += 1
            judged = self.balance.note(self.seconds(), self.known)
            if judged is not None and judged.change is not None:
                self.balance.propose(judged.change)
                self.plan = judged.change.plan
                self.balance = self.balance.after_move(self.plan)
                self.moved.append((self.num_steps, self.plan))
        return self

    @property
    def held(self) -> list[int]:
        return [len(stage.layer_indices) for stage in self.plan.stages]


def line(*counts: int, micro_batches: int = 8) -> Plan:
    """Layers of the coordinator, of a, of b, ..."""
    spans = itertools.pairwise(itertools.accumulate(counts, initial=0))
    names = [COORDINATOR, *"abcdef"]
    return Plan(
        [StagePlan([n], span) for n, span in zip(names, spans, strict=False)], micro_batches
    )


def candidates(plan: Plan, layer_seconds: Mapping[str, float]) -> list[Candidate]:
    """The plan first, and then all places of its layers in as many stages, by what the devices
    really take."""
    num_layers, num = plan.stages[-1].layers[1], len(plan.workers)
    own = coordinator([*_timings(layer_seconds[COORDINATOR]), *ends(HEAD_SECONDS / 2, 0)])
    workers = [device(n, s / 3, 2 * s / 3) for n, s in layer_seconds.items() if n != COORDINATOR]
    real = profile(num_layers, workers, own, batch_size=plan.micro_batches)
    cuts = itertools.combinations_with_replacement(range(num_layers + 1), num)
    counts = ([b - a for a, b in itertools.pairwise((0, *cut, num_layers))] for cut in cuts)
    plans = [plan]
    for each in counts:
        if all(each[1:]):
            plans.append(replace(plan, stages=line(*each).stages))
    return [candidate_of(each, real) for each in plans]


def over_best(plan: Plan, layer_seconds: Mapping[str, float]) -> float:
    """How much longer the plan's step is than the shortest one, as a share, by the simulator."""
    found, *others = candidates(plan, layer_seconds)
    best = found.step_seconds
    for other in sorted(others, key=lambda each: each.least_seconds):
        if other.least_seconds >= best:
            break
        best = min(best, other.step_seconds)
    return found.step_seconds / best - 1


def _timings(layer_seconds: float) -> list[Timing]:
    return device(COORDINATOR, layer_seconds / 3, 2 * layer_seconds / 3).timings


def speeds(*each: float) -> dict[str, float]:
    """Seconds of a layer by the speed of each device, the coordinator first."""
    return {n: 0.03 / speed for n, speed in zip([COORDINATOR, *"abcdef"], each, strict=False)}


HALF = speeds(1, 1, 0.5)


@pytest.mark.parametrize("micro_batches", [4, 8])
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(even_plan(6, ["a", "b"]), id="even, 6"),
        pytest.param(even_plan(10, ["a", "b"]), id="even, 10"),
        pytest.param(line(2, 2, 2), id="by hand, 6"),
        pytest.param(line(1, 2, 5), id="by hand, 8"),
    ],
)
def test_a_plan_comes_close_to_the_best_one_in_a_single_move(
    plan: Plan, micro_batches: int
) -> None:
    fleet = Fleet(HALF, replace(plan, micro_batches=micro_batches)).run(25)
    assert len(fleet.moved) == 1
    assert over_best(fleet.plan, HALF) <= 0.05
    assert len(fleet.run(200).moved) == 1


@pytest.mark.parametrize("start", [0, 4, 30])
def test_a_device_that_becomes_slow_is_relieved_whenever_that_begins(start: int) -> None:
    fleet = Fleet(speeds(1, 1, 1), line(4, 4, 4)).run(start)
    fleet.layer_seconds = HALF
    fleet.run(25)
    assert fleet.held == [5, 5, 2]
    assert len(fleet.run(200).moved) == 1


@pytest.mark.parametrize("start", [4, 20, 21, 22, 23, 24])
def test_the_share_of_a_replica_that_falls_to_a_third_fits_within_twenty_steps(start: int) -> None:
    stage = StagePlan(["a", "b"], (0, 4), shares=[6, 6])
    fleet = Fleet(speeds(1, 1, 1), Plan([stage], micro_batches=12)).run(start)
    assert fleet.moved == []
    fleet.layer_seconds = speeds(1, 1, 1 / 3)
    fleet.run(20)
    assert fleet.plan.stages[0].shares == [9, 3]
    assert len(fleet.run(200).moved) == 1


GOOD = {
    "equal": (speeds(1, 1, 1), line(2, 2, 2)),
    "many layers": (speeds(1, 1, 1, 1), line(8, 8, 8, 8, micro_batches=4)),
    "unequal": (HALF, line(4, 4, 2)),
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("seed", range(2))
def test_a_good_plan_rests_under_noise(name: str, seed: int) -> None:
    seconds, plan = GOOD[name]
    assert Fleet(seconds, plan, noise=0.1, dice=random.Random(seed)).run(200).moved == []


def test_short_disturbances_move_nothing() -> None:
    fleet = Fleet(speeds(1, 1, 1), line(4, 4, 4))
    for _ in range(6):
        fleet.layer_seconds = speeds(1, 1, 0.4)
        fleet.run(10)
        fleet.layer_seconds = speeds(1, 1, 1)
        fleet.run(20)
    assert fleet.moved == []


def test_layers_that_are_unlike_do_not_go_to_and_fro() -> None:
    """The light layer leaves first, so both guesses at a layer's time are wrong."""
    fleet = Fleet(speeds(9, 1, 1), line(0, 2, 2), weights=[5, 1, 1, 1])
    fleet.run(500)
    assert len(fleet.moved) <= 3
    still = len(fleet.moved)
    assert len(fleet.run(500).moved) == still


def test_a_move_that_leads_back_ends_all_moves_until_a_stage_drifts() -> None:
    fleet = Fleet(speeds(1, 1, 1), line(4, 4, 4))
    for layer_seconds in (HALF, speeds(1, 1, 1), HALF):
        fleet.layer_seconds = layer_seconds
        fleet.run(50)
    assert fleet.held == [4, 4, 4]
    assert fleet.balance.rests
    assert fleet.balance.num_windows == 2 * NUM_WINDOWS
    fleet.balance.note_drift()
    assert len(fleet.run(2 * NUM_WINDOWS * WINDOW).moved) == 3


def test_measurements_say_what_is_known_and_present_seconds_what_holds() -> None:
    """By the measurements the devices are alike."""
    own = coordinator([*_timings(0.03), *ends(HEAD_SECONDS / 2, 0)])
    workers = [device(name, 0.01, 0.02) for name in "ab"]
    measured = profile(6, workers, own, batch_size=8)
    fleet = Fleet(HALF, line(2, 2, 2), profile=measured).run(25)
    assert len(fleet.moved) == 1
    assert over_best(fleet.plan, HALF) <= 0.05


def test_a_process_gets_no_more_than_it_has_room_for() -> None:
    fleet = Fleet(HALF, line(4, 4, 4))
    costs = MoveCosts([10] * 12, {COORDINATOR: 40, "a": 1000, "b": 1000}, 1.0)
    judged = [fleet.balance.note(fleet.seconds(), Known(costs=costs)) for _ in range(20)]
    (change,) = [each.change for each in judged if each is not None]
    assert change is not None
    assert [len(stage.layer_indices) for stage in change.plan.stages] == [4, 6, 2]
    # Two layers come to a.
    assert costs.moving_seconds(fleet.plan, change.plan) == 20


def test_a_move_pays_if_the_steps_that_are_left_save_more() -> None:
    change = PlanChange(line(5, 5, 2), before_seconds=2.0, after_seconds=1.5)
    assert change.pays(steps_left=21, moving_seconds=10.0)
    assert not change.pays(steps_left=20, moving_seconds=10.0)


def test_what_is_seen_and_what_moves_are_sentences() -> None:
    fleet = Fleet(HALF, line(2, 2, 2))
    seconds = fleet.seconds()
    assert seen(fleet.plan, seconds) == (
        "stage 2 on b takes 2 times as long as its neighbors (120 ms for a micro-batch)"
    )
    assert moves(line(2, 2, 2), line(3, 2, 1)) == (
        "layer 2 goes from a to the coordinator, layer 4 goes from b to a"
    )
    assert moves(line(1, 1, 6), line(3, 3, 2)) == (
        "layer 1 goes from a to the coordinator, layer 2 goes from b to the coordinator, "
        "layers 3 to 5 go from b to a"
    )
    before = Plan([StagePlan(["a", "b"], (0, 4), shares=[6, 6])], micro_batches=12)
    after = Plan([StagePlan(["a", "b"], (0, 4), shares=[9, 3])], micro_batches=12)
    assert moves(before, after) == "of 12 micro-batches a runs 9, b runs 3"


def test_it_is_said_why_a_slow_stage_keeps_its_layers() -> None:
    one = Fleet(speeds(1, 1, 0.1), line(1, 1, 1))
    assert "No other place of whole layers" in why_it_rests(one.plan, one.known, one.seconds())
    full = MoveCosts([10] * 12, {COORDINATOR: 1, "a": 1, "b": 1}, 1.0)
    slow = Fleet(HALF, line(4, 4, 4))
    assert "memory" in why_it_rests(slow.plan, Known(costs=full), slow.seconds())
    last = Plan([StagePlan(["a"], (0, 2)), StagePlan([COORDINATOR], (2, 6))], 8)
    seconds = {"a": StageSeconds(1.0), COORDINATOR: StageSeconds(0.0, 4.0)}
    assert "not known" in why_it_rests(last, Known(), seconds)
    even = Fleet(speeds(1, 1, 1), line(4, 4, 4))
    assert why_it_rests(even.plan, even.known, even.seconds()) == ""
