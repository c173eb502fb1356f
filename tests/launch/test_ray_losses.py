"""Training under Ray gets over workers that are killed and nodes that go, if Ray is installed.

The log, which `pytest -s --log-cli-level=INFO` shows, tells how long each return has taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero import HeteroPipelineStrategy, Recovery, RecoveryCallback
from lightning_hetero.transport.token import Token, write_token_file

from ..equality import differing
from ..integration.yardstick import (
    BATCH_SIZE,
    NUM_LAYERS,
    NUM_PIECES,
    NUM_STEPS,
    accumulated_run,
    plan_over,
)
from ..models import TinyModule, fit, loader
from ..pairwise import repeats
from .ray_nodes import LONG_SECONDS, NEEDS_RAY, Nodes, processes_of, ray_nodes, until, workers_of

pytestmark = [NEEDS_RAY, pytest.mark.timeout(600)]
PLAN = plan_over(["ray-0", "ray-1"], 3, 1, NUM_PIECES)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as found:
        yield found


class Acting(RecoveryCallback):
    """Calls a function before some batches, and notes what it is told."""

    def __init__(self, before: Mapping[int, Callable[[], None]]) -> None:
        self._before = before
        self.lost: list[str] = []
        self.restored: list[str] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._before.get(batch_idx, lambda: None)()

    def on_worker_lost(self, trainer: Any, name: str, step: int) -> None:
        self.lost.append(name)

    def on_worker_restored(self, trainer: Any, name: str, step: int, seconds: float) -> None:
        self.restored.append(name)


class Scene:
    """A training of five steps over two workers of Ray, with recovery."""

    def __init__(self, nodes: Nodes, folder: Path, count: int, wait_seconds: float) -> None:
        token_file = folder / "token"
        write_token_file(token_file, Token.new())
        recovery = Recovery(
            folder=folder / "recovery", every_seconds=0.0, wait_seconds=wait_seconds
        )
        self.strategy = HeteroPipelineStrategy(
            workers_of(nodes, token_file, count, least=2),
            PLAN,
            token_file=token_file,
            recovery=recovery,
        )

    def await_guest(self, name: str) -> None:
        """Wait until a worker of that name waits at the door."""
        door = self.strategy._fleet._door
        assert door is not None
        until(lambda: name in door.names())

    def run(self, before: Mapping[int, Callable[[], None]]) -> Acting:
        """Train with the bits of one device, and call a function before some batches."""
        acting, data = Acting(before), loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE)
        module = fit(TinyModule(NUM_LAYERS), self.strategy, data, callbacks=[acting])
        assert differing(module, accumulated_run(NUM_PIECES)) == []
        return acting


def assert_nothing_stored(before: Mapping[str, int], nodes: Nodes) -> None:
    """Ray's own notes are of some bytes; the smallest activation has thousands."""
    for node, num_bytes in nodes.stored_bytes().items():
        assert num_bytes - before.get(node, 0) < 100


@repeats(
    "launch/test_ray.py::test_a_killed_worker_a_lost_node_and_a_new_one",
    "integration/test_lost_guests.py::test_a_killed_session_comes_back",
)
def test_a_worker_that_is_killed_joins_again(nodes: Nodes, tmp_path: Path) -> None:
    """First the process of its session, then all of it; and no byte goes through Ray's store."""
    nodes.set_number(2)
    scene, before = Scene(nodes, tmp_path, 2, LONG_SECONDS), nodes.stored_bytes()
    found = scene.run(
        {1: lambda: processes_of("ray-0")[-1].kill(), 3: lambda: processes_of("ray-1")[0].kill()}
    )
    assert found.lost == found.restored == ["ray-0", "ray-1"]
    assert_nothing_stored(before, nodes)


@repeats(
    "launch/test_ray.py::test_a_killed_worker_a_lost_node_and_a_new_one",
    "integration/test_lost_guests.py::test_a_killed_session_comes_back",
)
def test_one_whose_node_is_lost_is_placed_anew(nodes: Nodes, tmp_path: Path) -> None:
    nodes.set_number(2)
    scene, before = Scene(nodes, tmp_path, 2, LONG_SECONDS), nodes.stored_bytes()

    def lose_node() -> None:
        nodes.remove()
        nodes.add()

    found = scene.run({2: lose_node})
    assert len(found.lost) == 1
    assert found.lost == found.restored
    assert_nothing_stored(before, nodes)


def test_a_node_that_is_added_brings_a_spare_that_takes_a_lost_one_s_place(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Two workers are enough to begin, and the third one has no node yet."""
    nodes.set_number(2)
    scene = Scene(nodes, tmp_path, 3, wait_seconds=0.5)

    def add_node() -> None:
        nodes.add()
        scene.await_guest("ray-2")

    found = scene.run({1: add_node, 3: lambda: nodes.remove_with("ray-1")})
    assert found.lost == found.restored == ["ray-1"]
