"""The rules of the doctor, without a socket."""

from __future__ import annotations

import pytest

from lightning_hetero.doctor.findings import CHECKS, Check, Finding, Report, advice, completed
from lightning_hetero.doctor.greeting import Greeting, heard
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.address import Address

ADDRESS = Address("strix", 9999)


def report(address: str, machine: str, bytes_per_second: float) -> Report:
    figures = {"there_bytes_per_second": bytes_per_second}
    findings = [Finding(check, "passed", "", "", figures) for check in CHECKS]
    return Report(address, findings, machine)


def said(answer: m.Message, version: int = m.PROTOCOL_VERSION) -> list[Finding]:
    greeting = Greeting(True, answer, version, 1000.0, 1000.2)
    return list(heard(greeting, m.Equipment({"torch": "2.9"}), ADDRESS))


@pytest.mark.parametrize("failing", CHECKS)
def test_what_is_behind_a_failure_is_skipped_and_says_so(failing: Check) -> None:
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
        "192.168.1.2:9999 and 10.8.0.2:9999 are the same worker; use 192.168.1.2:9999, 9.0 times "
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
        (0.0, "skipped", "does not say"),
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
    same = f"protocol {m.PROTOCOL_VERSION}; others, which is normal: torch 2.8 (2.9 here)"
    assert version.text == same
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
