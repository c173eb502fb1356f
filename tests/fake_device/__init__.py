"""A fake accelerator, for tests of what only a device with streams can break.

`device.cpp` is its backend in torch. A process that calls `load` has two devices, ``fake:0`` and
``fake:1``. They compute with the processor, in main memory. Their streams do as little as they may,
so a missing wait is an error or a wrong number every time.

A process must call `load` before its first backward, and cannot undo it. So tests run in processes
of their own: see `process.py`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KIND = "fake"
NUM_DEVICES = 2
COMPILERS = ("c++", "g++", "clang++")

_SOURCE = Path(__file__).with_name("device.cpp")


def compiler() -> str | None:
    """The C++ compiler of this machine; None if there is none."""
    named = [os.environ.get("CXX"), *COMPILERS]
    return next((found for name in named if name and (found := shutil.which(name))), None)


def build(folder: Path) -> Path:
    """Compile the backend into a folder, unless another process has done so; return its path.

    Raises:
        RuntimeError: If the compiler refuses it, with what the compiler says.
    """
    library = folder / "fake_device.so"
    with _locked(folder / "fake_device.lock"):
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            done = subprocess.run(_command(unfinished), capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"The fake device cannot be compiled: {done.stderr[-4000:]}.")
            unfinished.rename(library)
    return library


def _command(output: Path) -> list[str]:
    torch_folder = Path(torch.__file__).parent
    headers = torch_folder / "include"
    return [
        compiler() or COMPILERS[0],
        *("-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-o", str(output), str(_SOURCE)),
        *(f"-I{headers}", f"-I{headers}/torch/csrc/api/include", f"-L{torch_folder}/lib"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *("-lc10", "-ltorch_cpu"),
    ]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def load(library: str) -> None:
    """Make the fake device this process's accelerator, as `torch.fake`.

    Args:
        library: The path that `build` has returned.
    """
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, _module())  # type: ignore[no-untyped-call]


def waits() -> Mapping[str, int]:
    """How often each thread that lives has waited for a device, by its name."""
    found = _ops().waits()
    counts = dict(zip(found[::2], found[1::2], strict=True))
    named: dict[str, int] = {}
    for thread in threading.enumerate():
        if thread.native_id in counts:
            named[thread.name] = named.get(thread.name, 0) + counts[thread.native_id]
    return named


def waits_of_computing() -> int:
    """How often all threads have waited for a device, without those that write to channels."""
    senders = [count for name, count in waits().items() if name.startswith("write ")]
    return sum(_ops().waits()[1::2]) - sum(senders)


def waits_here() -> int:
    """How often the calling thread has waited for a device."""
    found = _ops().waits()
    counts = dict(zip(found[::2], found[1::2], strict=True))
    return int(counts.get(threading.get_native_id(), 0))


def faults() -> list[str]:
    """Memory that was freed too early. The next kernel raises such a fault, too."""
    return list(_ops().faults())


def num_queued() -> int:
    """How many copies, marks and waits no stream has come to."""
    return int(_ops().num_queued())


def reset() -> None:
    """Forget waits and faults."""
    _ops().reset()


def _ops() -> Any:
    return torch.ops.fake_device


def _module() -> types.ModuleType:
    """What torch and Lightning ask of the module of a kind of device."""
    module = types.ModuleType("torch.fake")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: bool(_ops().is_initialized()),
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: NUM_DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "synchronize": torch.accelerator.synchronize,
        "current_stream": torch.accelerator.current_stream,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": _rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": lambda seed: _ops().manual_seed(
            torch.accelerator.current_device_index(), seed
        ),
        "manual_seed_all": lambda seed: [_ops().manual_seed(n, seed) for n in range(NUM_DEVICES)],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def _index(device: Any) -> int:
    found = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if found is None else found


def _rng_state(device: Any = KIND) -> Tensor:
    state: Tensor = _ops().get_rng_state(_index(device))
    return state


def _set_rng_state(state: Tensor, device: Any = KIND) -> None:
    _ops().set_rng_state(_index(device), state)
