"""The folders of snapshots: who leaves one, and who removes it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_hetero.coordinator.snapshots import SnapshotFiles
from lightning_hetero.errors import SaveError

KILLED = """
import os, signal, sys
from pathlib import Path
from lightning_hetero.coordinator.snapshots import SnapshotFiles

files = SnapshotFiles(Path(sys.argv[1]))
(files.folder / "1-base").write_bytes(b"weights")
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_run(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_the_next_run_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    killed_run(tmp_path / "run-1")
    assert (tmp_path / "run-1" / "1-base").exists()
    files = SnapshotFiles(tmp_path / "run-2")
    assert [path.name for path in tmp_path.iterdir()] == ["run-2"]
    files.close()
    files.close()
    assert not list(tmp_path.iterdir())


def test_what_a_living_run_has_stays(tmp_path: Path) -> None:
    first = SnapshotFiles(tmp_path / "run-1")
    (tmp_path / "run-of-mine").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "claim").touch()
    second = SnapshotFiles(tmp_path / "run-2")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"run-1", "run-2", "run-of-mine", "notes"}
    second.close()
    first.close()


def test_a_folder_that_cannot_be_made_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match=r"run-1.*name another folder"):
        SnapshotFiles(tmp_path / "file" / "run-1")
