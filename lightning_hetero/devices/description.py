"""The description of a device: equipment for a handshake, memory and dtypes for a profile."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import statistics
import sysconfig
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
import transformers
from transformers.utils.import_utils import is_flash_attn_2_available

from ..errors import HeteroError
from ..plan import Dtype
from ..protocol.messages import DeviceDescribed, Equipment
from ..protocol.tensor_bytes import dtype_name
from ..version import __version__
from .device import Device, backends, device_for

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_STORED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_OPTIONAL_LIBRARIES = ("peft", "bitsandbytes")

# If a device multiplies so many times slower in a dtype than in float32, the dtype is useless
# there.
_ABSURDLY_SLOWER = 4.0
_CANDIDATES: tuple[Dtype, ...] = ("bfloat16", "float16")


def equipment_here(torch_device: torch.device) -> Equipment:
    """The equipment of this process for computing on a device."""
    device, versions = device_for(torch_device), _versions()
    return Equipment(
        versions=versions,
        device=str(torch_device),
        device_name=device.name,
        memory_bytes=device.total_bytes(),
        dtypes=[
            *(dtype_name(dtype) for dtype in _DTYPES if _computes_in(torch_device, dtype)),
            *(dtype_name(dtype) for dtype in _STORED_DTYPES if _stores(torch_device, dtype)),
        ],
        capabilities=_capabilities(device, versions),
        host=platform.node(),
        machine=_machine(),
    )


def _versions() -> dict[str, str]:
    found: dict[str, str | None] = {
        "lightning-hetero": __version__,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for backend in backends().values():
        found.update(backend.versions())
    found["transformers"] = transformers.__version__
    found.update({name: _version_of(name) for name in _OPTIONAL_LIBRARIES})
    return {name: version for name, version in found.items() if version}


def _version_of(library: str) -> str | None:
    """The version of a library, without the import, which may take seconds."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _stores(torch_device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device holds tensors of a dtype, and casts them to its dtype of computation."""
    try:
        return bool(torch.ones(2, device=torch_device).to(dtype).float().sum() == 2)
    except (RuntimeError, TypeError):
        return False


def _computes_in(torch_device: torch.device, dtype: torch.dtype) -> bool:
    try:
        square = torch.ones(2, 2, dtype=dtype, device=torch_device)
        return bool((square @ square).sum() == 8)
    except (RuntimeError, TypeError):
        return False


def _capabilities(device: Device, versions: dict[str, str]) -> list[str]:
    found = {
        "sdpa": True,
        "flash_attention_2": device.has_flash_attention and is_flash_attn_2_available(),
        "nf4": "bitsandbytes" in versions,
        "compile": _compiles(device),
    }
    return [name for name, is_there in found.items() if is_there]


def _compiles(device: Device) -> bool:
    """Whether `torch.compile` finds Python's headers, a C++ compiler, and triton if it needs it."""
    if not os.path.exists(Path(sysconfig.get_path("include"), "Python.h")):
        return False
    compilers = (os.environ.get("CXX"), "c++", "g++", "clang++")
    has_compiler = any(shutil.which(name) for name in compilers if name)
    has_triton = importlib.util.find_spec("triton") is not None
    return has_compiler and (has_triton or not device.needs_triton)


def describe_device(torch_device: torch.device) -> DeviceDescribed:
    """Describe a device for this process; multiplies for a moment to try dtypes."""
    device = device_for(torch_device)
    library_bytes = device.library_bytes()
    free_bytes, base_bytes = device.free_and_base_bytes()
    return DeviceDescribed(
        device.title,
        f"{_machine()}/{device.memory_name}",
        max(0, free_bytes - library_bytes),
        base_bytes + library_bytes,
        ["float32", *(dtype for dtype in _CANDIDATES if _is_useful(device, dtype))],
        _versions(),
    )


def _machine() -> str:
    """A common name of all processes on this machine, unique among machines."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _is_useful(device: Device, dtype: Dtype) -> bool:
    try:
        seconds = _multiply_seconds(device, getattr(torch, dtype))
    except RuntimeError:
        return False
    return seconds < _ABSURDLY_SLOWER * _multiply_seconds(device, torch.float32)


def _multiply_seconds(device: Device, dtype: torch.dtype) -> float:
    size = device.trial_size
    matrix = torch.ones(size, size, device=device.torch_device, dtype=dtype)

    def run() -> float:
        device.synchronize()
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        device.synchronize()
        return time.perf_counter() - start

    run()
    return statistics.median(run() for _ in range(3))


def accelerators_here() -> list[str]:
    """The names of this machine's accelerators."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return []
    return [f"{found.type}:{number}" for number in range(torch.accelerator.device_count())]


def named_device(name: str) -> torch.device:
    """The device of a name, after a test.

    Args:
        name: A device of torch, or ``"auto"`` for the first accelerator, else the processor.

    Raises:
        HeteroError: If this machine does not have the device.
    """
    here = ["cpu", *accelerators_here()]
    if name == "auto":
        name = here[:2][-1]
    try:
        device = torch.device(name)
        # Allocation works without a kernel, and torch may lack kernels for an old or new GPU.
        torch.ones(1, device=device).add_(1).tolist()
    except (RuntimeError, AssertionError) as error:
        raise HeteroError(_why_not(name, here, error)) from error
    return device


def _why_not(name: str, here: Sequence[str], error: BaseException) -> str:
    """Why torch does not compute on a device, given the devices here."""
    said = str(error).partition("\n")[0].rstrip(".")
    if name not in here and f"{name}:0" not in here:
        return f"The device {name!r} cannot be used here; this machine has {', '.join(here)}."
    return (
        f"The device {name!r} is here, and torch {torch.__version__} cannot compute on it: {said}. "
        "Install a build of torch for this device, or use another one, such as `--device cpu`."
    )
