"""What this machine tells of itself.

What is read of a device, from sensors that are files.
"""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import pytest
import torch

from lightning_hetero import __version__
from lightning_hetero.devices.description import equipment_here, health_of, processor_sensors

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


def sensor(folder: Path, name: str, **values: str) -> None:
    folder.mkdir(parents=True)
    (folder / "name").write_text(name + "\n")
    for file, value in values.items():
        (folder / file).write_text(value)


def test_the_hottest_of_the_processor_s_and_not_the_disk_s(tmp_path: Path) -> None:
    sensor(tmp_path / "hwmon0", "nvme", temp1_input="91000")
    sensor(tmp_path / "hwmon1", "k10temp", temp1_input="41500\n", temp2_input="63250")
    sensor(tmp_path / "hwmon2", "coretemp", temp1_input="garbage", power1_average="12500000")
    assert processor_sensors(tmp_path) == {"temperature_celsius": 63.25, "power_watts": 12.5}


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    found = health_of(torch.device("cpu"), tmp_path / "nothing")
    assert set(found) <= {"memory_bytes", "memory_peak_bytes"}
    assert found["memory_peak_bytes"] >= found.get("memory_bytes", 0) > 0
