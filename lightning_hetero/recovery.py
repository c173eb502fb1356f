"""How a run gets over faults: what a user may set of it. Plain data, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import RecoveryError

# For values that a peer may tell too.
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

    linger_seconds: float = 120.0

    def __post_init__(self) -> None:
        seconds = self.linger_seconds
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not (is_number and math.isfinite(seconds) and 0 <= seconds <= MOST_LINGER_SECONDS):
            raise RecoveryError(
                f"`linger_seconds` is {seconds!r:.80}; it must be a number of seconds from 0 to "
                f"{MOST_LINGER_SECONDS:.0f}."
            )


def recovery_of(value: bool | Recovery) -> Recovery | None:
    """What the argument ``recovery`` of the strategy asks for; None for no recovery."""
    if isinstance(value, Recovery):
        return value
    return Recovery() if value else None
