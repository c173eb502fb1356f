"""Tensors in a file: their content, their memory, and the folder of the file."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from lightning_hetero.devices.weight_file import WeightFile, folder_for_weights, is_in_memory
from lightning_hetero.errors import ModelError

MIB = 2**20


def kib(name: str) -> int:
    """A size of this process, in KiB."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{name}:\s+(\d+) kB", status)[0])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 7),
        torch.randn(3, 4, dtype=torch.bfloat16),
        torch.randint(255, (9, 1), dtype=torch.uint8),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.randn(6, 4).T,
        torch.randn(4, 4).to(torch.float8_e4m3fn),
    ],
)
def test_a_tensor_has_the_same_content(tensor: torch.Tensor, tmp_path: Path) -> None:
    kept = WeightFile(tmp_path, 1000).keep("w", tensor)
    assert (kept.dtype, kept.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(kept.float(), tensor.float())
    assert kept.data_ptr() % 64 == 0


def test_a_change_in_place_outlives_the_pages(tmp_path: Path) -> None:
    file = WeightFile(tmp_path, 100)
    kept = file.keep("w", torch.arange(4.0))
    kept.add_(1)
    file.sync()
    file.forget()
    assert kept.tolist() == [1, 2, 3, 4]


def test_tensors_live_longer_than_their_file_object(tmp_path: Path) -> None:
    kept = WeightFile(tmp_path, 100).keep("w", torch.arange(4.0))
    assert kept.tolist() == [0, 1, 2, 3]


def test_a_tensor_is_written_over_one_of_its_name(tmp_path: Path) -> None:
    file = WeightFile(tmp_path, 100)
    first = file.keep("w", torch.zeros(4))
    assert file.keep("w", first).data_ptr() == first.data_ptr()
    second = file.keep("w", torch.ones(4))
    assert second.data_ptr() == first.data_ptr()
    assert file.keep("w", torch.ones(3000)).sum() == 3000
    assert file.num_bytes == 12000


def test_more_than_expected_finds_room(tmp_path: Path) -> None:
    file = WeightFile(tmp_path, 10)
    kept = [file.keep(str(number), torch.full((2000,), float(number))) for number in range(5)]
    file.read_ahead()
    assert [each[-1].item() for each in kept] == [0, 1, 2, 3, 4]


def test_a_file_has_no_name(tmp_path: Path) -> None:
    file = WeightFile(tmp_path, 100)
    file.keep("w", torch.zeros(4))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_are_no_data_of_the_process_and_leave_it(tmp_path: Path) -> None:
    file = WeightFile(tmp_path, 64 * MIB)
    data = kib("VmData")
    kept = file.keep("w", torch.ones(16 * MIB))
    before = kib("RssFile")
    assert kept.sum() == 16 * MIB
    read = kib("RssFile")
    file.drop()
    assert read - before > 60 * 1024
    assert kib("RssFile") - before < 4 * 1024
    assert kib("VmData") - data < 16 * 1024


def works_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Does as the errors say: the cache is in another folder."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    file = WeightFile(folder_for_weights(1000), 1000)
    kept = file.keep("w", torch.ones(3))
    file.sync()
    return kept.tolist() == [1, 1, 1]


def fail(*_: object) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.follows("The tensor … cannot be written into … of this worker (…); start the worker")
@pytest.mark.follows("The weights cannot be written into … of this worker (…); start the worker")
@pytest.mark.parametrize("function", ["pwrite", "fsync"])
def test_a_full_disk_is_reported_with_its_folder(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, function, fail)
    file = WeightFile(tmp_path, 100)

    def write() -> None:
        file.keep("3.w", torch.zeros(4))
        file.sync()

    with pytest.raises(ModelError, match=re.escape(str(tmp_path))) as error:
        write()
    assert "No space left" in str(error.value)
    assert works_in(tmp_path, monkeypatch)


@pytest.mark.follows("free bytes, and the frozen weights take …; start the worker")
def test_a_disk_with_too_little_space_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = folder_for_weights(1000)
    assert folder == tmp_path / "lightning-hetero" / "weights"
    with pytest.raises(ModelError, match="free bytes, and the frozen weights take"):
        folder_for_weights(2**60)
    assert works_in(tmp_path, monkeypatch)


@pytest.mark.follows("This worker cannot keep weights in … (…); start the worker")
def test_a_folder_that_cannot_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lightning-hetero").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="cannot keep weights in"):
        folder_for_weights(1)
    assert works_in(tmp_path / "other", monkeypatch)


@pytest.mark.follows("has no home folder for its weights; start it with XDG_CACHE_HOME=FOLDER")
def test_a_user_without_a_home_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lost)
    with pytest.raises(ModelError, match="no home folder for its weights"):
        folder_for_weights(1)
    assert works_in(tmp_path, monkeypatch)


@pytest.mark.follows("is in main memory, so weights in it would take as much memory as before")
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a folder in main memory")
def test_a_folder_in_main_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/shm")
    with pytest.raises(ModelError, match="is in main memory"):
        folder_for_weights(1)
    assert works_in(tmp_path, monkeypatch)


def test_a_folder_on_a_disk_is_not_in_main_memory() -> None:
    assert not is_in_memory(Path(__file__).parent)
