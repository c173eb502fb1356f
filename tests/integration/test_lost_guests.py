"""Workers that have joined and are killed come back through the door, by their names."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_hetero import (
    HeteroPipelineStrategy,
    Joining,
    Plan,
    Recovery,
    RecoveryCallback,
    StagePlan,
)
from lightning_hetero.errors import WorkerLost, WorkerUnreachable
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.token import Token, write_token_file

from ..conftest import WorkerProcess, worker_process
from ..equality import differing
from ..models import TinyModule, fit, loader
from ..pairwise import keeping, repeats
from ..transport.pairs import PATIENCE_SECONDS
from .namespaces import join, new_host, reason_against_hosts

REASON = reason_against_hosts()

NUM_STEPS = 6
PLAN = Plan(
    [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan(["left"], (1, 3)),
        StagePlan(["right"], (3, 4)),
        StagePlan(["left"], (4, 5)),
    ],
    micro_batches=3,
)


class Scene:
    """Workers that join one run, which begins with two of them: left and right.

    Args:
        folder: For the token and the snapshots.
        where: The address at which they join; by default a free one.
    """

    def __init__(self, folder: Path, exits: ExitStack, where: str = "") -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.where = where or f"127.0.0.1:{listener.getsockname()[1]}"
        self.token_file, self._folder, self._exits = folder / "token", folder, exits
        write_token_file(self.token_file, Token.new())
        self.strategy: HeteroPipelineStrategy | None = None
        self.told: list[tuple[str, str]] = []

    def start(self, name: str, *options: str, by_command: bool = False) -> WorkerProcess:
        """Start a worker that joins; each time it listens on another port."""
        joins = ("--join", self.where, "--token-file", str(self.token_file), "--name", name)
        started = worker_process(*joins, *options, by_command=by_command)
        return self._exits.enter_context(started)

    def await_guest(self, name: str) -> None:
        """Wait until a worker of that name waits at the door."""
        assert self.strategy is not None
        door, pause = self.strategy._fleet._door, threading.Event()
        assert door is not None
        end = time.monotonic() + PATIENCE_SECONDS
        while name not in door.names():
            assert time.monotonic() < end
            pause.wait(0.02)

    def run(
        self,
        before: dict[int, Callable[[], None]],
        deadlines: Deadlines | None = None,
        **settings: Any,
    ) -> TinyModule:
        """Train, and call a function before the batch of that number."""
        joining = Joining(self.where, least=2, wait_seconds=PATIENCE_SECONDS)
        folder = self._folder / "recovery"
        settings = {"every_seconds": 0.0, **settings}
        self.strategy = HeteroPipelineStrategy(
            joining,
            PLAN,
            token_file=self.token_file,
            recovery=Recovery(folder=folder, **settings),
        )
        self.strategy.deadlines = deadlines or Deadlines()
        callbacks = [_Acting(before, self.told)]
        data = loader(6 * NUM_STEPS, 6, padded=True)
        return fit(TinyModule(), self.strategy, data, callbacks=callbacks)


class _Acting(RecoveryCallback):
    """Calls a function before some batches, and notes what it is told."""

    def __init__(self, before: dict[int, Callable[[], None]], told: list[tuple[str, str]]) -> None:
        self._before, self._told = before, told

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._before.get(batch_idx, lambda: None)()

    def on_worker_lost(self, trainer: Any, name: str, step: int) -> None:
        self._told.append(("lost", name))

    def on_worker_restored(self, trainer: Any, name: str, step: int, seconds: float) -> None:
        self._told.append(("restored", name))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as exits:
        yield Scene(tmp_path, exits)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TinyModule:
    """The same run without a loss."""
    with ExitStack() as exits:
        scene = Scene(tmp_path_factory.mktemp("undisturbed"), exits)
        for name in ("left", "right"):
            scene.start(name)
        return scene.run({})


def assert_same(found: TinyModule, expected: TinyModule) -> None:
    assert found.losses == expected.losses
    assert differing(found, expected) == []


def end(worker: WorkerProcess) -> None:
    """Kill all of a worker."""
    worker.process.kill()
    worker.process.wait()


def test_a_killed_session_comes_back(scene: Scene, undisturbed: TinyModule) -> None:
    left, right = scene.start("left"), scene.start("right")
    assert_same(scene.run({2: left.session.kill, 4: right.session.kill}), undisturbed)
    assert scene.told == [("lost", "left"), ("restored", "left")] + [
        ("lost", "right"),
        ("restored", "right"),
    ]


@pytest.mark.parametrize("name", keeping(["left"], ["left", "right"]))
def test_one_that_starts_again_at_another_port_takes_its_place(
    name: str, scene: Scene, undisturbed: TinyModule
) -> None:
    """As a launcher starts it again, perhaps on another machine."""
    workers = {each: scene.start(each) for each in ("left", "right")}

    def start_again() -> None:
        end(workers[name])
        assert scene.start(name).address != workers[name].address

    assert_same(scene.run({3: start_again}), undisturbed)
    assert scene.told == [("lost", name), ("restored", name)]


def test_a_late_one_takes_the_place_of_one_that_stays_away(
    scene: Scene, undisturbed: TinyModule, caplog: pytest.LogCaptureFixture
) -> None:
    """Later the process of the late one is killed too, and joins again under its own name."""
    workers = {name: scene.start(name) for name in ("left", "right")}

    def come_late_and_end() -> None:
        workers["late"] = scene.start("late")
        scene.await_guest("late")
        end(workers["right"])

    with caplog.at_level("INFO"):
        found = scene.run(
            {1: come_late_and_end, 4: lambda: workers["late"].session.kill()}, wait_seconds=5.0
        )
    assert_same(found, undisturbed)
    assert scene.told == [("lost", "right"), ("restored", "right")] * 2
    assert "late takes the place of right, under its name in the plan" in caplog.text


def test_one_that_nobody_replaces_ends_the_run_with_the_remedy(scene: Scene) -> None:
    scene.start("left")
    right = scene.start("right")
    with pytest.raises(WorkerLost, match="cannot be replaced: .*`least_workers`"):
        scene.run({1: lambda: end(right)}, wait_seconds=0.3, least_workers=2)


@pytest.mark.parametrize("kind", keeping(["spawn"], ["fork", "spawn"]))
def test_a_machine_that_has_joined_takes_over_beside_its_own_layers(
    kind: str, scene: Scene, undisturbed: TinyModule, caplog: pytest.LogCaptureFixture
) -> None:
    scene.start("left", "--sessions", kind)
    right = scene.start("right")
    with caplog.at_level("INFO"):
        assert_same(scene.run({2: lambda: end(right)}, wait_seconds=0.3), undisturbed)
    assert scene.told == [("lost", "right"), ("restored", "right")]
    assert "takes the place of right beside its own layers" in caplog.text


@repeats(
    "test_a_machine_that_has_joined_takes_over_beside_its_own_layers",
    "test_one_that_nobody_can_dial_joins_again_when_its_broken_connection_is_given_up",
)
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_machine_that_nobody_can_dial_takes_over_and_so_does_another_process_of_it(
    undisturbed: TinyModule, tmp_path: Path
) -> None:
    """As behind a router that lets nothing in: its second process dials as it did itself."""
    with ExitStack() as exits:
        home, behind = (exits.enter_context(new_host()) for _ in range(2))
        join("way", home, "10.93.0.1/24", behind, "10.93.0.2/24")
        behind.run("ip", "addr", "add", "192.168.1.7/32", "dev", "lo")
        scene = Scene(tmp_path, exits, "10.93.0.1:7070")
        with behind.here():
            workers = {
                name: scene.start(name, "--listen", "192.168.1.7:0", by_command=True)
                for name in ("left", "right")
            }

        def kill_second() -> None:
            workers["left"].session.kill()

        with home.here():
            with pytest.raises(OSError, match="unreachable"):
                socket.create_connection(("192.168.1.7", 9), PATIENCE_SECONDS)
            settings = {"wait_seconds": 0.3, "linger_seconds": 1.0}
            found = scene.run({2: lambda: end(workers["right"]), 4: kill_second}, **settings)
    assert_same(found, undisturbed)
    assert scene.told == [("lost", "right"), ("restored", "right")] * 2


def test_one_that_is_silent_is_not_waited_for_when_another_has_joined_under_its_name(
    scene: Scene, undisturbed: TinyModule
) -> None:
    """As on a machine that is off, nothing tells that its process never speaks again."""
    scene.start("left")
    right = scene.start("right")

    def silence() -> None:
        for process in (right.session, psutil.Process(right.process.pid)):
            process.suspend()
        scene.start("right")

    quick = Deadlines(heartbeat_seconds=0.1, silence_seconds=1.5, stop_seconds=0.5)
    found = scene.run({3: silence}, deadlines=quick)
    assert_same(found, undisturbed)
    assert scene.told == [("lost", "right"), ("restored", "right")]


def test_one_that_nobody_can_dial_joins_again_when_its_broken_connection_is_given_up(
    scene: Scene, undisturbed: TinyModule
) -> None:
    """As behind a router that lets nothing in."""
    scene.start("left")
    scene.start("right")

    def unreachable(_attempt: int, _received: int) -> Any:
        raise WorkerUnreachable("No way leads there.")

    def break_connection() -> None:
        assert scene.strategy is not None
        assert scene.strategy.deployment is not None
        right = scene.strategy.deployment.coordinator.connections.named("right")
        line = right.channel.line
        assert line.lingering is not None
        line.lingering = replace(line.lingering, redial=unreachable)
        line.connection.shut_down()

    assert_same(scene.run({3: break_connection}, linger_seconds=1.0), undisturbed)
    assert scene.told == [("lost", "right"), ("restored", "right")]
