"""A given plan, money and energy."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lightning_hetero.errors import PlanError
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner.feasibility import candidate_of
from lightning_hetero.planner.profile import Profile
from lightning_hetero.planner.solver import Wishes, predict_given
from lightning_hetero.planner.verdict import bottleneck, judge, running_costs, sentences

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
