"""What is read of a device, from sensors that are files."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_hetero.runtime.health import health_of, processor_sensors


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
