"""By which interface and local address this machine reaches another one."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Linux's numbers, which Python does not name: of ioctl, of IPPROTO_IP and of IPPROTO_IPV6.
_SIOCGIFADDR = 0x8915
_IP_MTU = 14
_IPV6_MTU = 24

_INTERFACES = Path("/sys/class/net")
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")

IS_LINUX = sys.platform == "linux"


@dataclass(frozen=True)
class Target:
    """One of the addresses that a name stands for."""

    family: socket.AddressFamily
    where: tuple[Any, ...]

    @property
    def host(self) -> str:
        """The numbers of the host."""
        return str(self.where[0])


@dataclass(frozen=True)
class Route:
    """How a target is reached.

    Args:
        source: The local address that is used.
        interface: The interface that has it; empty where the system does not say.
    """

    source: str
    interface: str

    def __str__(self) -> str:
        return f"from {self.source}" + (f" by {self.interface}" if self.interface else "")


def resolve(host: str, port: int) -> list[Target]:
    """The addresses that a name stands for.

    Raises:
        OSError: If nobody knows it.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # An address may be listed once for each way to have learned of it.
    return list(dict.fromkeys(Target(family, where) for family, _, _, _, where in found))


def route_to(target: Target) -> Route:
    """How this machine would reach a target; nothing is sent.

    Raises:
        OSError: If there is no way.
    """
    with socket.socket(target.family, socket.SOCK_DGRAM) as asking:
        asking.connect(target.where)
        source = str(asking.getsockname()[0])
    return Route(source, _interface_of(source, target.family))


def path_mtu(connected: socket.socket) -> int | None:
    """The largest packet that the way of a connection takes, as far as is known by now; None where
    the system does not say."""
    if not IS_LINUX:
        return None
    is_ipv6 = connected.family == socket.AF_INET6
    level = socket.IPPROTO_IPV6 if is_ipv6 else socket.IPPROTO_IP
    with contextlib.suppress(OSError):
        return connected.getsockopt(level, _IPV6_MTU if is_ipv6 else _IP_MTU)
    return None


def interface_mtu(interface: str) -> int | None:
    """The largest packet that an interface takes; None where the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        return int((_INTERFACES / interface / "mtu").read_text())
    return None


def _interface_of(source: str, family: socket.AddressFamily) -> str:
    if not IS_LINUX:
        return ""
    find = _with_ipv6 if family == socket.AF_INET6 else _with_ipv4
    return find(source.partition("%")[0])


def _with_ipv4(source: str) -> str:
    import fcntl  # not on every system, and used on Linux only

    wanted = socket.inet_aton(source)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                # struct ifreq: 16 bytes of the name, and a sockaddr_in with the address behind 4.
                if fcntl.ioctl(asking, _SIOCGIFADDR, request)[20:24] == wanted:
                    return name
    return "lo" if source.startswith("127.") else ""


def _with_ipv6(source: str) -> str:
    wanted = socket.inet_pton(socket.AF_INET6, source).hex()
    with contextlib.suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            number, *_, name = line.split()
            if number == wanted:
                return name
    return ""
