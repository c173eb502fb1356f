"""Names of processes. By its name, any process of this machine sees whether it has ended.

A worker keeps the session of a run with `recovery` while its coordinator is away. A killed
coordinator never comes back; the next run on its machine can report this to the worker.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROCESSES = Path("/proc")
# The fields after the name of a process's program: its state, and when it began.
_STATE, _BEGAN = 0, 19
# A process in one of these states has ended, even if its parent has not taken notice.
_ENDED_STATES = "ZX"


def own_name() -> str:
    """The unique name of this process; empty if the system does not report it."""
    number = os.getpid()
    try:
        return f"{_place()} {number} {_stat(number)[_BEGAN]}"
    except OSError:
        return ""


def has_ended(name: str) -> bool:
    """Whether a process has surely ended; false for a process of another machine or container."""
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
    """The scope of process numbers: the present boot of this machine, and the container. Virtual
    machines from one snapshot differ only in their names.
    """
    boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{(_PROCESSES / 'self/ns/pid').stat().st_ino}/{os.uname().nodename}"


def _stat(number: int) -> list[str]:
    # The name of the program stands in brackets, and may have some itself.
    return (_PROCESSES / str(number) / "stat").read_text().rpartition(")")[2].split()
