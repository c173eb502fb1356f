"""The benchmark of cards finds the fake devices, and measures them in the ways of cards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .autoload import autoloading

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cards" / "main.py"


@pytest.mark.exhaustive
def test_the_cards_are_found_and_their_memory_is_counted(fake_device: str, tmp_path: Path) -> None:
    package, output = tmp_path / "package", tmp_path / "output"
    package.mkdir()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--size", "tiny", "--parts", "ef", "--output", str(output)],
        env={**os.environ, **autoloading(fake_device, package)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    machine = json.loads((output / "machine.json").read_text())
    assert [side["device"] for side in machine["sides"]] == ["fake:0", "fake:1"]
    (memory,) = (json.loads(path.read_text()) for path in output.glob("raw/e-*.json"))
    assert {*memory["peak_bytes"]} == {*memory["counted_bytes"]}
    assert len(memory["peak_bytes"]) == 2
    assert all(peak > 0 for peak in memory["peak_bytes"].values())
    busy = [json.loads(path.read_text()) for path in output.glob("raw/f-*.json")]
    assert busy == [{"skipped": "torch.profiler records no kernels on fake"}] * 3
