"""What starts workers that join a run, as the strategy sees it; `Joining` starts none itself.

A launcher starts a command somewhere, again and again if its engine can do that. No engine carries
tensors: each worker dials the coordinator, and neighbors dial each other.
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ..errors import PlanError
from ..transport.address import Address
from ..transport.token import Token

# Only to ask the system for its routes; nothing is sent there.
_ANY_PORT = 9
_FAR_AWAY = "192.0.2.1"


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

    def start(self, join: Address, token: Token | None) -> None:
        """Begin to start the workers, each under a name of its own; do not wait for them.

        Args:
            join: Where they have to dial. Its host may stand for all interfaces.
            token: The token of the run, if this launcher brings it; None otherwise.

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


@dataclass
class Joining:
    """Waits for workers that somebody else starts, by ``lightning-hetero worker --join``.

    Plans call a worker by the name that it was started with (``--name``).

    Args:
        listen: Where this process waits for workers, as ``host:port``. An address beyond loopback
            needs a token.
        least: How many workers the run needs. With a plan that names its workers, the run waits for
            these instead.
        most: How many workers the run takes, those that have come first; None for all.
        wait_seconds: How long to wait for them.

    Raises:
        PlanError: If an argument is invalid.
    """

    listen: str = "0.0.0.0:7070"
    least: int = 1
    most: int | None = None
    wait_seconds: float = 300.0
    brings_token: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_wishes(self)

    def start(self, join: Address, token: Token | None) -> None:
        """Do nothing: somebody else starts the workers."""

    def stop(self) -> None:
        """Do nothing: the workers dial again by themselves."""

    def faults(self, is_late: bool) -> list[str]:
        """None: nothing is known of workers before they join."""
        return []


def check_wishes(launcher: Launcher, num_started: float = math.inf) -> None:
    """Check the numbers and the address of a launcher.

    Args:
        launcher: The launcher.
        num_started: How many workers it starts; infinite if nobody knows.

    Raises:
        PlanError: With the name of the argument.
    """
    name = type(launcher).__name__
    Address.parse(launcher.listen)
    if not _is_count(launcher.least):
        raise PlanError(
            f"`least` of {name} is {launcher.least!r}; it must be a whole number from 1."
        )
    if launcher.least > num_started:
        raise PlanError(
            f"`least` of {name} is {launcher.least}, and {name} starts {num_started} at most; "
            "lower `least`, or let it start more workers."
        )
    if launcher.most is not None and not (
        _is_count(launcher.most) and launcher.most >= launcher.least
    ):
        raise PlanError(
            f"`most` of {name} is {launcher.most!r}; it must be a whole number from `least`, which "
            f"is {launcher.least}, or None for all workers that come."
        )
    if not 0 < launcher.wait_seconds < math.inf:
        raise PlanError(
            f"`wait_seconds` of {name} is {launcher.wait_seconds!r}; it must be a number of "
            "seconds above 0."
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def reachable(join: Address, towards: str = _FAR_AWAY) -> Address:
    """The address under which another machine reaches what listens here.

    Args:
        join: Where this process listens, perhaps on all interfaces.
        towards: The other machine; by default one beyond all routers.
    """
    if join.host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not listened on
        return join
    try:
        # With UDP, this only chooses the interface.
        found = socket.getaddrinfo(towards, _ANY_PORT, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as asked:
                asked.connect(where)
                return Address(asked.getsockname()[0], join.port)
    except OSError:
        pass  # an alias of ssh, or a machine without a route
    return Address(socket.gethostname(), join.port)
