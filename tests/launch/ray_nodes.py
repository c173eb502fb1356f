"""A real Ray cluster of nodes on this machine, and workers that it places."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_hetero import RayWorkers

HAS_RAY = importlib.util.find_spec("ray") is not None
NEEDS_RAY = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
ROOT = Path(__file__).parents[2]
# Ray and workers start for long on a small machine.
LONG_SECONDS = 100.0


class Nodes:
    """A head without room for workers, and nodes with room for a worker each."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.small = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
        self.nodes: list[Any] = []

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> None:
        """Add a node with room for a worker."""
        self.nodes.append(self.cluster.add_node(**self.small, resources={"stage": 1}))

    def remove(self) -> None:
        """Remove the node that was added last, with all of its processes."""
        self.cluster.remove_node(self.nodes.pop())

    def remove_with(self, name: str) -> None:
        """Remove the node on which the worker of that name is."""
        above = {each.pid for process in processes_of(name) for each in process.parents()}
        [found] = [node for node in self.nodes if _raylet_of(node) in above]
        self.nodes.remove(found)
        self.cluster.remove_node(found)

    def stored_bytes(self) -> dict[str, int]:
        """The bytes that were ever put into the object store of each present node, by number."""
        from ray._private.internal_api import node_stats  # only where it is installed

        found = {}
        for node in (self.cluster.head_node, *self.nodes):
            said = node_stats(node.node_ip_address, node.node_manager_port, False)
            found[str(node.unique_id)] = int(said.store_stats.cumulative_created_bytes)
        return found

    def set_number(self, count: int) -> None:
        """Add or remove nodes until there are so many with room for a worker."""
        while len(self.nodes) > count:
            self.remove()
        while len(self.nodes) < count:
            self.add()


def _raylet_of(node: Any) -> int:
    """The process of Ray above all workers of a node."""
    [raylet] = node.all_processes["raylet"]
    return int(raylet.process.pid)


@contextmanager
def ray_nodes(count: int = 2) -> Iterator[Nodes]:
    """A cluster with so many nodes for workers; the end of the block ends it."""
    from ray.cluster_utils import Cluster  # only where it is installed

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        head = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            nodes = Nodes(cluster)
            nodes.set_number(count)
            yield nodes
        finally:
            cluster.shutdown()


def workers_of(nodes: Nodes, token_file: Path, count: int = 2, **options: Any) -> RayWorkers:
    given = {
        "python": sys.executable,
        "options": ["--threads", "1", "--token-file", str(token_file)],
        "listen": "127.0.0.1:0",
        "wait_seconds": LONG_SECONDS,
        **options,
    }
    return RayWorkers([{"stage": 1}] * count, nodes.address, **given)


def processes_of(name: str) -> list[psutil.Process]:
    """The processes of the worker of that name, the warm one first."""
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] and name in process.info["cmdline"]
    ]
    return sorted(found, key=lambda process: float(process.create_time()))


def until(is_true: Callable[[], bool]) -> float:
    """Seconds until something is true that no event tells; it is looked at now and then."""
    began, pause = time.monotonic(), threading.Event()
    while not is_true():
        assert time.monotonic() - began < LONG_SECONDS
        pause.wait(0.1)
    return time.monotonic() - began
