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
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.llama.modeling_llama import LlamaMLP

from lightning_hetero.devices.copies import PlainCopies
from lightning_hetero.devices.device import Accelerator
from lightning_hetero.protocol import tensor_bytes
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.worker.supervisor import _end_with_parent
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
    _prepare(library)
    try:
        getattr(importlib.import_module(module), name).original(**json.loads(told))
        assert faults() == []
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # Not by `sys.exit`: autograd's threads may drop Python objects after the interpreter's end.
    os._exit(0)


def _prepare(library: str) -> None:
    torch.set_num_threads(1)
    # The tensors of tests are small, and go through the kept buffers of large ones all the same.
    tensor_bytes.SMALLEST_KEPT_BYTES = 64
    # The processor takes minutes for large products in half precision.
    Accelerator.trial_size = 64
    load(library)


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
    _prepare(library)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    Worker(listener, torch.device(device), Deadlines()).serve_forever()


@contextmanager
def restarting_fake_worker(library: str, device: str) -> Iterator[tuple[str, int]]:
    """A worker whose process may be killed, as another one then takes its place.

    Yields:
        Its address, and the process above those that serve.
    """
    with running_script(_PRELUDE.format("serve_again_and_again"), library, device) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, process.communicate(PATIENCE_SECONDS)[1]
        yield f"127.0.0.1:{port}", process.pid


def serve_again_and_again() -> None:
    """Serve in one process after the other, of which each may be killed."""
    library, device = sys.argv[1:]
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        pid = os.fork()
        if pid == 0:
            _end_with_parent()
            _prepare(library)
            Worker(listener, torch.device(device), Deadlines()).serve_forever()
        os.waitpid(pid, 0)


def wait_for_copies(is_wanted: bool = True) -> None:
    """Make new copies of this process plain ones, which are finished when the call returns."""
    copies = PlainCopies if is_wanted else None
    Accelerator.copies = (  # type: ignore[method-assign]
        _COPIES if copies is None else lambda self: copies(self.torch_device)
    )


_COPIES = Accelerator.copies


def use_current_device() -> None:
    """Let layers of this process make a tensor on the thread's current device.

    Kernels of other people do so: they are launched on the current device, wherever their tensors
    are.
    """

    def times_one(module: nn.Module, _inputs: object, output: Any) -> Any:
        is_made = isinstance(module, LlamaMLP)
        return output * torch.ones((), device=output.device.type) if is_made else None

    # The code of layers is compared with the coordinator's, so it stays as it is.
    register_module_forward_hook(times_one)
