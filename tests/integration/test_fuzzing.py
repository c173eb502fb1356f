"""Mutated frames and conversations: a small part of what `make fuzz` tries."""

from __future__ import annotations

import pytest

from lightning_hetero import HeteroPipelineStrategy

from ..conftest import WorkerProcess
from ..fuzz.main import fuzz_decoder, fuzz_door, fuzz_worker
from ..fuzz.recording import RecordedFrame, record
from ..fuzz.targets import LiveWorker, fuzzed_door
from ..models import TinyModule, loader, trainer

_MOST_GROWTH_BYTES = 256 * 2**20


@pytest.fixture(scope="module")
def frames(worker_processes: list[WorkerProcess]) -> list[RecordedFrame]:
    return record(worker_processes[2].address)


def test_the_recording_holds_all_of_a_run(frames: list[RecordedFrame]) -> None:
    kinds = {frame.kind for frame in frames}
    assert kinds > {"Hello", "Deploy", "LoadTensor", "Activation", "Gradient", "ApplyOptimizer"}


def test_mutated_frames_are_read_or_refused(frames: list[RecordedFrame]) -> None:
    found = fuzz_decoder(frames, 3000, seed=1)
    assert found["refused"] > 1000
    assert found["read"] > 100


def test_a_worker_hears_mutated_conversations_and_then_serves(
    frames: list[RecordedFrame], worker_processes: list[WorkerProcess]
) -> None:
    worker = worker_processes[2]
    live = LiveWorker(worker.address, worker.process.pid)
    before = live.memory_bytes()
    fuzz_worker(frames, live, 30, seed=1)
    assert len(live.answers) > 1
    assert live.memory_bytes() - before < _MOST_GROWTH_BYTES
    module = TinyModule()
    trainer(HeteroPipelineStrategy([worker.address], "even"), max_steps=1).fit(
        module, loader(12, 12)
    )
    assert len(module.losses) == 1


def test_a_door_hears_mutated_hellos_and_lets_an_honest_worker_in(
    frames: list[RecordedFrame],
) -> None:
    with fuzzed_door() as door:
        fuzz_door(frames, door, 300, seed=1)
    assert door.answers.keys() >= {"Welcome", "Failure", "nothing"}
