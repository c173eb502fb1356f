"""How a run gets over faults: the user's settings. Plain data, without torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
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
        wait_seconds: How long the run waits for another process at a lost worker's address. Then an
            idle worker takes the place, else another machine of the run beside its own layers.
        every_seconds: The seconds between two snapshots of the workers' state. A worker in the
            place of a lost one repeats at most the work of this time.
        log_gib: The limit of kept messages, in GiB, over the coordinator and the workers together.
            At the limit, a snapshot is taken earlier. Messages since the latest snapshot are kept:
            256 MiB by each process in memory, and the others on disk.
        folder: Where snapshots lie during the run; by default ``recovery`` in the Trainer's
            ``default_root_dir``.
        least_workers: The least number of machines; with fewer, the run ends. From 1 on.

    Raises:
        RecoveryError: If a value is out of its bounds.
    """

    linger_seconds: float = LINGER_SECONDS
    wait_seconds: float = 30.0
    every_seconds: float = 60.0
    log_gib: float = 4.0
    folder: str | Path | None = None
    least_workers: int = 1

    def __post_init__(self) -> None:
        check_linger_seconds(self.linger_seconds, "`linger_seconds`")
        for name in ("wait_seconds", "every_seconds", "log_gib"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value < math.inf):
                raise RecoveryError(
                    f"The setting `{name}` is {value!r:.80}; it must be a number from 0 on."
                )
        least = self.least_workers
        if not isinstance(least, int) or isinstance(least, bool) or least < 1:
            raise RecoveryError(
                f"The setting `least_workers` is {least!r:.80}; it must be a whole number from 1 "
                "on."
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_linger_seconds(seconds: Any, name: str) -> None:
    """Refuse an impossible time of waiting for a connection.

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
    """The settings from the strategy's argument ``recovery``; None without recovery."""
    if isinstance(value, Recovery):
        return value
    return Recovery() if value else None


def too_few(names: Collection[str], least: int) -> str:
    """Why a run with these workers cannot go on, as a sentence; empty if it can."""
    if len(names) >= least:
        return ""
    count = "1 worker takes" if len(names) == 1 else f"{len(names)} workers take"
    return f"Only {count} part, and the run needs {least} (`least_workers` of `Recovery`)."
