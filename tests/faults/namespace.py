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
        ip("-n", self.namespace, "link", "set", self.far, "down")

    def plug(self) -> None:
        ip("-n", self.namespace, "link", "set", self.far, "up")
        # Who did not answer meanwhile is taken for unreachable for some seconds.
        ip("neigh", "flush", "dev", self.near)
        ip("-n", self.namespace, "neigh", "flush", "dev", self.far)


@contextmanager
def cable() -> Iterator[Cable | None]:
    """A namespace with a cable to it; None where this process may not make one."""
    made = Cable(*(f"{kind}{os.getpid()}" for kind in ("lhet", "lha", "lhb")))
    if shutil.which("ip") is None or not _may("netns", "add", made.namespace):
        yield None
        return
    try:
        far = ("netns", made.namespace)
        ip("link", "add", made.near, "type", "veth", "peer", "name", made.far, *far)
        ip("addr", "add", f"{HERE}/24", "dev", made.near)
        ip("link", "set", made.near, "up")
        ip("-n", made.namespace, "addr", "add", f"{THERE}/24", "dev", made.far)
        ip("-n", made.namespace, "link", "set", "lo", "up")
        made.plug()
        yield made
    finally:
        ip("netns", "del", made.namespace)


def _may(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0


def ip(*arguments: str) -> None:
    """Run the command of this name.

    Raises:
        subprocess.CalledProcessError: If it fails.
    """
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
