"""The processor: its memory, and its sensors, replaced by files and by values of psutil."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch

from lightning_hetero.devices import cpu, main_memory
from lightning_hetero.devices.device import device_for

CPU = device_for(torch.device("cpu"))


class Sensor(NamedTuple):
    current: float


def power_sensor(folder: Path, driver: str, microwatts: str) -> None:
    folder.mkdir(parents=True)
    (folder / "name").write_text(driver + "\n")
    (folder / "power1_average").write_text(microwatts + "\n")


def test_health_has_the_temperature_of_the_processor_and_not_of_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = {"nvme": [Sensor(91.0)], "k10temp": [Sensor(41.5), Sensor(63.25)]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found, raising=False)
    monkeypatch.setattr(cpu, "_LINUX_SENSORS", tmp_path)
    power_sensor(tmp_path / "hwmon0", "amdgpu", "99000000")
    power_sensor(tmp_path / "hwmon1", "zenpower", "12500000")
    health = CPU.health()
    assert health["temperature_celsius"] == 63.25
    assert health["power_watts"] == 12.5


def test_health_leaves_out_unreadable_sensors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(psutil, "sensors_temperatures", raising=False)
    monkeypatch.setattr(cpu, "_LINUX_SENSORS", tmp_path / "nothing")
    health = CPU.health()
    assert set(health) == {"memory_bytes", "memory_peak_bytes"}
    assert health["memory_peak_bytes"] >= health["memory_bytes"] > 2**20


def test_free_memory_is_bounded_by_the_control_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(main_memory, "_CONTROL_GROUP", tmp_path)
    free_bytes = main_memory.free_main_memory()
    assert 0 < free_bytes < main_memory.total_main_memory()
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    assert main_memory.free_main_memory() == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert main_memory.free_main_memory() > 1_000_000
