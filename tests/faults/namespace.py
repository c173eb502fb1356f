"""A second machine: a network namespace behind a virtual cable that can be pulled."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

HERE = "10.201.77.1"
THERE = "10.201.77.2"


@dataclass(frozen=True)
class Cable:
    """The way into a namespace."""

    namespace: str
    near: str
    far: str

    @property
    def prefix(self) -> list[str]:
        """What goes before a command that shall run at the far end."""
        return ["ip", "netns", "exec", self.namespace]

    def pull(self) -> None:
        _ip("-n", self.namespace, "link", "set", self.far, "down")

    def plug(self) -> None:
        _ip("-n", self.namespace, "link", "set", self.far, "up")
        # Who did not answer meanwhile is taken for unreachable for some seconds.
        _ip("neigh", "flush", "dev", self.near)
        _ip("-n", self.namespace, "neigh", "flush", "dev", self.far)


@contextmanager
def cable() -> Iterator[Cable | None]:
    """A namespace with a cable to it; None where this process may not make one."""
    made = Cable(*(f"{kind}{os.getpid()}" for kind in ("lhet", "lha", "lhb")))
    if shutil.which("ip") is None or not _may("netns", "add", made.namespace):
        yield None
        return
    try:
        far = ("netns", made.namespace)
        _ip("link", "add", made.near, "type", "veth", "peer", "name", made.far, *far)
        _ip("addr", "add", f"{HERE}/24", "dev", made.near)
        _ip("link", "set", made.near, "up")
        _ip("-n", made.namespace, "addr", "add", f"{THERE}/24", "dev", made.far)
        _ip("-n", made.namespace, "link", "set", "lo", "up")
        made.plug()
        yield made
    finally:
        _ip("netns", "del", made.namespace)


def _may(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
