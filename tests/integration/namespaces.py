"""Machines of their own, as far as the network goes: each a network namespace of this one.

A host is held by one process, and all that was made in it ends with that: links, addresses, tunnels
and their daemons, also when the tests are killed. Nothing outside is touched.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
# Its own /run, as that is where WireGuard's daemons meet their clients.
_HOLD = "ip link set lo up && mount -t tmpfs tmpfs /run && echo ready && exec cat"
_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child")


def reason_against_hosts() -> str | None:
    """Why there cannot be hosts here, if that is so."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if any(shutil.which(tool) is None for tool in ("ip", "unshare", "nsenter")):
        return "iproute2 and util-linux are not installed"
    tried = subprocess.run([*_UNSHARE, "sh", "-c", _HOLD], stdin=subprocess.DEVNULL, timeout=20)
    return "namespaces cannot be made here" if tried.returncode else None


@dataclass(frozen=True)
class Host:
    """A namespace, by the process that holds it."""

    process: subprocess.Popen[str]

    def run(self, *command: str) -> str:
        """What a command there prints."""
        namespaces = Path(f"/proc/{self.process.pid}/ns")
        enter = [f"--{name}={namespaces / file}" for name, file in _NAMESPACES.items()]
        done = subprocess.run(
            ["nsenter", *enter, *command], capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def received_bytes(self, interface: str) -> int:
        """What has come in there so far."""
        (link,) = json.loads(self.run("ip", "-json", "-stats", "link", "show", interface))
        return int(link["stats64"]["rx"]["bytes"])

    @contextmanager
    def here(self) -> Iterator[None]:
        """Sockets, threads and processes that this thread makes in the block are on the host."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(Path(f"/proc/{self.process.pid}/ns/net"))
            yield
        finally:
            _enter(Path(f"/proc/self/fd/{home}"))
            os.close(home)


_NAMESPACES = {"net": "net", "mount": "mnt", "pid": "pid_for_children"}


def _enter(network: Path) -> None:
    descriptor = os.open(network, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {network}")
    finally:
        os.close(descriptor)


@contextmanager
def new_host() -> Iterator[Host]:
    """A host with nothing but loopback; all of it is gone after the block."""
    process = subprocess.Popen(
        [*_UNSHARE, "sh", "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            pytest.fail("the namespace could not be made")
        yield Host(process)
    finally:
        process.kill()
        process.wait()


def join(name: str, first: Host, first_address: str, second: Host, second_address: str) -> None:
    """Connect two hosts by a cable; addresses with the network's length."""
    peer = str(second.process.pid)
    ip = ("nsenter", f"--net=/proc/{first.process.pid}/ns/net", "ip")
    cable = ("link", "add", name, "type", "veth", "peer", "name", name, "netns", peer)
    subprocess.run([*ip, *cable], check=True, timeout=30)
    for host, address in ((first, first_address), (second, second_address)):
        host.run("ip", "addr", "add", address, "dev", name)
        host.run("ip", "link", "set", name, "up")
