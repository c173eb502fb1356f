"""A given plan, two plans side by side, money and energy."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from rich.console import Console

from lightning_hetero.errors import PlanError
from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.feasibility import candidate_of
from lightning_hetero.planner.plan_comparison import (
    Side,
    bottleneck,
    compare,
    difference,
    predict_given,
)
from lightning_hetero.planner.profile import Profile
from lightning_hetero.planner.solver import Wishes
from lightning_hetero.planner.verdict import judge, running_costs, sentences

from .profiles import coordinator, device, profile

PLAN = Plan([StagePlan(["fast:1"], (0, 6)), StagePlan(["slow:1"], (6, 8))], micro_batches=4)


def measured(slow: float = 3.0, **fast: float) -> Profile:
    """Eight layers on a fast worker of a second for a forward, and on a slow one."""
    own = coordinator(price_per_hour=0.0, watts=40.0)
    workers = [device("fast:1", 1.0, 2.0, **fast), device("slow:1", slow, 2 * slow)]
    return profile(8, workers, own, batch_size=4, model_options={"tokens_per_sample": 100})


def test_a_given_plan_is_predicted_as_it_is() -> None:
    found = predict_given(PLAN, measured(), Wishes())
    assert found.plan.stages == PLAN.stages
    assert found.chosen.step_seconds == candidate_of(PLAN, measured()).step_seconds
    # Four micro-batches of 18 s each pass the slowest stage.
    assert found.chosen.step_seconds >= 72
    assert (
        bottleneck(found.chosen) == "bottleneck: fast:1, which each micro-batch occupies for 18 s"
    )
    assert any("tokens/s" in line for line in sentences(judge(found)))


def test_the_wishes_hold_for_a_given_plan() -> None:
    twice = predict_given(PLAN, measured(), Wishes(batch_size=8)).chosen
    assert twice.size == 2


def test_a_stage_that_was_not_measured_cannot_be_predicted() -> None:
    found = measured()
    devices = [replace(d, timings=[]) if d.name == "slow:1" else d for d in found.devices]
    with pytest.raises(PlanError, match=r"cannot be predicted: `slow:1` was not measured"):
        predict_given(PLAN, replace(found, devices=devices), Wishes())


def test_money_and_energy_are_for_a_million_tokens() -> None:
    found = measured(price_per_hour=1.5, watts=360.0)
    candidate = candidate_of(PLAN, found)
    hours = 1e6 / 400 * candidate.step_seconds / 3600
    money, energy = running_costs(candidate)
    assert money == (
        f"a million tokens cost {1.5 * hours:.3g}, at 1.5 an hour, without slow:1, which the "
        "profile does not tell"
    )
    assert energy.startswith(f"a million tokens take {0.4 * hours:.3g} kWh at most, at 400 W")


def test_without_prices_and_watts_nothing_is_said() -> None:
    own = coordinator()
    found = profile(8, [device("fast:1", 1, 2), device("slow:1", 3, 6)], own, batch_size=4)
    assert running_costs(candidate_of(PLAN, found)) == []


def test_two_plans_side_by_side() -> None:
    before = Side("a.yaml", candidate_of(PLAN, measured()))
    after = Side("b.yaml", candidate_of(PLAN, measured(slow=1.5)))
    console = Console(width=140)
    with console.capture() as shown:
        console.print(compare(before, after))
    rows = [line.split() for line in shown.get().splitlines() if line.strip()]
    assert ["slow:1", "6:8", "(2)", "6:8", "(2)", "9", "s", "4.5", "s", "2.00", "x"] in rows
    assert any(row[0] == COORDINATOR for row in rows)
    times = after.tokens_per_second / before.tokens_per_second
    assert times > 1
    assert f"b.yaml is {times:.2f} x as fast as a.yaml" in difference(before, after)


def test_plans_for_different_models_are_not_compared() -> None:
    other = replace(measured(), model=replace(measured().model, fingerprint="other"))
    sides = [Side("a", candidate_of(PLAN, measured())), Side("b", candidate_of(PLAN, other))]
    with pytest.raises(PlanError, match="profiles of different models"):
        compare(*sides)
