"""Reports on stages whose speed drifts, and the moves that follow."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from lightning_hetero.errors import ModelError
from lightning_hetero.pipeline.recorder import Laps
from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.candidates import spans_of
from lightning_hetero.planner.drift import StageSeconds
from lightning_hetero.planner.profile import Measured, Profile
from lightning_hetero.planner.replan import MoveCosts
from lightning_hetero.protocol import messages as m
from lightning_hetero.replan.watch import (
    Horizon,
    Watch,
    own_seconds,
    parts_of_workers,
)
from lightning_hetero.strategy.training_run import moves_layers

from ..planner.profiles import coordinator, device, ends, profile

PLAN = Plan([StagePlan(["a"], (0, 3)), StagePlan(["b"], (3, 6))], micro_batches=2)


@dataclass
class Place:
    """A worker as far as a watch knows it."""

    name: str
    where: str


@dataclass
class Told:
    """A deployment, its coordinator and the coordinator's stages, as far as a watch knows them."""

    plan: Plan = PLAN
    step: int = 0
    fault: str = ""
    timings: list[tuple[int, m.Timings]] = field(default_factory=list)
    members: list[Place] = field(default_factory=list)

    @property
    def connections(self) -> Told:
        return self

    @property
    def coordinator(self) -> Told:
        return self

    @property
    def stages(self) -> Told:
        return self

    def take_timings(self) -> list[tuple[str, m.Timings]]:
        taken, self.timings = self.timings, []
        return taken

    def check_can_move(self, plan: Plan) -> None:
        if self.fault:
            raise ModelError(self.fault)


def costs_of(told: Any) -> MoveCosts:
    """Layers of 30 bytes, of which 10 bytes a second come to a process with plenty of room."""
    num_layers = told.plan.stages[-1].layers[1]
    return MoveCosts([30] * num_layers, dict.fromkeys((COORDINATOR, "a", "b"), 1e9), 10.0)


def watch_over(told: Told, moves: bool = False, steps_left: float = math.inf) -> Watch:
    deployment: Any = told
    run = Horizon(steps_left=lambda: steps_left, costs_of=costs_of)
    return Watch(deployment, None, None, moves, run)


def pass_steps(told: Told, watch: Watch, count: int, *seconds: float) -> list[Plan]:
    """Steps in which each worker takes so long for a micro-batch; the new plans, if any."""
    found = []
    for _ in range(count):
        told.step += 1
        told.timings += [
            (name, m.Timings(told.step, value, value, 2))
            for name, value in zip("ab", seconds, strict=False)
        ]
        watch.note_own()
        found.append(watch.next_plan())
    return [plan for plan in found if plan is not None]


def said_in(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [line for line in caplog.messages if words in line]


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of a watch. Workers of earlier tests may still log theirs."""
    return [record.getMessage() for record in caplog.records if "replan" in record.name]


def test_without_replanning_one_warning_names_the_gain_of_a_move(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Told()
    watch = watch_over(told)
    assert pass_steps(told, watch, 20, 0.03, 0.03) == []
    assert pass_steps(told, watch, 40, 0.03, 0.12) == []
    (line,) = lines_of(caplog)
    assert "b has become slower: a micro-batch takes it 120 ms, 4 times" in line
    assert "With `replan=True`, moving layers would save about" in line


def test_a_process_in_the_place_of_a_lost_one_is_named_with_its_own_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Told(members=[Place("a", "a"), Place("b", "b (spare:9999)")])
    watch = watch_over(told)
    pass_steps(told, watch, 20, 0.03, 0.03)
    pass_steps(told, watch, 40, 0.03, 0.12)
    (line,) = lines_of(caplog)
    assert "b (spare:9999) has become slower" in line
    assert "The slowest stage is b (spare:9999)." in line


def test_with_replanning_the_layers_are_to_move(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    watch = watch_over(told, moves=True)
    pass_steps(told, watch, 20, 0.03, 0.03)
    (plan,) = pass_steps(told, watch, 20, 0.03, 0.12)
    assert [stage.layers for stage in plan.stages] == [(0, 5), (5, 6)]
    assert "b has become slower" in caplog.text


def test_a_stage_that_is_slow_from_the_first_step_on_gives_layers_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Told()
    (plan,) = pass_steps(told, watch_over(told, moves=True), 20, 0.03, 0.06)
    assert [stage.layers for stage in plan.stages] == [(0, 5), (5, 6)]
    (line,) = said_in(caplog, "go from b to a")
    assert "stage 2 on b takes 2 times as long as its neighbors (60 ms" in line
    assert "layers 3 to 4 go from b to a, and a step should take" in line
    assert lines_of(caplog) == []  # nothing has drifted


def test_without_replanning_a_slow_stage_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    assert pass_steps(told, watch_over(told), 60, 0.03, 0.06) == []
    (line,) = said_in(caplog, "takes 2 times as long")
    assert "with `replan=True` layers 3 to 4 go from b to a" in line


def test_a_move_that_does_not_pay_any_more_is_not_made(caplog: pytest.LogCaptureFixture) -> None:
    """It takes six seconds, and a step gets shorter by some 50 ms."""
    told = Told()
    assert pass_steps(told, watch_over(told, moves=True, steps_left=20), 60, 0.03, 0.06) == []
    (line,) = said_in(caplog, "Layers stay: the move takes about 6 s")
    assert "more than the 20 steps that are left would save" in line


def test_after_a_move_the_next_one_waits_for_as_many_steps() -> None:
    told = Told()
    watch = watch_over(told, moves=True)
    (plan,) = pass_steps(told, watch, 17, 0.03, 0.06)
    after = Told(plan, step=told.step)
    deployment: Any = after
    watch = watch.after_move(deployment, None)
    assert pass_steps(after, watch, 16, 0.3, 0.03) == []
    assert len(pass_steps(after, watch, 1, 0.3, 0.03)) == 1


@pytest.mark.parametrize(
    ("stages", "layers", "ends"),
    [
        pytest.param([([COORDINATOR], 2), (["a"], 4)], 6.0, 2.0, id="first"),
        pytest.param([(["a"], 4), ([COORDINATOR], 2)], 0.0, 8.0, id="last"),
        pytest.param([(["a", COORDINATOR], 6)], 6.0, 2.0, id="replica"),
    ],
)
def test_own_layers_are_known_apart_from_the_head_unless_they_are_the_last(
    stages: list[tuple[list[str], int]], layers: float, ends: float
) -> None:
    ranges = spans_of([count for _, count in stages])
    pairs = zip(stages, ranges, strict=True)
    plan = Plan([StagePlan(names, span) for (names, _), span in pairs])
    laps = Laps(Counter(forward=1.0, layers=1.0, backward=4.0, loss=2.0))
    assert own_seconds(plan, laps, 1) == StageSeconds(layers, ends)


@pytest.mark.parametrize(
    ("names", "slowest"),
    [("ab", "stage 1"), ("aba", "stage 1 and 3"), ("baa", "stage 2 and 3")],
)
def test_the_slowest_process_is_told_by_all_of_its_stages(names: str, slowest: str) -> None:
    stages = [StagePlan([name], (n, n + 1)) for n, name in enumerate(names)]
    told = Told(Plan(stages, micro_batches=2))
    watch = watch_over(told)
    pass_steps(told, watch, 20, 0.12, 0.03)
    assert watch.bottleneck == slowest


def test_a_move_that_saves_little_is_not_made(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(Plan([StagePlan(["a"], (0, 1)), StagePlan(["b"], (1, 2))], micro_batches=2))
    watch = watch_over(told, moves=True)
    pass_steps(told, watch, 20, 0.03, 0.03)
    assert pass_steps(told, watch, 20, 0.03, 0.12) == []
    assert "Moving layers would not save 5% of the step" in caplog.text


def test_layers_that_cannot_move_stay_where_they_are(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(fault="They share a parameter.")
    watch = watch_over(told, moves=True)
    pass_steps(told, watch, 20, 0.03, 0.03)
    assert pass_steps(told, watch, 20, 0.03, 0.12) == []
    assert "The layers cannot move. They share a parameter." in caplog.text


def test_a_step_that_a_stage_does_not_report_is_ignored() -> None:
    told = Told()
    watch = watch_over(told, moves=True)
    pass_steps(told, watch, 17, 0.03, 0.03)
    assert pass_steps(told, watch, 20, 0.12) == []
    assert len(pass_steps(told, watch, 20, 0.03, 0.12)) == 1


def measured_on(tmp_path: Path, **seconds: float) -> Measured:
    """A profile of six layers on two workers, and its file."""
    workers = [device(name, each / 3, 2 * each / 3) for name, each in seconds.items()]
    own = coordinator(ends(0.001, 0.001))
    found = Measured(profile(6, workers, own, batch_size=2), tmp_path / "profile.yaml")
    found.profile.to_yaml(tmp_path / "profile.yaml")
    return found


def watch_measured(told: Told, measured: Measured) -> Watch:
    deployment: Any = told
    return Watch(deployment, measured, None, moves=False)


def stale(measured: Measured) -> list[str]:
    assert measured.path is not None
    return [each.name for each in Profile.from_yaml(measured.path).devices if each.stale]


def test_the_first_steps_confirm_the_measurements(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told, measured = Told(), measured_on(tmp_path, a=0.01, b=0.01)
    pass_steps(told, watch_measured(told, measured), 30, 0.03, 0.03)
    assert (stale(measured), lines_of(caplog)) == ([], [])


def test_a_measurement_that_the_first_steps_contradict_is_marked_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told, measured = Told(), measured_on(tmp_path, a=0.01, b=0.2)
    pass_steps(told, watch_measured(told, measured), 8, 0.03, 0.03)
    assert stale(measured) == ["b"]
    (line,) = lines_of(caplog)
    assert "a 30 ms (measured: 30 ms), b 30 ms (measured: 600 ms)" in line
    assert f"next start measures b again and plans anew; {measured.path}" in line


def test_a_measurement_that_was_confirmed_is_not_marked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = measured_on(tmp_path, a=0.01, b=0.2)
    devices = [replace(each, confirmed=True) for each in found.profile.devices]
    measured = Measured(replace(found.profile, devices=devices), found.path)
    assert measured.path is not None
    measured.profile.to_yaml(measured.path)
    told = Told()
    pass_steps(told, watch_measured(told, measured), 8, 0.03, 0.03)
    assert stale(measured) == []
    assert "b will not be measured again by itself" in caplog.text
    assert "PipelineProfiler(force=True)" in caplog.text


@pytest.mark.parametrize("content", [None, "devices: ["])
def test_a_file_that_cannot_be_marked_stops_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    measured = measured_on(tmp_path, a=0.01, b=0.2)
    assert measured.path is not None
    if content is None:
        measured.path.unlink()
    else:
        measured.path.write_text(content)
    told = Told()
    pass_steps(told, watch_measured(told, measured), 8, 0.03, 0.03)
    assert "The measurements cannot be marked as wrong" in caplog.text
    assert "The plan is based on wrong measurements" in caplog.text


def test_replicas_of_a_window_have_their_parts_of_all_its_micro_batches() -> None:
    plan = Plan([StagePlan(["a", "b"], (0, 6), shares=[5, 3])], micro_batches=1)
    assert parts_of_workers(plan, num_batches=8) == {"a": 5 / 8, "b": 3 / 8}
    # A batch by itself has one micro-batch, which the first replica runs.
    assert parts_of_workers(plan, num_batches=1) == {"a": 1, "b": 0}


def test_under_manual_optimization_replanning_is_told_to_do_nothing() -> None:
    by_hand: Any = SimpleNamespace(automatic_optimization=False)
    with pytest.warns(UserWarning, match="do not move .*; set `automatic_optimization = True`"):
        assert not moves_layers(by_hand)
    by_hand.automatic_optimization = True
    assert moves_layers(by_hand)
