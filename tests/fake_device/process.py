"""Processes with the fake device: a test's own one, and workers.

A process that has loaded the device keeps it, so each test runs in a forked one:

    @on_fake_device
    def test_something(workers: list[str]) -> None: ...

The fixtures and parameters of such a test go to the process as JSON.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.worker.worker import Worker

from ..forked import running_script
from . import faults, load

PATIENCE_SECONDS = 90.0
_PRELUDE = "from tests.fake_device.process import {0}; {0}()"


def on_fake_device(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process of its own with the fake device, and raise what it raises."""

    @functools.wraps(test)
    def run(fake_device: str, **arguments: Any) -> None:
        told = [fake_device, test.__module__, test.__name__, json.dumps(arguments)]
        with running_script(_PRELUDE.format("run_test"), *told) as process:
            _, errors = process.communicate(PATIENCE_SECONDS)
            assert process.returncode == 0, errors[-6000:]

    del run.__wrapped__  # type: ignore[attr-defined]  # pytest must see the fixture
    parameters = [
        inspect.Parameter("fake_device", inspect.Parameter.KEYWORD_ONLY),
        *(p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(test).parameters.values()),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.original = test  # type: ignore[attr-defined]
    return run


def run_test() -> None:
    """Run the test that the command line names, and end the process."""
    library, module, name, told = sys.argv[1:]
    torch.set_num_threads(1)
    load(library)
    try:
        getattr(importlib.import_module(module), name).original(**json.loads(told))
        assert faults() == []
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # Not by `sys.exit`: autograd's threads may drop Python objects after the interpreter's end.
    os._exit(0)


@contextmanager
def fake_worker(library: str, device: str, before: str = "") -> Iterator[str]:
    """A worker on a fake device in a process of its own; yields its address.

    Args:
        library: The compiled device.
        device: The device.
        before: Code that the process runs before the worker.
    """
    source = f"{before}\n{_PRELUDE.format('serve')}"
    with running_script(source, library, device) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, process.communicate(PATIENCE_SECONDS)[1]
        yield f"127.0.0.1:{port}"


def serve() -> None:
    """Serve one session after the other on the device that the command line names."""
    library, device = sys.argv[1:]
    torch.set_num_threads(1)
    load(library)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    Worker(listener, torch.device(device), Deadlines()).serve_forever()
