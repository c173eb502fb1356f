"""Frozen weights read layer by layer: their time, their memory, and when the planner wants them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.plan import Plan, StagePlan, Weights
from lightning_hetero.planner.costs import Holder
from lightning_hetero.planner.feasibility import candidate_of, check_plan, shortages
from lightning_hetero.planner.profile import (
    EMBEDDING,
    HEAD,
    DeviceProfile,
    Part,
    Profile,
    WeightReading,
)
from lightning_hetero.planner.solver import solve
from lightning_hetero.planner.verdict import judge, sentences

from .profiles import GIB, coordinator, device, model, profile

LAYERS = 10
TRAINED, FROZEN = GIB // 64, GIB
PARTS = [
    Part(EMBEDDING, 0),
    Part(HEAD, 0),
    Part("layer", TRAINED + FROZEN, gradient_bytes=TRAINED, optimizer_bytes=2 * TRAINED),
]


def worker(name: str, gib: float, read_seconds: float | None, **others: Any) -> DeviceProfile:
    """A worker that reads a layer in so many seconds, if it reads at all; its layer takes 3."""
    weights = {}
    if read_seconds is not None:
        weights = {"disk": WeightReading(FROZEN / read_seconds, 100 * GIB)}
    return device(name, 1, 2, memory_bytes=int(gib * GIB), **({"weights": weights} | others))


def holder(gib: float, read_seconds: float | None = 1.5, **others: Any) -> Holder:
    return Holder(worker("w", gib, read_seconds, **others), model(LAYERS, parts=PARTS), size=1)


def fleet(*workers: DeviceProfile) -> Profile:
    return profile(LAYERS, workers, coordinator(), (), {"parts": PARTS}, batch_size=4)


@pytest.mark.parametrize(("read_seconds", "expected"), [(0.5, 1 + 3), (1.5, 1.5 + 3), (4, 4 + 4)])
def test_a_pass_takes_as_long_as_reading_if_this_is_longer(
    read_seconds: float, expected: float
) -> None:
    found = holder(100, read_seconds)
    option = found.option("float32", "layers", "disk")
    assert float(option.seconds(0, LAYERS)) == pytest.approx(LAYERS * expected)


def test_two_layers_and_all_that_trains_are_in_memory() -> None:
    found = holder(100)
    option = found.option("float32", "layers", "disk")
    held = [float(found.need(option, 0, end, 1).weights) for end in (1, 2, 3, LAYERS)]
    assert held == [n * TRAINED + min(n, 2) * FROZEN for n in (1, 2, 3, LAYERS)]
    whole = found.option("float32", "layers")
    assert float(found.need(whole, 0, LAYERS, 1).weights) == LAYERS * (TRAINED + FROZEN)


@pytest.mark.parametrize(("gib", "expected"), [(100, None), (4, "disk"), (1.5, None)])
def test_weights_are_read_only_where_they_do_not_fit(gib: float, expected: str | None) -> None:
    found = holder(gib)
    assert found.option_for(0, LAYERS, in_flight=1).weights == expected
    fits = found.matrix(in_flight=1)[0, LAYERS] < float("inf")
    assert fits == (gib > 2)


def test_a_place_without_room_is_not_used() -> None:
    little = {"disk": WeightReading(GIB, 5 * GIB)}
    found = holder(4, weights=little)
    assert found.matrix(1)[0, 5] < float("inf") == found.matrix(1)[0, 6]


def test_a_device_whose_reading_was_not_measured_has_all_weights_in_memory() -> None:
    found = holder(4, None)
    assert {option.weights for option in found.options} == {None}
    assert float("inf") == found.matrix(1)[0, LAYERS]


def test_a_model_that_trains_as_a_whole_has_no_such_way() -> None:
    parts = [*PARTS[:2], Part("layer", FROZEN, gradient_bytes=FROZEN)]
    found = Holder(worker("w", 100, 1.0), model(LAYERS, parts=parts), size=1)
    assert {option.weights for option in found.options} == {None}


def stages(plan: Plan) -> list[tuple[Sequence[str], Weights | None]]:
    return [(stage.workers, stage.weights) for stage in plan.stages]


def test_the_search_reads_weights_where_a_model_does_not_fit_otherwise() -> None:
    found = solve(fleet(worker("w", 4, 1.5)))
    assert stages(found.plan) == [(["w"], "disk")]
    assert found.plan.stages[0].recompute == "layers"
    found.plan.check(LAYERS, ["w"])
    assert check_plan(found.plan, fleet(worker("w", 4, 1.5))) == []
    roomy = solve(fleet(worker("w", 40, 1.5)))
    assert stages(roomy.plan) == [(["w"], None)]


def test_one_device_that_reads_may_be_faster_than_two_that_do_not() -> None:
    fast = worker("fast", 9, 0.5)
    slow = device("slow", 40, 80, memory_bytes=9 * GIB)
    found = solve(fleet(fast, slow))
    assert stages(found.plan) == [(["fast"], "disk")]


def test_the_verdict_has_the_cost_of_reading() -> None:
    one = fleet(worker("w", 4, 6))
    found = sentences(judge(solve(one)))
    (said,) = [line for line in found if "reads" in line]
    assert said == (
        "w reads 10 layers from its disk, 10.0 GiB for each forward and each backward: a "
        "micro-batch takes 3 min there, and with all weights in memory it would take 2.67 min"
    )


def given(**options: Any) -> Plan:
    return Plan([StagePlan(["w"], (0, LAYERS), **options)], micro_batches=4, in_flight=1)


def test_a_given_plan_that_is_short_is_offered_the_disk() -> None:
    short = fleet(worker("w", 4, 1.5))
    (shortage,) = shortages(candidate_of(given(), short))
    assert "write `weights: disk` for it into the plan" in shortage.text
    mended = given(recompute="layers", weights="disk")
    assert shortages(candidate_of(mended, short)) == []
    assert candidate_of(mended, short).plan().stages[0] == mended.stages[0]


def test_a_given_plan_whose_reading_was_not_measured_says_so() -> None:
    plan = given(recompute="layers", weights="disk")
    (shortage,) = shortages(candidate_of(plan, fleet(worker("w", 4, None))))
    assert "reading weights from the disk was not" in shortage.text


def test_the_speed_of_reading_is_written_and_read(tmp_path: Path) -> None:
    found = fleet(worker("w", 4, 1.5))
    (tmp_path / "profile.yaml").write_text(found.as_yaml())
    assert Profile.from_yaml(tmp_path / "profile.yaml") == found
