"""The watcher: notices what lasts, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from lightning_hetero.planning.watching import SUSTAINED, WARM_UP, WINDOW, Drift, Watcher
from lightning_hetero.planning.watching import StageSeconds as S

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
    assert f"{factor:.2g} times the expected" in str(drift)


def test_a_slowest_stage_that_becomes_faster_is_noticed() -> None:
    ((_, drift),) = noticed(settled(), [scaled(b=0.4)] * 60)
    assert (drift.stage, drift.slowest) == ("b", "a")
    assert "b has become faster" in str(drift)


def test_there_and_back_are_two_changes() -> None:
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
def test_what_does_not_last_or_matter_is_not_noticed(steps: list[dict[str, S]]) -> None:
    assert noticed(settled(), steps) == []


def test_noise_is_not_noticed_and_hides_nothing() -> None:
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


def test_a_plan_that_promised_too_much_is_noticed() -> None:
    promised = {"coordinator": 0.05, "a": 0.06, "b": 0.05}
    ((step, drift),) = noticed(Watcher(promised), [STEADY] * 60)
    assert step == WARM_UP + WINDOW + SUSTAINED - 1
    assert drift.stage == "b"


def test_the_first_steps_do_not_count() -> None:
    watcher = Watcher()
    assert noticed(watcher, [scaled(b=50)] * WARM_UP + [STEADY] * 60) == []


def test_the_present_times_are_medians() -> None:
    watcher = settled()
    for factor in (1, 2, 2, 9, 2):
        watcher.note(scaled(a=factor))
    assert watcher.present()["a"] == S(pytest.approx(0.12))
    assert watcher.present()["coordinator"] == STEADY["coordinator"]
