"""Names of processes, by which another one on the same machine sees whether they have ended.

A worker keeps the session of a run with `recovery` while its coordinator is away. A killed one
never comes back; whoever starts the run again on its machine can tell the worker so.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROCESSES = Path("/proc")
# The fields behind the name of a process's program: its state, and when it began.
_STATE, _BEGAN = 0, 19
# A process in one of these runs no more, whether or not its parent has taken notice.
_ENDED_STATES = "ZX"


def own_name() -> str:
    """The name of this process, which no other one has; empty where the system does not tell."""
    number = os.getpid()
    try:
        return f"{_place()} {number} {_stat(number)[_BEGAN]}"
    except OSError:
        return ""


def has_ended(name: str) -> bool:
    """Whether a process has ended for sure; false for one of another machine or container."""
    place, _, rest = name.partition(" ")
    number, _, began = rest.partition(" ")
    try:
        if not number.isdecimal() or place != _place():
            return False
        # A process of another user may not be seen otherwise.
        os.kill(int(number), 0)
        stat = _stat(int(number))
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return stat[_BEGAN] != began or stat[_STATE] in _ENDED_STATES


def _place() -> str:
    """What has numbers of processes of its own: the present run of this machine's system, and the
    container. Virtual machines that were started from one snapshot differ in their names alone."""
    boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{(_PROCESSES / 'self/ns/pid').stat().st_ino}/{os.uname().nodename}"


def _stat(number: int) -> list[str]:
    # The name of the program stands in brackets, and may have some itself.
    return (_PROCESSES / str(number) / "stat").read_text().rpartition(")")[2].split()
