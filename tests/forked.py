"""Workers forked from a process that has already imported everything.

A worker that is started by its command spends seconds of a core on its imports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import IO, Protocol

from lightning_hetero import cli

# On other systems some libraries do not survive a fork.
CAN_FORK = sys.platform == "linux"
# What a worker imports when it gets its first layers: their class, adapters, four bits.
NEEDED_BY_LAYERS = ("transformers.models.llama.modeling_llama", "peft", "bitsandbytes")


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

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def forked_worker(
    options: Sequence[str], before: str, environment: Mapping[str, str]
) -> Iterator[tuple[Forked, IO[str]]]:
    """Run `lightning-hetero worker` with these options; yield its process and its log lines.

    The end of the block ends the process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_hetero.cli", *NEEDED_BY_LAYERS, "tests.warm"])
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = context.Process(
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
    os.environ.update(environment)
    sys.argv = ["lightning-hetero", "worker", *options]
    exec(before, {})  # noqa: S102 - of the test
    cli.main()
