"""Links of a given rate between two network namespaces: a veth pair, each end with `tc tbf`.

The ends have addresses of 127.77.0.0/24, which are loopback's by their numbers: workers that are
not authenticated listen on nothing else. Within the two namespaces they are routed over the pair,
and loopback's own device keeps 127.0.0.1 alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DEVICE = "veth0"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Link:
    """Two ends that reach each other."""

    addresses: tuple[str, str] = ("127.0.0.1", "127.0.0.2")
    interface: str = "lo"
    namespaces: tuple[str, str] | None = None

    def before(self, end: int) -> list[str]:
        """What goes before a command that shall run at one end."""
        return [] if self.namespaces is None else ["ip", "netns", "exec", self.namespaces[end]]


LOOPBACK = Link()


def bits_per_second(rate: str) -> float:
    """What ``100mbit`` says.

    Raises:
        ValueError: If it says nothing of the kind.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if found is None:
        raise ValueError(f"{rate!r} is no rate; write 100mbit or 1gbit.")
    return float(found[1]) * UNITS[found[2]]


def burst_bytes(rate: str) -> int:
    """What may leave at once: 5 ms of the rate, since the kernel's timer may tick that rarely, and
    never less than one large segment."""
    return max(2**16, round(bits_per_second(rate) / 8 * 0.005))


def missing() -> str | None:
    """Why links cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if lacking:
        return f"iproute2 is not installed (no {', '.join(lacking)})"
    try:
        with link("1gbit"):
            return None
    except RuntimeError as error:
        return str(error)


@contextmanager
def link(rate: str) -> Iterator[Link]:
    """Make the two namespaces and the pair, and remove them.

    Raises:
        RuntimeError: If the kernel refuses.
    """
    first, second = (f"hetero-{os.getpid()}-{end}" for end in "ab")
    made = Link(("127.77.0.1", "127.77.0.2"), DEVICE, (first, second))
    try:
        _run(f"ip netns add {first}")
        _run(f"ip netns add {second}")
        _run(f"ip link add {DEVICE} netns {first} type veth peer name {DEVICE} netns {second}")
        for name, address in zip((first, second), made.addresses, strict=True):
            _set_up(name, address, rate)
        yield made
    finally:
        # The pair goes with its namespace.
        for name in (first, second):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _set_up(namespace: str, address: str, rate: str) -> None:
    _run(f"ip -n {namespace} link set lo up")
    _run(f"ip -n {namespace} address del 127.0.0.1/8 dev lo")
    _run(f"ip -n {namespace} address add 127.0.0.1/32 dev lo")
    _run(f"ip netns exec {namespace} sysctl -qw net.ipv4.conf.all.route_localnet=1")
    _run(f"ip -n {namespace} address add {address}/24 dev {DEVICE}")
    _run(f"ip -n {namespace} link set {DEVICE} up")
    shape = f"tbf rate {rate} burst {burst_bytes(rate)} latency 100ms"
    _run(f"tc -n {namespace} qdisc add dev {DEVICE} root {shape}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip()}")
