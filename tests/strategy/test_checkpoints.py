"""Checkpoint files are whole or not there, and are written without a copy in memory."""

from __future__ import annotations

import os
import resource
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fsspec
import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from lightning_hetero import HeteroPipelineStrategy, atomic_file
from lightning_hetero.atomic_file import replacing
from lightning_hetero.errors import SaveError
from lightning_hetero.strategy import checkpoints
from lightning_hetero.strategy.checkpoints import FileCheckpointIO, checkpoint_io_or_ours

from ..forked import running_script
from ..transport.pairs import PATIENCE_SECONDS

MIB = 2**20


def checkpoint(value: float, num_bytes: int = 4 * MIB) -> dict[str, Any]:
    return {"epoch": 1, "state_dict": {"weight": torch.full((num_bytes // 4,), value)}}


def value_in(path: Path) -> float:
    return float(torch.load(path, weights_only=True)["state_dict"]["weight"][-1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a checkpoint is already."""
    path = tmp_path / "folder" / "last.ckpt"
    FileCheckpointIO().save_checkpoint(checkpoint(1.0), path)
    return path


def assert_untouched(path: Path) -> None:
    assert os.listdir(path.parent) == [path.name]
    assert value_in(path) == 1.0


def test_a_checkpoint_takes_the_place_of_the_one_before(path: Path) -> None:
    FileCheckpointIO().save_checkpoint(checkpoint(2.0), path)
    assert value_in(path) == 2.0
    assert os.listdir(path.parent) == [path.name]
    assert FileCheckpointIO().load_checkpoint(path, weights_only=True)["epoch"] == 1


# Torch's writer puts the end of the file behind the rest when it is destroyed.
INTERRUPTED = """
import sys, torch
from lightning_hetero.strategy.checkpoints import FileCheckpointIO

def interrupt(*_):
    raise KeyboardInterrupt

torch.serialization._open_zipfile_writer_buffer.__exit__ = interrupt
try:
    FileCheckpointIO().save_checkpoint({"epoch": 2}, sys.argv[1])
except KeyboardInterrupt:
    print("interrupted")
print("lives on")
"""


def test_ctrl_c_before_the_end_of_a_file_does_not_abort_the_process(path: Path) -> None:
    with running_script(INTERRUPTED, str(path)) as process:
        said, errors = process.communicate(PATIENCE_SECONDS)
    assert said.split("\n")[:2] == ["interrupted", "lives on"], errors
    assert process.returncode == 0
    assert_untouched(path)


def test_it_has_the_permissions_of_an_ordinary_file(path: Path) -> None:
    ordinary = path.with_name("ordinary")
    ordinary.write_bytes(b"")
    assert path.stat().st_mode == ordinary.stat().st_mode


def test_a_path_may_be_relative_or_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    FileCheckpointIO().save_checkpoint(checkpoint(3.0), "here.ckpt")
    FileCheckpointIO().save_checkpoint(checkpoint(4.0), f"file://{tmp_path}/there.ckpt")
    assert [value_in(tmp_path / name) for name in ("here.ckpt", "there.ckpt")] == [3.0, 4.0]


def test_lightning_writes_to_other_filesystems() -> None:
    FileCheckpointIO().save_checkpoint(checkpoint(5.0), "memory://folder/remote.ckpt")
    with fsspec.open("memory://folder/remote.ckpt", "rb") as file:
        assert float(torch.load(file, weights_only=True)["state_dict"]["weight"][0]) == 5.0


def test_options_of_a_storage_are_refused_as_by_lightning(path: Path) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        FileCheckpointIO().save_checkpoint(checkpoint(2.0), path, storage_options={"acl": "x"})
    assert_untouched(path)


def test_no_copy_is_made_in_memory(tmp_path: Path) -> None:
    large = checkpoint(1.0, 32 * MIB)

    def peak_bytes(save: Callable[[dict[str, Any], Path], None]) -> int:
        tracemalloc.start()
        try:
            save(large, tmp_path / "large.ckpt")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_bytes(TorchCheckpointIO().save_checkpoint) > 32 * MIB  # this would be seen
    assert peak_bytes(FileCheckpointIO().save_checkpoint) < MIB


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Inside, writing more than this to a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.follows(
    "or save to another folder (`dirpath` of ModelCheckpoint, `default_root_dir` of the Trainer)",
)
def test_a_full_disk_is_reported_and_leaves_the_old_file(path: Path) -> None:
    expected = r"last.ckpt' could not be written: File too large\..* free some space .*`dirpath`"
    with largest_file(MIB), pytest.raises(SaveError, match=expected) as caught:
        FileCheckpointIO().save_checkpoint(checkpoint(2.0), path)
    assert isinstance(caught.value, OSError)
    assert_untouched(path)
    FileCheckpointIO().save_checkpoint(checkpoint(2.0), path)
    FileCheckpointIO().save_checkpoint(checkpoint(2.0), path.parent / "other" / path.name)


def test_a_folder_that_cannot_be_made_is_reported(path: Path) -> None:
    with pytest.raises(SaveError, match=r"below.ckpt' could not be written: .* fix the cause"):
        FileCheckpointIO().save_checkpoint(checkpoint(2.0), path / "below.ckpt")
    assert_untouched(path)


def test_a_value_that_cannot_be_pickled_raises_the_error_of_torch(path: Path) -> None:
    with pytest.raises(AttributeError, match="lambda"):
        FileCheckpointIO().save_checkpoint({"function": lambda: None}, path)
    assert_untouched(path)


def during_write(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Something that happens when the first MiB of a file is written."""

    class Watched:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def write(self, content: Any) -> int:
            count = self._file.write(content)
            if self._file.tell() > MIB:
                self._file.flush()
                action()
            return count

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    @contextmanager
    def watched(path: Path) -> Iterator[Watched]:
        with replacing(path) as file:
            yield Watched(file)

    monkeypatch.setattr(checkpoints, "replacing", watched)


def test_an_interrupt_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    during_write(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        FileCheckpointIO().save_checkpoint(checkpoint(2.0), path)
    monkeypatch.undo()
    assert_untouched(path)


@pytest.mark.parametrize("has_names", [False, True])
def test_killed_saves_leave_the_old_file_and_nothing_for_long(
    path: Path, monkeypatch: pytest.MonkeyPatch, has_names: bool
) -> None:
    """Without files that have no names, the next save removes what is left."""
    if has_names:
        monkeypatch.setattr(atomic_file, "_open_nameless", lambda *_: None)
    elif not hasattr(os, "O_TMPFILE"):
        pytest.skip("this system has no files without names")
    with monkeypatch.context() as killing:
        during_write(killing, lambda: os.kill(os.getpid(), signal.SIGKILL))
        for _ in range(3):
            child = os.fork()
            if child == 0:
                try:
                    FileCheckpointIO().save_checkpoint(checkpoint(2.0), path)
                finally:
                    os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.WTERMSIG(status) == signal.SIGKILL
            left = [name for name in os.listdir(path.parent) if name != path.name]
            assert len(left) == has_names
            assert not any(name.endswith(".ckpt") for name in left)
            assert value_in(path) == 1.0
    FileCheckpointIO().save_checkpoint(checkpoint(2.0), path)
    assert os.listdir(path.parent) == [path.name]
    assert value_in(path) == 2.0


def test_the_users_own_way_of_saving_wins() -> None:
    class Own(TorchCheckpointIO):
        pass

    own = Own()
    assert HeteroPipelineStrategy(checkpoint_io=own).checkpoint_io is own
    strategy = HeteroPipelineStrategy()
    assert isinstance(strategy.checkpoint_io, FileCheckpointIO)
    assert strategy.checkpoint_io is strategy.checkpoint_io
    strategy.checkpoint_io = own
    assert strategy.checkpoint_io is own


def test_a_wrapper_without_a_writer_gets_ours() -> None:
    wrapper = AsyncCheckpointIO()
    assert checkpoint_io_or_ours(wrapper) is wrapper
    ours = wrapper.checkpoint_io
    assert isinstance(ours, FileCheckpointIO)
    assert HeteroPipelineStrategy(checkpoint_io=wrapper).checkpoint_io is wrapper
    assert wrapper.checkpoint_io is ours
    own = TorchCheckpointIO()
    chosen: Any = checkpoint_io_or_ours(AsyncCheckpointIO(own))
    assert chosen.checkpoint_io is own


def test_the_choice_of_weights_is_checked() -> None:
    with pytest.raises(Exception, match="`checkpoint_weights` is 'some'"):
        HeteroPipelineStrategy(checkpoint_weights="some")  # type: ignore[arg-type]
