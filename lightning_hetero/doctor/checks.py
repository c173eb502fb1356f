"""The checks of the doctor, their order and their rules, without I/O.

The greeting of a worker shows the state of TLS, the token, the clocks and the versions. The last
check compares the measured link with the needs of a plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from msgspec.structs import replace

from ..errors import TrustError
from ..plan import COORDINATOR, Plan
from ..planner.candidates import Candidate
from ..planner.feasibility import candidate_of
from ..planner.profile import Link, Profile
from ..planner.solver import solve
from ..protocol import messages as m
from ..transport.address import Address
from ..transport.compatibility import Party, differences, obstacles
from ..units import in_bytes, in_percent, in_seconds

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
"""The checks in order; each hop needs the hops before it."""

Outcome = Literal["passed", "warned", "failed", "skipped"]

# Of two ways to one worker, the advice names the faster one if it is at least this many times as
# fast.
_MUCH_FASTER = 1.2
# Differences below this harm neither logs nor file dates.
_TOLERABLE_SECONDS = 5.0

COPY_ITS_FILE = (
    "make one with `lightning-hetero token`, copy its file to both machines, and name it with "
    "--token-file where it is not in its usual place"
)


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        check: The check.
        outcome: Whether the hop works; ``warned`` if it works but needs attention.
        text: The result in a few words.
        remedy: The action for the user; empty if all is well.
        figures: The result as numbers and names for programs; units are in the keys.
    """

    check: Check
    outcome: Outcome
    text: str
    remedy: str = ""
    figures: Mapping[str, float | str] = field(default_factory=dict)


def passed(check: Check, text: str, /, **figures: float | str) -> Finding:
    """The finding of a working hop."""
    return Finding(check, "passed", text, "", figures)


def failed(check: Check, text: str, remedy: str = "") -> Finding:
    """The finding of a hop that does not work."""
    return Finding(check, "failed", text, remedy)


@dataclass(frozen=True)
class Report:
    """The findings on the way to one worker.

    Args:
        address: The address as given by the user.
        findings: One finding per check, in the order of the checks.
        machine: The identity of the worker's machine; empty if the worker was not reached.
    """

    address: str
    findings: Sequence[Finding]
    machine: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether all checks ended without a failure."""
        return self.failing is None

    @property
    def failing(self) -> Finding | None:
        """The finding of the failed hop, if any."""
        return next((one for one in self.findings if one.outcome == "failed"), None)

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth of the slower direction; 0 if it was not measured."""
        figures = next(one.figures for one in self.findings if one.check == "bandwidth")
        return min((float(value) for value in figures.values()), default=0.0)


def completed(findings: Iterable[Finding]) -> Iterator[Finding]:
    """One finding per check: the given ones up to the first failure, and ``skipped`` for the
    others."""
    found: dict[Check, Finding] = {}
    failed: Check | None = None
    for finding in findings:
        found[finding.check] = finding
        if finding.outcome == "failed":
            failed = finding.check
            break
    for place, check in enumerate(CHECKS):
        is_before = failed is None or place < CHECKS.index(failed)
        why = "not reached" if is_before else f"needs {failed}"
        yield found.get(check) or Finding(check, "skipped", why)


def advice(reports: Sequence[Report]) -> list[str]:
    """For each port of a machine with several addresses: a sentence on the address to use.

    From outside, one worker looks like two workers in containers of this machine.
    """
    ways: defaultdict[tuple[str, str], list[Report]] = defaultdict(list)
    for report in reports:
        if report.machine and report.is_usable:
            port = report.address.rpartition(":")[2]
            ways[report.machine, port].append(report)
    return [_choice(alike) for alike in ways.values() if len(alike) > 1]


_SAME = "the same worker, unless they are containers of one machine"


def _choice(alike: Sequence[Report]) -> str:
    best, *others = sorted(alike, key=lambda report: -report.bytes_per_second)
    names = " and ".join(report.address for report in [best, *others])
    times = best.bytes_per_second / max(others[0].bytes_per_second, 1e-9)
    if times < _MUCH_FASTER:
        return f"{names} are {_SAME}, reached equally fast; then name one of them."
    return f"{names} are {_SAME}; then use {best.address}, {times:.1f} times as fast."


@dataclass(frozen=True)
class Greeting:
    """A worker's answer to our Hello.

    Args:
        is_secured: Whether the connection uses TLS.
        answer: The worker's message.
        version: The protocol version of the message's frame.
        sent_at_seconds: Our clock when we sent Hello.
        heard_at_seconds: Our clock when the answer arrived.
    """

    is_secured: bool
    answer: m.Message
    version: int
    sent_at_seconds: float
    heard_at_seconds: float


def no_token(reason: str, remedy: str = "") -> Iterator[Finding]:
    """This end does not have a usable token, so it must not send to another machine."""
    yield Finding("TLS", "skipped", "it needs a usable token at this end")
    yield failed("token", reason, remedy)


def distrusted(error: TrustError) -> Iterator[Finding]:
    """The two ends do not trust each other."""
    if error.about != "TLS":
        yield passed("TLS", "the peer speaks TLS")
    if error.about == "clock":
        yield passed("token", "the peer has a certificate of some token")
    yield failed(error.about, *_cut(str(error)))


def broken_off(error: Exception, is_secured: bool) -> Iterator[Finding]:
    """The peer ended the connection, was silent, or sent something other than an answer."""
    if not is_secured:
        yield from _trust(is_secured)
    check: Check = "TLS" if is_secured else "worker"
    text = f"the listener there did not answer as a worker: {error}".rstrip(".")
    yield failed(check, text, "check that it is a worker, and read its log")


def silent(error: Exception) -> Iterator[Finding]:
    """The peer agreed on TLS, but then it was silent."""
    yield passed("TLS", "TLS 1.3")
    text = f"the worker ended the conversation: {error}".rstrip(".")
    yield failed("token", text, "read the worker's log")


def heard(greeting: Greeting, here: m.Equipment, address: Address) -> Iterator[Finding]:
    """The peer answered our Hello."""
    yield from _trust(greeting.is_secured)
    answer = greeting.answer
    yield _clock(greeting)
    versions = _versions(greeting, here, address)
    yield versions
    if versions.outcome == "failed":
        return
    if isinstance(answer, m.Welcome):
        equipment = answer.equipment
        device, name = equipment.device, equipment.device_name
        text = f"free, computes on {device} ({name})"
        yield passed("worker", text, device=device, device_name=name)
    else:
        reason = answer.reason if isinstance(answer, m.Failure) else str(answer)
        yield failed("worker", *_cut(reason))


def _trust(is_secured: bool) -> Iterator[Finding]:
    if is_secured:
        yield passed("TLS", "TLS 1.3")
        yield passed("token", "both ends have the same token")
    else:
        yield Finding("TLS", "skipped", "not used: neither end has a token")
        yield passed("token", "not needed on one machine")


def _clock(greeting: Greeting) -> Finding:
    said = greeting.answer.utc_seconds if isinstance(greeting.answer, m.Welcome) else 0.0
    if not said:
        return Finding("clock", "skipped", "the worker does not report its time")
    offset_seconds = said - (greeting.sent_at_seconds + greeting.heard_at_seconds) / 2
    if abs(offset_seconds) <= _TOLERABLE_SECONDS:
        return passed("clock", f"{offset_seconds:+.3f} s there", offset_seconds=offset_seconds)
    remedy = "set the clocks (NTP); beyond two days the certificates are refused"
    figures = {"offset_seconds": offset_seconds}
    return Finding("clock", "warned", f"{offset_seconds:+.0f} s there", remedy, figures)


def _versions(greeting: Greeting, here: m.Equipment, address: Address) -> Finding:
    answer = greeting.answer
    protocol = answer.protocol if isinstance(answer, m.Welcome) else greeting.version
    equipment = answer.equipment if isinstance(answer, m.Welcome) else m.Equipment()
    if isinstance(answer, m.Failure) and protocol != m.PROTOCOL_VERSION:
        return failed("version", *_cut(answer.reason))
    ours = Party("this end", m.PROTOCOL_VERSION, here)
    theirs = Party(f"the worker at {address}", protocol, equipment)
    if found := obstacles(ours, theirs):
        return failed("version", *_cut(" ".join(found)))
    others = differences(here, equipment)
    text = f"protocol {protocol}"
    if others:
        text += f"; different versions, which is normal: {', '.join(others)}"
    figures: dict[str, float | str] = {"protocol": protocol, **equipment.versions}
    return passed("version", text, **figures)


def _cut(sentences: str) -> tuple[str, str]:
    """The fault, and the remedy after the last semicolon."""
    text, found, remedy = sentences.rstrip(".").rpartition("; ")
    return (text, remedy) if found else (remedy, "")


@dataclass(frozen=True)
class WantedPlan:
    """A measured model, and the plan to check, by default the best plan for the profile."""

    profile: Profile
    plan: Plan | None = None

    def candidate(self, measured: Sequence[Link]) -> Candidate:
        """The plan with the measured links in place of the profile's links.

        Raises:
            PlanError: If the plan does not fit the profile.
        """
        ends = [(link.source, link.target) for link in measured]
        kept = [link for link in self.profile.links if (link.source, link.target) not in ends]
        profile = replace(self.profile, links=[*kept, *measured])
        plan = self.plan or solve(profile).plan
        return candidate_of(plan, profile)


def against_plan(wanted: WantedPlan, worker: str, measured: Sequence[Link]) -> Finding:
    """Whether a worker's link to the coordinator is fast enough for the plan.

    The link is too slow if a micro-batch occupies it longer than the slowest stage, because the
    stage then waits.

    Raises:
        PlanError: If the plan does not fit the profile.
    """
    candidate = wanted.candidate(measured)
    if worker not in candidate.workers:
        return Finding("plan", "skipped", f"the plan has no stage on {worker}")
    crossing = _bytes_per_step(candidate, worker)
    if not any(crossing):
        return passed("plan", "the plan sends only small messages on this link")
    there, back = map(in_bytes, crossing)
    media = {f"{link.source} to {link.target}" for link in measured}
    media |= {link.shared for link in measured if link.shared}
    busy_seconds = max(
        seconds for name, seconds in candidate.busy_seconds_of_media.items() if name in media
    )
    share = busy_seconds / candidate.bottleneck_seconds
    figures: dict[str, float | str] = {
        "there_bytes_per_step": crossing[0],
        "back_bytes_per_step": crossing[1],
        "busy_share": share,
        "step_seconds": candidate.step_seconds,
    }
    text = (
        f"a step sends {there} there and {back} back; a micro-batch occupies the link for "
        f"{in_percent(share)} of the slowest stage's time"
    )
    if any(seat.part is not None for seat in candidate.seats_of(worker)):
        figures["exchange_seconds"] = candidate.exchange_seconds
        exchange = in_seconds(candidate.exchange_seconds)
        text += f"; after the last backward, replicas exchange gradients for {exchange}"
    if share <= 1:
        return passed("plan", text, **figures)
    remedy = (
        "use a faster link, or give the stage `activation_dtype` and `gradient_dtype` in the "
        "plan, to send fewer bytes"
    )
    return Finding("plan", "failed", text, remedy, figures)


def _bytes_per_step(candidate: Candidate, worker: str) -> tuple[int, int]:
    """The bytes of a step from the coordinator to the worker, and back."""
    there = candidate.bytes_sent(COORDINATOR, worker)
    return round(there), round(candidate.bytes_sent(worker, COORDINATOR))
