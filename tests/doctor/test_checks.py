"""The rules of the doctor, without a socket."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lightning_hetero.doctor.checks import (
    CHECKS,
    Check,
    Finding,
    Greeting,
    Report,
    WantedPlan,
    advice,
    against_plan,
    completed,
    heard,
)
from lightning_hetero.errors import PlanError
from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.profile import Link
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.address import Address

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
    first = against_plan(WantedPlan(MEASURED, PLAN), "a:1", links("a:1", 1e12))
    last = against_plan(WantedPlan(MEASURED, PLAN), "b:1", links("b:1", 1e12))
    names = ("there_bytes_per_step", "back_bytes_per_step")
    assert tuple(first.figures[name] for name in names) == crossing
    assert tuple(last.figures[name] for name in names) == crossing[::-1]
    assert first.outcome == last.outcome == "passed"


@pytest.mark.parametrize(
    ("workers", "shares", "of_a", "of_b"),
    [
        (["a:1", "b:1"], [3, 1], 3 / 4, 1 / 4),
        (["a:1", "b:1", COORDINATOR], [2, 1, 1], 1 / 2, 1 / 4),
        (["a:1", "b:1"], [1, 0], 1, 0),
    ],
)
def test_a_replica_carries_what_its_own_micro_batches_need(
    workers: list[str], shares: list[int], of_a: float, of_b: float
) -> None:
    wanted = WantedPlan(MEASURED, Plan([StagePlan(workers, (0, 8), shares=shares)], 4))
    for worker, part in (("a:1", of_a), ("b:1", of_b)):
        found = against_plan(wanted, worker, links(worker, 1e12))
        if not part:
            assert found.text == "the plan sends only small messages on this link"
            continue
        assert found.figures["there_bytes_per_step"] == part * 4000 * 16
        assert found.figures["back_bytes_per_step"] == part * 4000 * 16
        assert "after the last backward, replicas exchange gradients for" in found.text


def test_in_a_line_the_first_worker_gets_token_ids_and_the_last_one_sends_most() -> None:
    stages = [StagePlan(["a:1"], (0, 4), embedding=True), StagePlan(["b:1"], (4, 8))]
    wanted = WantedPlan(MEASURED, Plan(stages, micro_batches=4))
    names = ("there_bytes_per_step", "back_bytes_per_step")
    first, last = (
        tuple(against_plan(wanted, worker, links(worker, 1e12)).figures[name] for name in names)
        for worker in ("a:1", "b:1")
    )
    assert (first, last) == ((8 * 16, 0), (3000 * 16, 1000 * 16))


@pytest.mark.parametrize(
    ("names", "of_a", "of_b"),
    [
        # A worker between the coordinator's layers has all that crosses the coordinator's links.
        ([COORDINATOR, "a:1", COORDINATOR], (4000, 4000), None),
        (["a:1", "b:1", "a:1"], (4000, 4000), (0, 0)),
        # The first stage is of `a`, and the last one of `b`.
        (["a:1", "b:1", "a:1", "b:1"], (1000, 3000), (3000, 1000)),
        (["a:1", "a:1", "b:1", COORDINATOR], (1000, 3000), (3000, 1000)),
    ],
)
def test_a_link_has_what_crosses_it_under_plans_of_every_shape(
    names: list[str], of_a: tuple[int, int], of_b: tuple[int, int] | None
) -> None:
    cuts = [*range(len(names)), 8]
    stages = [StagePlan([name], span) for name, span in zip(names, pairwise(cuts), strict=True)]
    wanted = WantedPlan(MEASURED, Plan(stages, micro_batches=4))
    for worker, expected in (("a:1", of_a), ("b:1", of_b)):
        found = against_plan(wanted, worker, links(worker, 1e12))
        if expected is None:
            assert found.text == "the plan has no stage on b:1"
        elif expected == (0, 0):
            assert "small messages" in found.text
        else:
            crossing = found.figures["there_bytes_per_step"], found.figures["back_bytes_per_step"]
            assert crossing == tuple(16 * each for each in expected)


def test_a_link_that_is_the_bottleneck_fails() -> None:
    model = MEASURED.model
    most = max(model.activation_bytes_per_sample, model.gradient_bytes_per_sample) * 4
    found = against_plan(WantedPlan(MEASURED, PLAN), "a:1", links("a:1", most / 1000))
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
    found = against_plan(WantedPlan(wider, Plan(stages, 4)), "b:1", links("b:1", 1.0))
    assert found.outcome == "passed"
    assert "small messages" in found.text


def test_without_a_plan_the_best_one_is_meant() -> None:
    found = against_plan(WantedPlan(MEASURED), "a:1", links("a:1", 1e12))
    assert found.outcome in ("passed", "skipped")


@pytest.mark.parametrize(
    ("stages", "micro_batches", "text"),
    [
        ([StagePlan(["c:1"], (0, 8))], 4, r"stages\[0\] is on 'c:1'"),
        ([StagePlan(["a:1"], (0, 8))], 0, "micro_batches is 0"),
        ([StagePlan(["a:1"], (0, 9))], 4, "covers 9 layers and the model has 8"),
    ],
)
def test_a_plan_that_does_not_fit_the_profile_is_refused(
    stages: list[StagePlan], micro_batches: int, text: str
) -> None:
    wanted = WantedPlan(MEASURED, Plan(stages, micro_batches))
    with pytest.raises(PlanError, match=text):
        against_plan(wanted, "a:1", links("a:1", 1e12))


ADDRESS = Address("strix", 9999)


def report(address: str, machine: str, bytes_per_second: float) -> Report:
    figures = {"there_bytes_per_second": bytes_per_second}
    findings = [Finding(check, "passed", "", "", figures) for check in CHECKS]
    return Report(address, findings, machine)


def said(answer: m.Message, version: int = m.PROTOCOL_VERSION) -> list[Finding]:
    greeting = Greeting(True, answer, version, 1000.0, 1000.2)
    return list(heard(greeting, m.Equipment({"torch": "2.9"}), ADDRESS))


@pytest.mark.parametrize("failing", CHECKS)
def test_checks_after_a_failure_are_skipped_and_say_so(failing: Check) -> None:
    place = CHECKS.index(failing)
    found = [Finding(check, "passed", "") for check in CHECKS[:place]]
    all_found = list(
        completed([*found, Finding(failing, "failed", "x"), Finding("plan", "passed", "")])
    )
    assert [finding.check for finding in all_found] == list(CHECKS)
    assert [one.outcome for one in all_found[place:]] == ["failed"] + ["skipped"] * (11 - place)
    assert {one.text for one in all_found[place + 1 :]} <= {f"needs {failing}"}
    assert Report("a:1", all_found).failing == Finding(failing, "failed", "x")


def test_of_two_ways_to_one_worker_the_faster_one_is_named() -> None:
    slow, fast = report("10.8.0.2:9999", "abc", 1e6), report("192.168.1.2:9999", "abc", 9e6)
    [line] = advice(
        [slow, fast, report("other:9999", "xyz", 1.0), report("10.8.0.2:9998", "abc", 1)]
    )
    assert line == (
        "192.168.1.2:9999 and 10.8.0.2:9999 are the same worker, unless they are containers of one "
        "machine; then use 192.168.1.2:9999, 9.0 times "
        "as fast."
    )
    [line] = advice([slow, report("b:9999", "abc", 1.1e6)])
    assert "equally fast" in line
    assert advice([slow, report("b:9999", "", 1.0)]) == []


@pytest.mark.parametrize(
    ("seconds", "outcome", "text"),
    [
        (1000.1, "passed", "+0.000 s there"),
        (1090.1, "warned", "+90 s there"),
        (0.0, "skipped", "does not report"),
    ],
)
def test_the_clock_is_held_against_the_middle_of_the_round_trip(
    seconds: float, outcome: str, text: str
) -> None:
    clock = said(m.Welcome(m.PROTOCOL_VERSION, utc_seconds=seconds))[2]
    assert (clock.check, clock.outcome) == ("clock", outcome)
    assert text in clock.text


def test_versions_that_differ_are_listed_and_those_that_matter_fail() -> None:
    equipment = m.Equipment({"torch": "2.8"}, "cpu", "some CPU")
    *_, version, worker = said(m.Welcome(m.PROTOCOL_VERSION, equipment))
    different = "different versions, which is normal: torch 2.8 (2.9 here)"
    assert version.text == f"protocol {m.PROTOCOL_VERSION}; {different}"
    assert worker.text == "free, computes on cpu (some CPU)"
    old = said(m.Welcome(0, equipment))[-1]
    assert (old.check, old.outcome) == ("version", "failed")
    assert "install the same version" in old.remedy
    older = said(m.Failure("The worker speaks protocol 0; install the same on both."), version=0)[
        -1
    ]
    assert (older.check, older.outcome) == ("version", "failed")
    busy = said(m.Failure("this worker is busy; use another worker."))[-1]
    assert (busy.check, busy.text, busy.remedy) == (
        "worker",
        "this worker is busy",
        "use another worker",
    )
