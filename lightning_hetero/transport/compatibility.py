"""The identity of each end of a conversation, and whether the two ends can work together.

Rules without I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..protocol.fields import Equipment

if TYPE_CHECKING:
    from .tls import Credentials

_OURS = "lightning-hetero"
# This library's code builds the layers; a layer means the same within a major version.
_MODEL_CODE = "transformers"
_UNKNOWN = "unknown"
_MOST_SHOWN = 40


@dataclass(frozen=True)
class Identity:
    """The part of this process that its peers see.

    Args:
        equipment: Its hardware and software.
        credentials: Prove possession of the token; absent without a token.
    """

    equipment: Equipment = field(default_factory=Equipment)
    credentials: Credentials | None = None


@dataclass(frozen=True)
class Party:
    """One end of a conversation.

    Args:
        name: Its name inside a sentence.
        protocol: Its version of the protocol.
        equipment: Its hardware and software.
    """

    name: str
    protocol: int
    equipment: Equipment


def obstacles(one: Party, other: Party) -> list[str]:
    """Reasons why two ends cannot work together, each with its remedy.

    An unknown version counts as fitting.
    """
    found = []
    if one.protocol != other.protocol:
        ours, theirs = _version(one, _OURS), _version(other, _OURS)
        found.append(
            f"{one.name} speaks protocol {one.protocol} ({_OURS} {ours}) and {other.name} "
            f"{other.protocol} ({_OURS} {theirs}); install the same version of {_OURS} on both."
        )
    ours, theirs = _version(one, _MODEL_CODE), _version(other, _MODEL_CODE)
    majors = {version.partition(".")[0] for version in (ours, theirs)} - {_UNKNOWN}
    if len(majors) > 1:
        found.append(
            f"{one.name} has {_MODEL_CODE} {ours} and {other.name} has {theirs}: they build "
            "layers differently; install the same major version on both."
        )
    return [sentence[0].upper() + sentence[1:] for sentence in found]


def differences(here: Equipment, there: Equipment) -> list[str]:
    """Harmless differences of versions, as ``torch 2.6 (2.7 here)``.

    Empty if an end does not report its versions.
    """
    ours, theirs = here.versions, there.versions
    if not ours or not theirs:
        return []
    return [
        f"{_shown(name)} {_shown(theirs.get(name, 'missing'))} ({ours.get(name, 'missing')} here)"
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]


def _version(party: Party, name: str) -> str:
    return _shown(party.equipment.versions.get(name, _UNKNOWN))


def _shown(text: str) -> str:
    """A peer's text, cut so that it floods no log."""
    return text[:_MOST_SHOWN]
