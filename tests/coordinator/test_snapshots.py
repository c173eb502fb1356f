"""Which files have the state of a worker when layers have moved."""

from __future__ import annotations

import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.coordinator.snapshots import Bases, SnapshotFiles
from lightning_hetero.errors import CheckpointError, RemoteProtocolError, SaveError
from lightning_hetero.model.stored import State
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame, encode_frame
from lightning_hetero.protocol.values import Packer


def test_what_came_by_a_move_is_missing_until_a_snapshot_tells_it() -> None:
    bases = Bases()
    assert bases.note_move({"a", "b"}, {"c"}) == []
    assert bases.missing == {"c"}
    assert bases.newest_first() == [(0, {"a", "b"})]
    bases.note_whole(3, {"c"})
    assert bases.missing == set()
    assert bases.newest_first() == [(3, {"c"}), (0, {"a", "b"})]


def test_a_second_move_before_the_snapshot_misses_both() -> None:
    bases = Bases()
    bases.note_move({"a"}, {"b", "c"})
    bases.note_move({"a", "b"}, {"d"})
    assert bases.missing == {"b", "d"}


def test_a_file_goes_with_the_last_tensor_that_it_is_good_for() -> None:
    bases = Bases()
    bases.note_move({"a"}, {"b"})
    bases.note_whole(1, {"b"})
    assert bases.note_move({"b"}, {"a"}) == [0]
    bases.note_whole(2, {"a"})
    assert bases.newest_first() == [(2, {"a"}), (1, {"b"})]
    assert bases.note_move(set(), {"b"}) == [1, 2]
    assert 0 not in bases


def test_a_snapshot_without_other_tensors_is_no_base() -> None:
    bases = Bases()
    bases.note_whole(1, ())
    assert 1 not in bases


def part(**tensors: float) -> Tensor:
    """The piece of a snapshot with tensors of one number."""
    frames = []
    for name, value in tensors.items():
        packer = Packer()
        message = m.SnapshotTensor(name, packer.pack(torch.tensor([value])))
        frames.append(b"".join(encode_frame(Frame(message, tuple(packer.tensors)))))
    return torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.uint8)


def sent(**tensors: float) -> Iterator[tuple[str, Tensor, State]]:
    for name, value in tensors.items():
        yield name, torch.tensor([value]), {}


def found(files: SnapshotFiles) -> dict[str, float]:
    """The content of each tensor of worker 1; the first one counts."""
    values: dict[str, float] = {}
    for frame in files.base_frames(1):
        assert isinstance(frame.message, m.LoadTensor)
        values.setdefault(frame.message.name, float(frame.tensors[0]))
    return values


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "claim")


def test_the_latest_content_of_each_tensor_comes_from_the_files(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path / "run")
    assert len([*files.spooled(1, sent(a=1, b=2), lambda _name: True)]) == 2
    assert found(files) == {"a": 1, "b": 2}
    files.add(1, 1, part(t=0)).result()
    files.note_whole(1, 1)
    files.note_move(1, kept={"a"}, got={"c"})
    files.add(1, 2, part(c=3, b=9)).result()
    files.note_whole(1, 2, {"c"})
    # It has got b back since, with other content than it had at first.
    files.note_move(1, kept={"a", "c"}, got={"b"})
    files.add(1, 3, part(b=4)).result()
    files.note_whole(1, 3, {"b"})
    files.add(1, 4, part(t=5)).result()
    files.note_whole(1, 4)
    assert found(files) == {"a": 1, "b": 4, "c": 3}
    files.add(1, 5, part(t=6)).result()
    files.note_whole(1, 5)
    files.add(1, 6, part(t=7)).result()  # behind it, nothing is under way
    assert names_of(tmp_path / "run") == ["1-2", "1-3", "1-5", "1-6", "1-base"]
    files.close()
    assert not (tmp_path / "run").exists()


def test_a_worker_without_a_base_has_what_it_told(tmp_path: Path) -> None:
    """It has joined the run, so nothing was sent to it at the start."""
    files = SnapshotFiles(tmp_path / "run")
    files.note_move(4, kept=(), got={"a"})
    files.add(4, 1, part(a=1)).result()
    files.note_whole(4, 1, {"a"})
    assert [frame.message.name for frame in files.base_frames(4)] == ["a"]  # type: ignore[attr-defined]
    files.close()


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path / "run")
    files.note_move(1, kept=(), got={"a"})
    frame = b"".join(encode_frame(Frame(m.FetchTensors(["a"]))))
    files.add(1, 1, torch.frombuffer(bytearray(frame), dtype=torch.uint8)).result()
    files.note_whole(1, 1, {"a"})
    with pytest.raises(RemoteProtocolError, match="which is no part of it"):
        [*files.base_frames(1)]
    files.close()


def written(folder: Path) -> tuple[SnapshotFiles, list[Path]]:
    """The files of a worker with a base and a snapshot."""
    files = SnapshotFiles(folder)
    assert [*files.spooled(1, sent(a=1), lambda _name: True)]
    files.add(1, 1, part(t=5)).result()
    files.note_whole(1, 1)
    return files, [files.base(1), files.part(1, 1)]


def read_all(files: SnapshotFiles) -> list[Frame]:
    return [*files.latest(1), *files.base_frames(1)]


def test_every_byte_that_changes_on_the_disk_is_found(tmp_path: Path) -> None:
    files, paths = written(tmp_path / "run")
    assert len(read_all(files)) == 2
    for path in paths:
        content = path.read_bytes()
        for position in range(len(content)):
            for bit in (0, 7):
                changed = bytearray(content)
                changed[position] ^= 1 << bit
                path.write_bytes(changed)
                with pytest.raises(
                    CheckpointError, match=f"'{path}' has other bytes than this run"
                ):
                    read_all(files)
        path.write_bytes(content)
    assert len(read_all(files)) == 2
    files.close()


@pytest.mark.parametrize(
    "change", [lambda c: c[:-1], lambda c: c[:40], lambda c: b"", lambda c: c * 2]
)
def test_a_file_of_another_length_is_found(change: Any, tmp_path: Path) -> None:
    files, paths = written(tmp_path / "run")
    for path in paths:
        content = path.read_bytes()
        path.write_bytes(change(content))
        with pytest.raises(CheckpointError, match=f"'{path}' has other bytes than this run"):
            read_all(files)
        path.write_bytes(content)
    files.close()


def test_a_file_of_another_run_is_found(tmp_path: Path) -> None:
    files, paths = written(tmp_path / "run-1")
    other = SnapshotFiles(tmp_path / "run-2")
    assert [*other.spooled(1, sent(a=2), lambda _name: True)]
    other.base(1).rename(paths[0])
    with pytest.raises(CheckpointError, match="has other bytes than this run"):
        read_all(files)
    other.close()
    files.close()


@pytest.mark.follows(
    "Let nothing clean its folder up, or name another one (`recovery=Recovery(folder=...)`), and go"
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_file_that_is_gone_is_named(number: int, tmp_path: Path) -> None:
    files, paths = written(tmp_path / "run")
    paths[number].unlink()
    with pytest.raises(CheckpointError, match=f"'{paths[number]}' .* cannot be read: No such file"):
        read_all(files)
    files.close()
    files, _ = written(tmp_path / "another")
    assert len(read_all(files)) > 0
    files.close()


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
    (tmp_path / "run-notes").mkdir()
    (tmp_path / "run-notes" / "claim").write_bytes(b"My own claim.")
    second = SnapshotFiles(tmp_path / "run-2")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"run-1", "run-2", "run-of-mine", "notes", "run-notes"}
    second.close()
    first.close()


@pytest.mark.follows(
    "Free some space there, name another folder (`recovery=Recovery(folder=...)`), or go on "
    "without `recovery`.",
)
def test_a_folder_that_cannot_be_made_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match=r"run-1.*name another folder") as caught:
        SnapshotFiles(tmp_path / "file" / "run-1")
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1
    SnapshotFiles(tmp_path / "other" / "run-1")
