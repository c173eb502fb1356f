"""What the opening of a conversation says of TLS, the token, the clocks and the versions: rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import TrustError
from ..protocol import messages as m
from ..transport.address import Address
from ..transport.handshake import Party, differences, obstacles
from .findings import Check, Finding

# So far clocks may be apart without anybody noticing it in logs and file dates.
_TOLERABLE_SECONDS = 5.0

_COPY_ITS_FILE = (
    "make one with `lightning-hetero token`, copy its file to both machines, and name it with "
    "--token-file where it is not in its usual place"
)


@dataclass(frozen=True)
class Greeting:
    """How a worker answered our Hello.

    Args:
        is_secured: Whether it was under TLS.
        answer: What it said.
        version: The protocol version of the frame that it said it in.
        sent_at_seconds: Our clock when we said Hello.
        heard_at_seconds: Our clock when the answer had come.
    """

    is_secured: bool
    answer: m.Message
    version: int
    sent_at_seconds: float
    heard_at_seconds: float


def no_token(address: Address) -> Iterator[Finding]:
    """Nothing is said to another machine without a token."""
    yield Finding("TLS", "skipped", "there is none without a token")
    text = f"this end has no token, and {address} is on another machine"
    yield Finding("token", "failed", text, _COPY_ITS_FILE)


def unusable_token(reason: str) -> Iterator[Finding]:
    """The token file of this end cannot be used."""
    yield Finding("TLS", "skipped", "there is none without a token")
    yield Finding("token", "failed", reason)


def distrusted(error: TrustError) -> Iterator[Finding]:
    """The two ends do not trust each other."""
    passed: dict[str, list[Finding]] = {
        "TLS": [],
        "token": [Finding("TLS", "passed", "the peer speaks it")],
        "clock": [
            Finding("TLS", "passed", "the peer speaks it"),
            Finding("token", "passed", "the peer has a certificate of some token"),
        ],
    }
    yield from passed[error.about]
    yield Finding(error.about, "failed", *_cut(str(error)))


def broken_off(error: Exception, is_secured: bool) -> Iterator[Finding]:
    """The peer ended the connection, said nothing, or said something that is no answer."""
    if not is_secured:
        yield from _trust(is_secured)
    check: Check = "TLS" if is_secured else "worker"
    text = f"what listens there did not answer as a worker: {error}".rstrip(".")
    yield Finding(check, "failed", text, "is it a worker, and what does it log?")


def silent(error: Exception) -> Iterator[Finding]:
    """TLS was agreed on, and then nothing came."""
    yield Finding("TLS", "passed", "TLS 1.3")
    text = f"the worker ended the conversation: {error}".rstrip(".")
    yield Finding("token", "failed", text, "see what the worker logs")


def heard(greeting: Greeting, here: m.Equipment, address: Address) -> Iterator[Finding]:
    """The peer answered."""
    yield from _trust(greeting.is_secured)
    answer = greeting.answer
    yield _clock(greeting)
    versions = _versions(greeting, here, address)
    yield versions
    if versions.outcome == "failed":
        return
    if isinstance(answer, m.Welcome):
        equipment = answer.equipment
        yield Finding(
            "worker",
            "passed",
            f"free, computes on {equipment.device} ({equipment.device_name})",
            figures={"device": equipment.device, "device_name": equipment.device_name},
        )
    else:
        reason = answer.reason if isinstance(answer, m.Failure) else str(answer)
        yield Finding("worker", "failed", *_cut(reason))


def _trust(is_secured: bool) -> Iterator[Finding]:
    if is_secured:
        yield Finding("TLS", "passed", "TLS 1.3")
        yield Finding("token", "passed", "both ends have the same")
    else:
        yield Finding("TLS", "skipped", "not used: neither end has a token")
        yield Finding("token", "passed", "none, which is enough on one machine")


def _clock(greeting: Greeting) -> Finding:
    said = greeting.answer.utc_seconds if isinstance(greeting.answer, m.Welcome) else 0.0
    if not said:
        return Finding("clock", "skipped", "the worker does not say its time")
    offset_seconds = said - (greeting.sent_at_seconds + greeting.heard_at_seconds) / 2
    figures = {"offset_seconds": offset_seconds}
    if abs(offset_seconds) <= _TOLERABLE_SECONDS:
        return Finding("clock", "passed", f"{offset_seconds:+.3f} s there", "", figures)
    remedy = "set the clocks (NTP); beyond two days the certificates are refused"
    return Finding("clock", "warned", f"{offset_seconds:+.0f} s there", remedy, figures)


def _versions(greeting: Greeting, here: m.Equipment, address: Address) -> Finding:
    answer = greeting.answer
    protocol = answer.protocol if isinstance(answer, m.Welcome) else greeting.version
    equipment = answer.equipment if isinstance(answer, m.Welcome) else m.Equipment()
    if isinstance(answer, m.Failure) and protocol != m.PROTOCOL_VERSION:
        return Finding("version", "failed", *_cut(answer.reason))
    ours = Party("this end", m.PROTOCOL_VERSION, here)
    theirs = Party(f"the worker at {address}", protocol, equipment)
    if found := obstacles(ours, theirs):
        return Finding("version", "failed", *_cut(" ".join(found)))
    others = differences(here, equipment)
    figures: dict[str, float | str] = {"protocol": protocol, **equipment.versions}
    text = f"protocol {protocol}"
    if others:
        text += f"; others, which is normal: {', '.join(others)}"
    return Finding("version", "passed", text, "", figures)


def _cut(sentences: str) -> tuple[str, str]:
    """What is wrong, and the remedy behind the last semicolon."""
    text, found, remedy = sentences.rstrip(".").rpartition("; ")
    return (text, remedy) if found else (remedy, "")
