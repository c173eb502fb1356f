"""How a run gets over faults: what a user may set of it. Plain data, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from .errors import RecoveryError

# For values that a peer may tell too.
MOST_LINGER_SECONDS = 86_400.0

_MOST_LOG_GIB = 4096.0


@dataclass(frozen=True)
class Recovery:
    """How a run gets over faults.

    Args:
        linger_seconds: How long both ends of a broken connection keep their session and wait until
            the connection comes back; 0 gives a peer up at once. A worker may allow less; see
            ``lightning-hetero worker --linger-seconds``.
        wait_seconds: How long the run waits for a process that takes a lost worker's place: another
            one at the same address.
        every_seconds: The seconds between two snapshots of the workers' state. A worker in the
            place of a lost one repeats at most what was done in that time.
        log_gib: GiB of messages to the workers, at which a snapshot is taken earlier. Those since
            the latest snapshot are kept, 256 MiB of them in memory and the others on disk.
        folder: Where snapshots lie during the run; None takes ``recovery`` in the Trainer's
            ``default_root_dir``.

    Raises:
        RecoveryError: If a value is out of its bounds.
    """

    linger_seconds: float = 120.0
    wait_seconds: float = 30.0
    every_seconds: float = 60.0
    log_gib: float = 4.0
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("linger_seconds", "wait_seconds", "every_seconds"):
            self._check(name, "a number of seconds", MOST_LINGER_SECONDS)
        self._check("log_gib", "a number of GiB", _MOST_LOG_GIB)

    def _check(self, name: str, what: str, most: float) -> None:
        found = getattr(self, name)
        is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
        if not (is_number and math.isfinite(found) and 0 <= found <= most):
            raise RecoveryError(
                f"`{name}` is {found!r:.80}; it must be {what} from 0 to {most:.0f}."
            )


def recovery_of(value: bool | Recovery) -> Recovery | None:
    """What the argument ``recovery`` of the strategy asks for; None for no recovery."""
    if isinstance(value, Recovery):
        return value
    return Recovery() if value else None
