"""Workers that many tests share, and one compute thread for all."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import IO, Any

import hypothesis
import psutil
import pytest
import torch
from lightning.fabric.utilities import registry

from lightning_hetero.transport.token import FILE_VARIABLE

from .forked import CAN_FORK, Process, forked_worker
from .tiers import is_of_second_tier
from .transport.pairs import PATIENCE_SECONDS

# The user's own token must not change the tests; workers inherit this variable.
os.environ[FILE_VARIABLE] = ""

# `make test` runs on processors; this runs the same tests with workers on another device.
WORKER_DEVICE = os.environ.get("TEST_WORKER_DEVICE", "cpu")

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("steady", deadline=None)
hypothesis.settings.load_profile("steady")


@dataclass(frozen=True)
class WorkerProcess:
    """A worker in a process of its own."""

    address: str
    process: Process

    @property
    def session(self) -> psutil.Process:
        """The process that serves the present session, or will serve the next one."""
        return max(self.children(), key=lambda child: float(child.create_time()))

    def children(self) -> list[psutil.Process]:
        """The processes of its sessions, and those that ended and that it has not buried yet."""
        return psutil.Process(self.process.pid).children()

    def await_children(self, count: int) -> None:
        """Wait until only so many are left and the others are buried."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(found := self.children()) > count:
            assert time.monotonic() < deadline, found
            # No event tells a stranger of a burial.
            time.sleep(0.01)


@contextmanager
def worker_process(
    *options: str,
    before: str = "",
    prefix: Sequence[str] = (),
    by_command: bool = False,
    device: str = WORKER_DEVICE,
    **environment: str,
) -> Iterator[WorkerProcess]:
    """A worker on a free loopback port; the end of the block ends it.

    Its process is forked if that is possible. It is started by the command if ``by_command`` is
    true, a ``prefix`` is given, or the device is no processor, which may not survive a fork.

    Args:
        options: Options of the command.
        before: Code that the process runs before the worker.
        prefix: Words in front of the command, such as a program that limits the memory.
        by_command: Start the worker by its command.
        device: What computes its layers.
        environment: Variables of the process.
    """
    options = ("--listen", "127.0.0.1:0", "--threads", "1", "--device", device, *options)
    environment = {**os.environ, **environment}
    by_command = by_command or bool(prefix) or not CAN_FORK or device != "cpu"
    started = (
        _commanded(prefix, options, before, environment)
        if by_command
        else forked_worker(options, before, environment)
    )
    with started as (process, said):
        lines = []
        for line in said:
            lines.append(line)
            if "listening on" in line:
                # The pipe is read on: a worker blocks when the pipe is full.
                reader = threading.Thread(target=said.read, daemon=True)
                reader.start()
                yield WorkerProcess(line.split("listening on ")[1].split(",")[0], process)
                break
        else:
            pytest.fail("the worker did not start: " + "".join(lines))


@contextmanager
def _commanded(
    prefix: Sequence[str], options: Sequence[str], before: str, environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    command = [sys.executable, "-m", "lightning_hetero", "worker", *options]
    if before:
        main = "import runpy; runpy.run_module('lightning_hetero', run_name='__main__')"
        command = [sys.executable, "-c", f"{before}\n{main}", "worker", *options]
    process = subprocess.Popen(
        [*prefix, *command], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr is not None
    try:
        yield process, process.stderr
    finally:
        process.kill()
        process.wait()


# Their files run first, so that no process of the tests is busy long after the others.
_FOLDERS_WITH_LONG_FILES = ("integration", "profiler", "verify", "worker")


# Before pytest leaves out what `-m` does not name.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the folders by how long their files take, and mark what is of the second tier."""
    for item in filter(is_of_second_tier, items):
        item.add_marker(pytest.mark.exhaustive)
    items.sort(key=lambda item: item.path.parent.name not in _FOLDERS_WITH_LONG_FILES)


def pytest_collection_finish() -> None:
    """Spare the garbage collector of each test what was imported, which is never garbage, and let
    it look less often: a run of a test makes thousands of objects that live as long as the run."""
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of this session, so that tests leave the user's profiles alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_look_at_packages() -> Iterator[None]:
    """Each Trainer reads what every installed package offers, a tenth of a short training on one
    device. No package comes or goes meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", cache(entry_points))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """One thread adds in the same order in every process, and leaves cores to the others."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def worker_processes() -> Iterator[list[WorkerProcess]]:
    """Three workers that serve one test after the other, as long-lived workers do."""
    with worker_process() as first, worker_process() as second, worker_process() as third:
        yield [first, second, third]


@pytest.fixture
def workers(worker_processes: list[WorkerProcess]) -> list[str]:
    """The addresses of the shared workers, which must all be alive."""
    assert all(worker.process.poll() is None for worker in worker_processes)
    return [worker.address for worker in worker_processes]


# What a test says that is skipped for want of a program. The continuous build installs them all.
_WANTS = (
    "Chromium, which is not installed",
    "no sshd is installed",
    "iproute2 and util-linux are not installed",
    "wireguard-tools and wireguard-go are not installed",
    "there is no systemd here",
    "C++ compiler",
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Let a test that lacks a program fail where `TESTS_HAVE_PROGRAMS` is set."""
    report: Any = yield
    if os.environ.get("TESTS_HAVE_PROGRAMS") and report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2])
        if any(want in reason for want in _WANTS):
            report.outcome = "failed"
            report.longrepr = f"This machine should have what the test needs. {reason}"
    return report
