"""What this process runs on, as it tells whoever it talks to."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

import torch
import transformers
from transformers.utils.import_utils import is_flash_attn_2_available

from ..protocol.messages import Equipment
from ..protocol.tensors import dtype_name
from ..version import __version__

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_OPTIONAL_LIBRARIES = ("peft", "bitsandbytes")


def equipment_here(device: torch.device) -> Equipment:
    """The equipment of this process, if it computes on the device."""
    versions = _versions()
    return Equipment(
        versions=versions,
        device=str(device),
        device_name=_device_name(device),
        memory_bytes=_memory_bytes(device),
        dtypes=[dtype_name(dtype) for dtype in _DTYPES if _computes_in(device, dtype)],
        capabilities=_capabilities(device, versions),
    )


def _versions() -> dict[str, str]:
    found: dict[str, str | None] = {
        "lightning-hetero": __version__,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "transformers": transformers.__version__,
        **{name: _version_of(name) for name in _OPTIONAL_LIBRARIES},
    }
    return {name: version for name, version in found.items() if version}


def _version_of(library: str) -> str | None:
    """Without importing it, which may take seconds."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return _processor()
    library = getattr(torch, device.type)
    if hasattr(library, "get_device_name"):
        return str(library.get_device_name(device))
    return f"{device.type} of {_processor()}"


def _processor() -> str:
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def _computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        square = torch.ones(2, 2, dtype=dtype, device=device)
        return bool((square @ square).sum() == 8)
    except (RuntimeError, TypeError):
        return False


def _capabilities(device: torch.device, versions: dict[str, str]) -> list[str]:
    is_gpu = device.type != "cpu"
    found = {
        "sdpa": True,
        "flash_attention_2": is_gpu and is_flash_attn_2_available(),
        "nf4": "bitsandbytes" in versions,
        "compile": _compiles(device),
    }
    return [name for name, is_there in found.items() if is_there]


def _compiles(device: torch.device) -> bool:
    """Whether `torch.compile` finds what it makes programs with: all of it wants Python's headers,
    and a GPU also triton."""
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return False
    compilers = (os.environ.get("CXX"), "c++", "g++", "clang++")
    has_compiler = any(shutil.which(name) for name in compilers if name)
    is_gpu = device.type != "cpu"
    return has_compiler and (not is_gpu or importlib.util.find_spec("triton") is not None)
