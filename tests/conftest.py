"""Workers that many tests share, and one compute thread for all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import hypothesis
import pytest
import torch

from lightning_hetero.runtime.channels.token import FILE_VARIABLE

# A token of whoever runs the tests must not change them; workers inherit this.
os.environ[FILE_VARIABLE] = ""

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("steady", deadline=None)
hypothesis.settings.load_profile("steady")


@dataclass(frozen=True)
class WorkerProcess:
    """A worker started by its command."""

    address: str
    process: subprocess.Popen[str]


@contextmanager
def worker_process(
    *options: str, before: str = "", prefix: Sequence[str] = (), **environment: str
) -> Iterator[WorkerProcess]:
    """A worker on a free loopback port; it ends with the block.

    ``before`` is code that its process runs first, and ``prefix`` what goes before its command.
    """
    command = [sys.executable, "-m", "lightning_hetero", "worker"]
    if before:
        main = "import runpy; runpy.run_module('lightning_hetero', run_name='__main__')"
        command = [sys.executable, "-c", f"{before}; {main}", "worker"]
    command += ["--listen", "127.0.0.1:0", "--threads", "1", "--device", "cpu", *options]
    process = subprocess.Popen(
        [*prefix, *command], stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "listening on" in line:
                # Somebody has to read on: with a full pipe the worker would wait for ever.
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield WorkerProcess(line.split("listening on ")[1].split(",")[0], process)
                break
        else:
            pytest.fail("the worker did not start: " + "".join(lines))
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test measures stays with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums come in the same order everywhere, and two cores are enough for all processes."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def worker_processes() -> Iterator[list[WorkerProcess]]:
    """Three workers that serve one test after the other, as long-lived workers do."""
    with worker_process() as first, worker_process() as second, worker_process() as third:
        yield [first, second, third]


@pytest.fixture
def workers(worker_processes: list[WorkerProcess]) -> list[str]:
    """Their addresses; all of them must be alive."""
    assert all(worker.process.poll() is None for worker in worker_processes)
    return [worker.address for worker in worker_processes]
