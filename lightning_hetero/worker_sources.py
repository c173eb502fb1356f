"""Values for `workers` of a strategy, beside a number and addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class ClusterFile:
    """The workers of a cluster file, started by ``lightning-hetero up``.

    Args:
        path: The path of the file.
    """

    path: str


@runtime_checkable
class Launcher(Protocol):
    """Starts workers for one run, and ends them.

    Attributes:
        listen: Where this process waits for the workers, as ``host:port``; port 0 takes a free one.
        least: How many workers the run needs.
        most: How many workers the run takes; by default all.
        wait_seconds: How long to wait for ``least`` workers.
        brings_token: Whether `start` gives the workers a new token for each run. If not, the
            workers read the token from a file on their machines.
    """

    listen: str
    least: int
    most: int | None
    wait_seconds: float
    brings_token: bool

    def start(self, join: Any, token: Any) -> None:
        """Begin to start the workers, each under a name of its own; do not wait for them.

        Args:
            join: The `Address` to dial. Its host may mean all interfaces.
            token: The `Token` of the run, if this launcher brings it.

        Raises:
            HeteroError: If they cannot be started.
        """

    def stop(self) -> None:
        """End all started workers. May be called twice."""

    def faults(self, is_late: bool) -> list[str]:
        """Sentences on missing workers, each with its remedy.

        Args:
            is_late: Whether the wait is over. Before, the list is empty while enough of the other
                workers may still come.
        """
