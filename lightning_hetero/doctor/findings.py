"""The checks in their order, and what each found: values, without I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

Check = Literal[
    "name",
    "route",
    "port",
    "TLS",
    "token",
    "clock",
    "version",
    "worker",
    "MTU",
    "latency",
    "bandwidth",
    "plan",
]
CHECKS: tuple[Check, ...] = get_args(Check)
"""Each hop needs those before it."""

Outcome = Literal["passed", "warned", "failed", "skipped"]

# A second way to a machine is worth a word if it is so many times as fast.
_MUCH_FASTER = 1.2


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Args:
        check: Which one.
        outcome: Whether the hop works; ``warned`` where it does and somebody should look at it.
        text: What was found, in a few words.
        remedy: What to do, where something is to be done.
        figures: The same for programs; units are in the names.
    """

    check: Check
    outcome: Outcome
    text: str
    remedy: str = ""
    figures: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What was found on the way to one worker.

    Args:
        address: Where it should be.
        findings: One of each check, in their order.
        machine: Tells the worker's machine from others; empty if it was not reached.
    """

    address: str
    findings: Sequence[Finding]
    machine: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether nothing failed."""
        return self.failing is None

    @property
    def failing(self) -> Finding | None:
        """The hop that failed."""
        return next((one for one in self.findings if one.outcome == "failed"), None)

    @property
    def bytes_per_second(self) -> float:
        """The slower direction's; 0 if it was not measured."""
        figures = next(one.figures for one in self.findings if one.check == "bandwidth")
        return min((float(value) for value in figures.values()), default=0.0)


def completed(findings: Iterable[Finding]) -> Iterator[Finding]:
    """One finding of each check, up to the first that failed as given; what they leave out is
    skipped, as are the checks behind a failure."""
    failed: Check | None = None
    reached = 0
    for finding in findings:
        place = CHECKS.index(finding.check)
        for check in CHECKS[reached:place]:
            yield Finding(check, "skipped", "it did not come to that")
        yield finding
        reached = place + 1
        if finding.outcome == "failed":
            failed = finding.check
            break
    for check in CHECKS[reached:]:
        why = "it did not come to that" if failed is None else f"needs {failed}"
        yield Finding(check, "skipped", why)


def advice(reports: Sequence[Report]) -> list[str]:
    """Where several addresses lead to one worker: which of them to use."""
    ways: defaultdict[tuple[str, str], list[Report]] = defaultdict(list)
    for report in reports:
        if report.machine and report.is_usable:
            port = report.address.rpartition(":")[2]
            ways[report.machine, port].append(report)
    return [_choice(alike) for alike in ways.values() if len(alike) > 1]


def _choice(alike: Sequence[Report]) -> str:
    best, *others = sorted(alike, key=lambda report: -report.bytes_per_second)
    names = " and ".join(report.address for report in [best, *others])
    times = best.bytes_per_second / max(others[0].bytes_per_second, 1e-9)
    if times < _MUCH_FASTER:
        return f"{names} are the same worker, reached equally fast; name one of them."
    return f"{names} are the same worker; use {best.address}, {times:.1f} times as fast."
