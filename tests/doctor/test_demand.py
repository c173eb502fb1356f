"""What a plan needs of a link."""

from __future__ import annotations

from lightning_hetero.doctor.demand import Wanted, against_plan
from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.profile import Link

from ..planner.profiles import device, profile

BYTES = {"activation_bytes_per_sample": 1000, "gradient_bytes_per_sample": 3000}
MEASURED = profile(
    8, [device("a:1", 1, 2), device("b:1", 1, 2)], model_options=BYTES, batch_size=16
)
PLAN = Plan([StagePlan(["a:1"], (0, 4)), StagePlan(["b:1"], (4, 8))], micro_batches=4)


def links(worker: str, bytes_per_second: float) -> list[Link]:
    return [
        Link(COORDINATOR, worker, 0.0, bytes_per_second),
        Link(worker, COORDINATOR, 0.0, bytes_per_second),
    ]


def test_each_worker_carries_its_own_boundaries() -> None:
    model = MEASURED.model
    crossing = model.activation_bytes_per_sample * 16, model.gradient_bytes_per_sample * 16
    first = against_plan(Wanted(MEASURED, PLAN), "a:1", links("a:1", 1e12))
    last = against_plan(Wanted(MEASURED, PLAN), "b:1", links("b:1", 1e12))
    names = ("there_bytes_per_step", "back_bytes_per_step")
    assert tuple(first.figures[name] for name in names) == crossing
    assert tuple(last.figures[name] for name in names) == crossing[::-1]
    assert first.outcome == last.outcome == "passed"


def test_in_a_line_the_first_worker_gets_token_ids_and_the_last_one_sends_most() -> None:
    stages = [StagePlan(["a:1"], (0, 4), embedding=True), StagePlan(["b:1"], (4, 8))]
    wanted = Wanted(MEASURED, Plan(stages, micro_batches=4))
    names = ("there_bytes_per_step", "back_bytes_per_step")
    first, last = (
        tuple(against_plan(wanted, worker, links(worker, 1e12)).figures[name] for name in names)
        for worker in ("a:1", "b:1")
    )
    assert (first, last) == ((8 * 16, 0), (3000 * 16, 1000 * 16))


def test_a_link_that_is_the_bottleneck_fails() -> None:
    model = MEASURED.model
    most = max(model.activation_bytes_per_sample, model.gradient_bytes_per_sample) * 4
    found = against_plan(Wanted(MEASURED, PLAN), "a:1", links("a:1", most / 1000))
    assert found.outcome == "failed"
    assert "activation_dtype" in found.remedy
    assert float(found.figures["busy_share"]) > 1


def test_a_stage_in_the_middle_needs_nothing_of_the_coordinators_link() -> None:
    wider = profile(
        8, [device(f"{name}:1", 1, 2) for name in "abc"], model_options=BYTES, batch_size=16
    )
    stages = [
        StagePlan([f"{name}:1"], span)
        for name, span in zip("abc", [(0, 2), (2, 4), (4, 8)], strict=True)
    ]
    found = against_plan(Wanted(wider, Plan(stages, 4)), "b:1", links("b:1", 1.0))
    assert found.outcome == "passed"
    assert "small messages" in found.text


def test_without_a_plan_the_best_one_is_meant() -> None:
    found = against_plan(Wanted(MEASURED), "a:1", links("a:1", 1e12))
    assert found.outcome in ("passed", "skipped")
