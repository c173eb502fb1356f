"""How a run gets over faults: what a user may set of it. Plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import RecoveryError

LINGER_SECONDS = 120.0
MOST_LINGER_SECONDS = 86_400.0


@dataclass(frozen=True)
class Recovery:
    """How a run gets over faults.

    Args:
        linger_seconds: How long both ends of a broken connection keep their session and wait until
            the connection comes back; 0 gives a peer up at once. A worker may allow less; see
            ``lightning-hetero worker --linger-seconds``.

    Raises:
        RecoveryError: If a value is out of its bounds.
    """

    linger_seconds: float = LINGER_SECONDS

    def __post_init__(self) -> None:
        check_linger_seconds(self.linger_seconds, "`linger_seconds`")


def check_linger_seconds(seconds: Any, name: str) -> None:
    """Refuse a time that nobody can wait for a connection.

    Raises:
        RecoveryError: With the value and its name.
    """
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (is_number and 0 <= seconds <= MOST_LINGER_SECONDS):  # not true for NaN either
        raise RecoveryError(
            f"{name} is {seconds!r:.80}; it must be a number of seconds from 0 to "
            f"{MOST_LINGER_SECONDS:.0f}."
        )


def recovery_of(value: bool | Recovery) -> Recovery | None:
    """What the argument ``recovery`` of the strategy asks for; None for no recovery."""
    if isinstance(value, Recovery):
        return value
    return Recovery() if value else None
