"""Addresses, ``host:port`` as a person writes them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from ..errors import PlanError
from ..plan import COORDINATOR

MOST_PORT = 65535

_HOST_AND_PORT = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.%a-z]+)\]|(?P<name>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})"
)

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@dataclass(frozen=True)
class Address:
    """A host and a port; prints as ``host:port``, with brackets around an IPv6 host."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``host:port``, ``1.2.3.4:port`` or ``[::1]:port``.

        Raises:
            PlanError: If the text is not an address.
        """
        found = _HOST_AND_PORT.fullmatch(text)
        if found is None or int(found["port"]) > MOST_PORT:
            hint = "" if found is None else f"; the highest port is {MOST_PORT}"
            raise PlanError(
                f"{text!r} is not an address; write host:port, such as strix.local:9999{hint}."
            )
        return cls(found["ipv6"] or found["name"], int(found["port"]))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def checked_name(text: str) -> str:
    """The text, if it is allowed as the name of a joining worker.

    Raises:
        PlanError: If it is empty, too long, has other characters than letters, digits and
            ``._:-``, or is the coordinator's.
    """
    if not _NAME.fullmatch(text) or text == COORDINATOR:
        raise PlanError(
            f"{text!r:.80} is not a name for a worker; take up to 64 letters, digits, dots, "
            f"colons, hyphens and underscores, and not {COORDINATOR!r}."
        )
    return text


def advice(address: Address) -> str:
    """A sentence on how to find the cause, for every error of a connection to a worker."""
    return f"`lightning-hetero doctor {address}` checks each hop of the way there."
