"""Losses and broken connections on devices with streams change no bit either."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy, Recovery, RecoveryCallback

from ..models import fit, loader
from ..pairwise import keeping
from .process import fake_worker, on_fake_device, restarting_fake_worker, wait_for_copies
from .scenes import BATCH_SIZE, NUM_LAYERS, Found, Module, differing, line, on, result_of

NUM_STEPS = 5
# A worker: its address, and the process above those that serve.
Told = tuple[str, int]


@pytest.fixture
def mortal_workers(fake_device: str, devices: Sequence[str]) -> Iterator[list[Told]]:
    """Workers on these devices that may be killed."""
    with ExitStack() as exits:
        yield [exits.enter_context(restarting_fake_worker(fake_device, name)) for name in devices]


@pytest.fixture
def plain_workers_on(fake_device: str, devices: Sequence[str]) -> Iterator[list[str]]:
    """The addresses of workers on the same devices that wait for every copy."""
    before = "from tests.fake_device.process import wait_for_copies; wait_for_copies()"
    with ExitStack() as exits:
        yield [exits.enter_context(fake_worker(fake_device, name, before)) for name in devices[:2]]


class Acting(RecoveryCallback):
    """Calls a function in the middle of the step of that number, and notes what it is told."""

    def __init__(self, inside: Mapping[int, Callable[[], None]]) -> None:
        self.inside = dict(inside)
        self.told: list[tuple[str, str]] = []
        self.strategy: Any = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.strategy = trainer.strategy

    def cut(self) -> None:
        """Break the connections to all workers."""
        for worker in self.strategy.deployment.coordinator.connections.members:
            worker.channel.line.connection.shut_down()

    def on_worker_lost(self, trainer: Any, name: str, step: int) -> None:
        self.told.append(("lost", name))

    def on_worker_restored(self, trainer: Any, name: str, step: int, seconds: float) -> None:
        self.told.append(("restored", name))


class Disturbed(Module):
    """Something happens while micro-batches are under way."""

    def __init__(self, acting: Acting) -> None:
        super().__init__(NUM_LAYERS, attention_dropout=0.3)
        self.acting = acting
        self.calls = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.calls += 1
        if self.calls % 3 == 2:  # the others are in the stages
            self.acting.inside.pop(batch_idx, lambda: None)()
        return loss


def run(names: Sequence[str], device: str, acting: Acting, wait_seconds: float = 30.0) -> Found:
    """Dropout, recomputation, narrowed boundaries and clipping, with a snapshot at each step."""
    narrow = {"activation_dtype": "bfloat16", "gradient_dtype": "bfloat16"}
    with TemporaryDirectory() as folder:
        settings = Recovery(folder=folder, every_seconds=0.0, wait_seconds=wait_seconds)
        plan = line(names, recompute=True, **narrow)
        strategy = HeteroPipelineStrategy(list(names), plan, recovery=settings)
        options = {"gradient_clip_val": 0.5, "callbacks": [acting], **on(device)}
        data = loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE, padded=True)
        return result_of(fit(Disturbed(acting), strategy, data, **options))


def kill_session(worker: Told) -> None:
    for session in psutil.Process(worker[1]).children():
        session.kill()


def kill_all(worker: Told) -> None:
    os.kill(worker[1], signal.SIGKILL)


# By name: the device of the coordinator, those of two workers, and that of a spare for the second.
CASES = {
    "fake + fake": ("fake:1", ["fake:0", "fake:1", "fake:0"]),
    "fake + cpu": ("fake:0", ["cpu", "fake:1", "fake:0"]),
    "cpu + fake": ("cpu", ["fake:0", "cpu", "cpu"]),
}


@pytest.mark.parametrize(
    ("own", "devices"), keeping([CASES["fake + cpu"]], CASES.values()), ids=CASES
)
@on_fake_device
def test_a_broken_connection_a_killed_process_and_a_spare(
    own: str, devices: list[str], mortal_workers: list[Told], plain_workers_on: list[str]
) -> None:
    names = [address for address, _ in mortal_workers]
    wait_for_copies()
    expected = run(plain_workers_on, own, Acting({}))
    wait_for_copies(False)
    first, second, _spare = mortal_workers
    acting = Acting({})
    acting.inside = {
        1: acting.cut,
        2: lambda: kill_session(first),
        3: lambda: kill_session(second),
    }
    found = run(names, own, acting)
    assert differing(found, expected) == []
    lost = [names[0], names[1]]
    assert [name for kind, name in acting.told if kind == "lost"] == lost
    assert sorted(name for kind, name in acting.told if kind == "restored") == sorted(lost)
    found = run(names, own, Acting({2: lambda: kill_all(second)}), wait_seconds=0.5)
    assert differing(found, expected) == []
