"""The description of the devices of this machine."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import pytest
import torch

from lightning_hetero import __version__
from lightning_hetero.devices.description import _compiles, equipment_here
from lightning_hetero.devices.device import device_for

CPU = torch.device("cpu")


def test_a_cpu_tells_versions_memory_and_abilities() -> None:
    found = equipment_here(CPU)
    assert found.device == "cpu"
    assert found.versions["lightning-hetero"] == __version__
    assert found.versions["Python"] == platform.python_version()
    assert found.versions["torch"] == torch.__version__
    assert found.versions["peft"] == metadata.version("peft")
    assert "ROCm" not in found.versions or torch.version.hip
    assert found.memory_bytes > 2**28
    assert {"float32", "float64"} <= set(found.dtypes)
    assert {"sdpa", "nf4"} <= set(found.capabilities)
    assert "flash_attention_2" not in found.capabilities


def test_headers_that_this_user_may_not_see_compile_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbid(path: Path) -> bool:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "exists", forbid)
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).endswith("Python.h"))
    assert not _compiles(device_for(CPU))


def test_a_library_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing)
    found = equipment_here(CPU)
    assert not {"peft", "bitsandbytes"} & set(found.versions)
    assert "nf4" not in found.capabilities


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_tells_its_name_and_memory() -> None:
    device = torch.device("cuda", 0)
    found = equipment_here(device)
    assert found.device_name == torch.cuda.get_device_name(device)
    assert found.memory_bytes == torch.cuda.get_device_properties(device).total_memory
    assert {"float32", "float16"} <= set(found.dtypes)
