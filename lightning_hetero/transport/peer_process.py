"""The process at the other end of a connection, if it runs on this machine.

A process may be silent for a long time because it computes without a pause, or shares a busy
machine with many others. Its CPU time then grows; the CPU time of a frozen process stands still.
The system shows the CPU time of the user's own processes only.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

import psutil  # type: ignore[import-untyped]

_MAPPED = "::ffff:"

Place = tuple[str, int]


def find_peer_process(connected: socket.socket) -> psutil.Process | None:
    """The peer's process, if it is a visible process on this machine and not this one."""
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        own, peer = _place(connected.getsockname()), _place(connected.getpeername())
        if own[0] != peer[0] and not (_is_loopback(own) and _is_loopback(peer)):
            return None
        for each in psutil.net_connections("tcp"):
            is_peers = each.raddr and (_place(each.laddr), _place(each.raddr)) == (peer, own)
            if is_peers and each.pid not in (None, os.getpid()):
                return psutil.Process(each.pid)
    except (OSError, psutil.Error):  # nobody may look, or it has just ended
        return None
    return None


def cpu_seconds_of(pid: int) -> float | None:
    """The CPU time of a process so far, if it is visible."""
    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return None


def fair_share() -> float:
    """A thread's share of one core of this machine at its present load, 0 to 1."""
    load = float(psutil.getloadavg()[0])
    return min(1.0, (os.cpu_count() or 1) / max(load, 1.0))


def _place(address: tuple[str, int] | tuple[str, int, int, int]) -> Place:
    return address[0].removeprefix(_MAPPED), address[1]


def _is_loopback(place: Place) -> bool:
    return ipaddress.ip_address(place[0].partition("%")[0]).is_loopback
