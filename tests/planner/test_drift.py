"""Drift is noticed soon and told seldom; measurements that real steps contradict are named."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from lightning_hetero.planner.drift import (
    MOST_SUSTAINED,
    SUSTAINED,
    WARM_UP,
    WINDOW,
    Drift,
    Watcher,
    misjudged,
)
from lightning_hetero.planner.drift import StageSeconds as S

STEADY = {"coordinator": S(0.03, 0.02), "a": S(0.06), "b": S(0.08)}


def scaled(**factors: float) -> dict[str, S]:
    return {
        name: S(stage.layers * factors.get(name, 1), stage.ends * factors.get(name, 1))
        for name, stage in STEADY.items()
    }


def noticed(watcher: Watcher, steps: Iterable[dict[str, S]]) -> list[tuple[int, Drift]]:
    """After how many of the steps it noticed what."""
    found = [(number, watcher.note(step)) for number, step in enumerate(steps, start=1)]
    return [(number, drift) for number, drift in found if drift is not None]


def settled() -> Watcher:
    """One that has seen the first steady steps."""
    watcher = Watcher()
    assert noticed(watcher, [STEADY] * 30) == []
    return watcher


@pytest.mark.parametrize("factor", [2.0, 4.0])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_stage_at_half_or_a_quarter_of_its_speed_is_noticed_within_twenty_steps(
    name: str, factor: float
) -> None:
    ((step, drift),) = noticed(settled(), [scaled(**{name: factor})] * 60)
    assert step <= 12
    assert (drift.stage, drift.slowest) == (name, name)
    assert drift.seconds == pytest.approx(factor * drift.expected_seconds)
    assert f"{name} has become slower" in str(drift)
    assert f"{factor:.2g} times the earlier" in str(drift)


def test_a_slowest_stage_that_becomes_faster_is_noticed() -> None:
    ((_, drift),) = noticed(settled(), [scaled(b=0.4)] * 60)
    assert (drift.stage, drift.slowest) == ("b", "a")
    assert "b has become faster" in str(drift)


def test_a_change_and_its_end_are_two_drifts() -> None:
    watcher = settled()
    (there,) = noticed(watcher, [scaled(b=2)] * 60)
    (back,) = noticed(watcher, [STEADY] * 60)
    assert [there[1].stage, back[1].stage] == ["b", "b"]
    assert back[1].seconds < back[1].expected_seconds


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([scaled(b=1.15)] * 99, id="below the threshold"),
        pytest.param([scaled(a=1.2)] * 99, id="not the slowest"),
        pytest.param([scaled(coordinator=1.7, a=1.7, b=1.7)] * 99, id="all alike, slower"),
        pytest.param([scaled(coordinator=0.5, a=0.5, b=0.5)] * 99, id="all alike, faster"),
        pytest.param([scaled(b=9), STEADY, STEADY, STEADY] * 25, id="every fourth step"),
        pytest.param([scaled(b=3)] * 5 + [STEADY] * 60, id="five steps"),
        pytest.param(([scaled(b=3)] * 6 + [STEADY] * 12) * 5, id="six steps, again and again"),
    ],
)
def test_short_or_irrelevant_changes_are_ignored(steps: list[dict[str, S]]) -> None:
    assert noticed(settled(), steps) == []


def test_noise_causes_no_drift_and_hides_none() -> None:
    dice = random.Random(0)

    def noisy(**factors: float) -> dict[str, S]:
        spike = 5.0 if dice.random() < 0.1 else 1.0
        return {
            name: S(stage.layers * dice.uniform(0.85, 1.15) * spike, stage.ends)
            for name, stage in scaled(**factors).items()
        }

    watcher = Watcher()
    assert noticed(watcher, [noisy() for _ in range(500)]) == []
    ((step, drift),) = noticed(watcher, [noisy(b=2) for _ in range(200)])
    assert step <= 20
    assert drift.stage == "b"


def test_a_change_lasts_twice_as_long_as_those_that_have_ended_by_themselves() -> None:
    watcher = settled()
    assert noticed(watcher, ([scaled(b=3)] * 7 + [STEADY] * 12) * 3) == []
    ((step, drift),) = noticed(watcher, [scaled(b=2)] * 60)
    assert step == 2 * 7 + WINDOW // 2
    assert drift.stage == "b"


def test_other_programs_that_come_and_go_are_told_seldom_and_hide_no_lasting_change() -> None:
    """Every so often one of them takes about half of the slowest stage's device for a while."""
    dice = random.Random(0)

    def times(factor: float, seconds: int) -> list[dict[str, S]]:
        noise = [dice.uniform(0.9, 1.1) for _ in range(seconds)]
        return [scaled(b=factor * each) for each in noise]

    watcher, told = settled(), 0
    for _ in range(60):
        told += len(noticed(watcher, times(dice.uniform(1.5, 2.5), dice.randint(4, 14))))
        told += len(noticed(watcher, times(1, dice.randint(15, 40))))
    assert told <= 4
    assert noticed(watcher, times(1, 60)) == []
    ((step, _),) = noticed(watcher, times(2, 200))
    assert step <= MOST_SUSTAINED + WINDOW


def test_a_plan_that_promised_too_much_is_noticed() -> None:
    promised = {"coordinator": 0.05, "a": 0.06, "b": 0.05}
    ((step, drift),) = noticed(Watcher(promised), [STEADY] * 60)
    assert step == WARM_UP + WINDOW + SUSTAINED - 1
    assert drift.stage == "b"
    assert "b is slower than was measured: a micro-batch takes it" in str(drift)


def test_a_run_that_begins_slowly_has_not_become_faster() -> None:
    slow, steady = [scaled(coordinator=3, b=2)] * 12, [STEADY] * 40
    assert noticed(Watcher(), slow + steady) == []
    # Measurements promised what comes first.
    promised = {name: stage.total for name, stage in slow[0].items()}
    ((_, drift),) = noticed(Watcher(promised), slow + steady)
    assert "is faster than was measured" in str(drift)
    # Later it is told.
    assert len(noticed(Watcher(), [scaled(b=2)] * 40 + steady)) == 1


def test_the_first_steps_do_not_count() -> None:
    watcher = Watcher()
    assert noticed(watcher, [scaled(b=50)] * WARM_UP + [STEADY] * 60) == []


def test_the_present_times_are_medians() -> None:
    watcher = settled()
    for factor in (1, 2, 2, 9, 2):
        watcher.note(scaled(a=factor))
    assert watcher.present()["a"] == S(pytest.approx(0.12))
    assert watcher.present()["coordinator"] == STEADY["coordinator"]


@pytest.mark.parametrize(
    ("now", "expected", "wrong"),
    [
        # The head of the report: measured while the machine was busy.
        ({"coordinator": 0.019, "a": 0.06}, {"coordinator": 0.417, "a": 0.06}, ["coordinator"]),
        ({"coordinator": 0.05, "a": 0.2}, {"coordinator": 0.05, "a": 0.06}, ["a"]),
        ({"coordinator": 0.05, "a": 0.08}, {"coordinator": 0.05, "a": 0.06}, []),
        # Longer sequences than the measured ones: all take longer alike, and no plan changes.
        ({"coordinator": 0.10, "a": 0.12}, {"coordinator": 0.05, "a": 0.06}, []),
        # A coordinator without layers takes little, so its error changes no plan.
        ({"coordinator": 0.004, "a": 0.06}, {"coordinator": 0.001, "a": 0.06}, []),
        ({"a": 0.03, "b": 0.2}, {"a": 0.06, "b": 0.06}, ["b"]),
        ({"a": 0.03, "b": 0.1}, {"a": 0.06, "b": 0.06}, ["a", "b"]),
    ],
)
def test_measurements_that_real_steps_contradict(
    now: dict[str, float], expected: dict[str, float], wrong: list[str]
) -> None:
    found = misjudged(now, expected)
    assert list(found.names if found else []) == wrong


def test_both_times_of_every_device_are_named() -> None:
    found = misjudged({"coordinator": 0.019, "a": 0.06}, {"coordinator": 0.417, "a": 0.061})
    assert str(found) == (
        "The plan is based on wrong measurements. Real steps take, for a micro-batch: coordinator "
        "19 ms (measured: 417 ms), a 60 ms (measured: 61 ms). The measurements of coordinator do "
        "not hold."
    )
