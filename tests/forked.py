"""Workers and scripts forked from a process that has already imported everything.

A process that is started by its command spends seconds of a core on its imports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import IO, Any, Protocol

import pytest

from lightning_hetero import cli

# On other systems some libraries do not survive a fork.
CAN_FORK = sys.platform == "linux"
# What a worker imports when it gets its first layers: their class, adapters, four bits.
NEEDED_BY_LAYERS = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "peft.tuners.lora.bnb",
    "bitsandbytes",
    "torch.profiler._cupti_monitor",
    "encodings.idna",  # of the first connection that a session makes
)
# What modules of tests import that have layers of their own.
NEEDED_BY_TESTS = (
    "lightning.pytorch",
    "torchmetrics.classification",
    "hypothesis",
    "pytest",
    "lightning_hetero.strategy.strategy",
    "tests.along_layers",
)


class Process(Protocol):
    """What tests need of a worker's process: the part of `subprocess.Popen` that `Forked` has."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


class Forked:
    """A process of `multiprocessing` with the interface of `subprocess.Popen`."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"Process {self.pid} has not ended within {timeout} s.")
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class ForkedScript(Forked):
    """A forked process with pipes, and with the interface of `subprocess.Popen`.

    Args:
        process: The process, which has the other ends of the pipes.
        pipes: The pipes of its standard input, output and error.
    """

    def __init__(
        self, process: ForkServerProcess, pipes: tuple[Connection, Connection, Connection]
    ) -> None:
        super().__init__(process)
        self.stdin = _opened(pipes[0], "w")
        self.stdout, self.stderr = (_opened(pipe, "r") for pipe in pipes[1:])

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Close the input and wait for the end; returns what the process still said.

        Raises:
            TimeoutError: If the process has not ended after so many seconds. It is killed.
        """
        self.stdin.close()
        with ThreadPoolExecutor(2) as pool:
            output, errors = pool.submit(self.stdout.read), pool.submit(self.stderr.read)
            try:
                self.wait(timeout)
            except TimeoutError:
                self.kill()
                raise
            return output.result(), errors.result()

    def close(self) -> None:
        """End the process and close the pipes."""
        self.kill()
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()


Script = ForkedScript | subprocess.Popen[str]


@contextmanager
def running_script(source: str, *arguments: str) -> Iterator[Script]:
    """Run a script in a process of its own with three pipes; the end of the block ends it.

    The process is forked if that is possible, so this is for tests whose point is not a fresh
    interpreter. The script finds the modules of the tests, and ``sys.argv`` as after ``python -c``.
    """
    if not CAN_FORK:
        command = [sys.executable, "-c", source, *arguments]
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        root = Path(__file__).parents[1]
        with subprocess.Popen(command, cwd=root, text=True, **pipes) as process:
            try:
                yield process
            finally:
                process.kill()
        return
    context = _warm_context()
    its_input, our_input = multiprocessing.Pipe(duplex=False)
    our_output, its_output = multiprocessing.Pipe(duplex=False)
    our_errors, its_errors = multiprocessing.Pipe(duplex=False)
    its_pipes = (its_input, its_output, its_errors)
    forked = context.Process(target=_run, args=(its_pipes, source, arguments), daemon=True)
    forked.start()
    for pipe in its_pipes:
        pipe.close()
    script = ForkedScript(forked, (our_input, our_output, our_errors))
    try:
        yield script
    finally:
        script.close()


def _run(pipes: tuple[Connection, ...], source: str, arguments: tuple[str, ...]) -> None:
    for descriptor, pipe in enumerate(pipes):
        os.dup2(pipe.fileno(), descriptor)
        pipe.close()
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-c", *arguments]
    # The main module of this process is that of the tests.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(source, vars(main))  # noqa: S102 - of the test


def _opened(pipe: Connection, mode: str) -> IO[str]:
    """A text stream that outlives the connection, which is closed."""
    with pipe:
        return open(os.dup(pipe.fileno()), mode, encoding="utf-8")


def _warm_context() -> ForkServerContext:
    """Forks from a process that has imported what workers and their layers need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["lightning_hetero.cli", *NEEDED_BY_LAYERS, *NEEDED_BY_TESTS, "tests.warm"]
    )
    # An import that looks for a GPU would make CUDA fail in all forked processes.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        forkserver.ensure_running()
    return context


@contextmanager
def forked_worker(
    options: Sequence[str], before: str, environment: Mapping[str, str]
) -> Iterator[tuple[Forked, IO[str]]]:
    """Run `lightning-hetero worker` with these options; yield its process and its log lines.

    The end of the block ends the process.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = _warm_context().Process(
        target=_serve, args=(theirs, list(options), before, dict(environment)), daemon=True
    )
    process.start()
    theirs.close()
    # Left open: a thread may still read the last lines.
    said = open(os.dup(ours.fileno()), encoding="utf-8")  # noqa: SIM115
    ours.close()
    try:
        yield Forked(process), said
    finally:
        process.kill()
        process.join()


def _serve(said: Connection, options: list[str], before: str, environment: dict[str, str]) -> None:
    os.dup2(said.fileno(), sys.stderr.fileno())
    said.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    # As in the process from which this one is forked: CUDA keeps what it saw there.
    os.environ.update(environment, CUDA_VISIBLE_DEVICES="")
    sys.argv = ["lightning-hetero", "worker", *options]
    exec(before, {})  # noqa: S102 - of the test
    cli.main()
