"""The worker's command, and the processes that it forks, on a device that torch loads by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_hetero import HeteroPipelineStrategy

from ..conftest import worker_process
from ..models import fit
from ..pairwise import repeats
from .autoload import autoloading
from .process import on_fake_device
from .scenes import NUM_LAYERS, Found, Module, differing, line, on, result_of


@pytest.fixture
def commanded_worker(fake_device: str, tmp_path: Path) -> Iterator[str]:
    """The address of a worker by its command on ``fake:1``."""
    environment = autoloading(fake_device, tmp_path)
    with worker_process(by_command=True, device="fake:1", **environment) as worker:
        yield worker.address


@repeats(
    "fake_device/test_pipeline.py::test_streams_change_no_bit",
    "worker/test_supervisor.py::test_the_device_is_looked_at_once_and_later_sessions_answer_alike",
)
@on_fake_device
def test_sessions_of_a_worker_by_its_command_have_the_bits_of_one_that_never_forks(
    commanded_worker: str, first_worker: str, second_worker: str
) -> None:
    def run(*workers: str) -> Found:
        strategy = HeteroPipelineStrategy(list(workers), line(workers))
        return result_of(fit(Module(NUM_LAYERS, attention_dropout=0.3), strategy, **on("fake:0")))

    expected = run(second_worker, first_worker)
    for _ in range(2):  # the second session has what the first one has found
        assert differing(run(commanded_worker, first_worker), expected) == []
