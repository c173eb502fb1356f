"""What `workers` of a strategy may be beside a number and addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class ClusterFile:
    """The workers of a cluster file, which ``lightning-hetero up`` has started.

    Args:
        path: The path of the file.
    """

    path: str


@runtime_checkable
class Launcher(Protocol):
    """Starts workers that join one run, and ends them.

    Attributes:
        listen: Where this process waits for the workers, as ``host:port``; port 0 takes a free one.
        least: How many workers the run needs.
        most: How many workers the run takes; None for all that have come.
        wait_seconds: How long to wait for ``least`` workers.
        brings_token: Whether `start` gives the workers a token, which is new for each run. If not,
            the workers read the token from a file on their machines.
    """

    listen: str
    least: int
    most: int | None
    wait_seconds: float
    brings_token: bool

    def start(self, join: Any, token: Any) -> None:
        """Begin to start the workers, each under a name of its own; do not wait for them.

        Args:
            join: The `Address` that they have to dial. Its host may stand for all interfaces.
            token: The `Token` of the run, if this launcher brings it; None otherwise.

        Raises:
            HeteroError: If they cannot be started.
        """

    def stop(self) -> None:
        """End all workers that were started. May be called twice."""

    def faults(self, is_late: bool) -> list[str]:
        """Sentences on workers that will not come, each with its remedy.

        Args:
            is_late: Whether the wait is over. Before, there are none while enough of the other
                workers may still come.
        """
