"""Which file has the latest content of each tensor of a worker."""

from __future__ import annotations

import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.coordinator.run_part import Contents, Loaded
from lightning_hetero.coordinator.snapshots import SnapshotFiles
from lightning_hetero.errors import CheckpointError, RemoteProtocolError, SaveError
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame, encode_frame
from lightning_hetero.protocol.values import Packer


def part(**tensors: float) -> Tensor:
    """The piece of a snapshot with tensors of one number."""
    frames = []
    for name, value in tensors.items():
        packer = Packer()
        message = m.SnapshotTensor(name, packer.pack(torch.tensor([value])))
        frames.append(b"".join(encode_frame(Frame(message, tuple(packer.tensors)))))
    content = bytearray(b"".join(frames))
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()


def sent(**tensors: float) -> Contents:
    for name, value in tensors.items():
        yield Loaded(name, torch.tensor([value]), {})


def found(files: SnapshotFiles, worker: int = 1) -> dict[str, float]:
    """The content of each tensor of a worker."""
    frames = [*files.frames(worker)]
    values = {frame.message.name: float(frame.tensors[0]) for frame in frames}  # type: ignore[attr-defined]
    assert len(values) == len(frames)
    assert values.keys() == {*files.names(worker)}
    return values


def told(files: SnapshotFiles, number: int, tensors: dict[int, dict[str, float]]) -> None:
    """Write a whole snapshot: the tensors of each worker."""
    for worker, own in tensors.items():
        files.add(worker, number, part(**own)).result()
    files.note_whole(number, {worker: [*own] for worker, own in tensors.items()})


def spool(files: SnapshotFiles, worker: int, **tensors: float) -> None:
    assert len([*files.spooled(worker, sent(**tensors), lambda _name: True)]) == len(tensors)


def names_of(files: SnapshotFiles) -> list[str]:
    """The names of the files of a run."""
    files.add(9, 9, torch.empty(0)).result()  # behind it, nothing is under way
    return sorted(path.name for path in files.folder.iterdir() if path.name not in ("claim", "9-9"))


class Numbered:
    """A worker, of which only the number counts here."""

    def __init__(self, number: int) -> None:
        self.number = number


ONE: Any = Numbered(1)
OTHER: Any = Numbered(2)


def test_the_latest_content_of_each_tensor_comes_from_the_files(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path / "run")
    spool(files, 1, a=1, b=2)
    assert found(files) == {}
    files.follow({})
    assert found(files) == {"a": 1, "b": 2}
    told(files, 1, {1: {"t": 0}})
    told(files, 2, {1: {"t": 5, "b": 9}})
    assert found(files) == {"a": 1, "b": 9, "t": 5}
    assert names_of(files) == ["1-2", "1-base-1"]
    told(files, 3, {1: {"t": 6, "b": 9, "a": 7}})
    assert found(files) == {"a": 7, "b": 9, "t": 6}
    assert names_of(files) == ["1-3"]
    files.close()
    assert not (tmp_path / "run").exists()


def test_tensors_that_move_are_found_in_the_files_of_their_sources(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path / "run")
    spool(files, 1, a=1, b=2, c=3, t=0)
    spool(files, 2, u=0)
    files.follow({})
    told(files, 1, {1: {"t": 5, "b": 9}, 2: {"u": 6}})
    # The second worker gets `d` from here; `c` and `u` come here, so nobody needs their files.
    spool(files, 2, d=4)
    files.follow(
        {("a", ONE): ONE, ("b", OTHER): ONE, ("t", OTHER): ONE, ("d", OTHER): None, ("e", ONE): ONE}
    )
    assert found(files, 1) == {"a": 1}
    assert found(files, 2) == {"b": 9, "t": 5, "d": 4}
    assert names_of(files) == ["1-1", "1-base-1", "2-base-3"]
    assert files.num_bytes(1) == 0
    # It has not changed `b`, so the file of the first worker stays.
    told(files, 2, {1: {}, 2: {"t": 7}})
    assert found(files, 2) == {"b": 9, "t": 7, "d": 4}
    assert names_of(files) == ["1-1", "1-base-1", "2-2", "2-base-3"]
    assert files.num_bytes(2) > 0
    told(files, 3, {1: {}, 2: {"t": 7, "b": 8}})
    assert names_of(files) == ["1-base-1", "2-3", "2-base-3"]
    files.close()


def test_each_replica_has_its_own_content(tmp_path: Path) -> None:
    """The one that steps a tensor has the optimizer's state, for which it is the source."""
    files = SnapshotFiles(tmp_path / "run")
    told(files, 1, {1: {"t": 1}, 2: {"t": 2}})
    assert (found(files, 1), found(files, 2)) == ({"t": 1}, {"t": 2})
    files.follow({("t", ONE): OTHER, ("t", OTHER): OTHER})
    assert (found(files, 1), found(files, 2)) == ({"t": 2}, {"t": 2})
    files.close()


def test_what_was_sent_in_a_move_that_was_undone_is_forgotten(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path / "run")
    spool(files, 1, a=1)
    files.follow({})
    spool(files, 1, a=2)
    files.forget_sent()
    assert found(files) == {"a": 1}
    files.follow({("a", ONE): ONE})
    assert found(files) == {"a": 1}
    assert names_of(files) == ["1-base-1"]
    files.close()


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path / "run")
    frame = b"".join(encode_frame(Frame(m.FetchTensors(["a"]))))
    files.add(1, 1, torch.frombuffer(bytearray(frame), dtype=torch.uint8)).result()
    files.note_whole(1, {1: ["a"]})
    with pytest.raises(RemoteProtocolError, match="which is no part of it"):
        [*files.frames(1)]
    files.close()


def test_a_tensor_that_is_missing_in_its_file_is_named(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path / "run")
    files.add(1, 1, part(a=1)).result()
    files.note_whole(1, {1: ["a", "b"]})
    with pytest.raises(RemoteProtocolError, match=r"A snapshot lacks the tensors \['b'\]"):
        [*files.frames(1)]
    files.close()


def written(folder: Path) -> tuple[SnapshotFiles, list[Path]]:
    """The files of a worker with a base and a snapshot."""
    files = SnapshotFiles(folder)
    spool(files, 1, a=1)
    files.follow({})
    told(files, 1, {1: {"t": 5}})
    return files, [files.folder / "1-base-1", files.part(1, 1)]


def read_all(files: SnapshotFiles) -> list[Frame]:
    return [*files.frames(1)]


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
    spool(other, 1, a=2)
    (other.folder / "1-base-1").rename(paths[0])
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
from lightning_hetero.coordinator.run_part import Contents, Loaded
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
