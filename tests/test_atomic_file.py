"""A file is replaced whole or not at all, and a process that is killed leaves nothing for long."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero import atomic_file
from lightning_hetero.atomic_file import replacing

KIB = 2**10
OLD, NEW = b"old", b"new" * 100 * KIB


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    return path


@pytest.fixture(params=["nameless", "named"])
def has_names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether unfinished files have names, as on a system without files that have none."""
    if request.param == "named":
        monkeypatch.setattr(atomic_file, "_open_nameless", lambda *_: None)
    elif not hasattr(os, "O_TMPFILE"):
        pytest.skip("this system has no files without names")
    return bool(request.param == "named")


def save(path: Path, content: bytes = NEW) -> None:
    with replacing(path) as file:
        for start in range(0, len(content), 64 * KIB):
            file.write(content[start : start + 64 * KIB])
            file.flush()


def others_beside(path: Path) -> list[str]:
    return sorted(set(os.listdir(path.parent)) - {path.name})


def kill_in(name: str, number: int) -> Callable[..., Any]:
    """A function of the system that kills the process at its call of this number."""
    calls, function = iter(range(1, 100)), getattr(os, name)

    def called(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)

    return called


def killed_save(path: Path, prepare: Callable[[], object]) -> None:
    """Save in a process of its own, which has to be killed."""
    child = os.fork()
    if child == 0:
        try:
            prepare()
            save(path)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def die_while_writing(path: Path) -> None:
    with replacing(path) as file:
        file.write(NEW[:-1])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_file_takes_the_place_of_the_one_before(path: Path, has_names: bool) -> None:
    with replacing(path) as file:
        file.write(NEW)
        assert path.read_bytes() == OLD
        (*left,) = others_beside(path)
        assert len(left) == has_names
    assert path.read_bytes() == NEW
    assert not others_beside(path)


def test_a_new_file_appears_whole(tmp_path: Path, has_names: bool) -> None:
    path = tmp_path / "new"
    with replacing(path) as file:
        file.write(NEW)
        assert not path.exists()
    assert path.read_bytes() == NEW
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize("mode", [0o666, 0o600, 0o400])
def test_a_file_has_its_permissions(path: Path, mode: int, has_names: bool) -> None:
    before = os.umask(0o027)
    try:
        with replacing(path, mode) as file:
            file.write(NEW)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode & ~0o027


def test_an_exception_leaves_the_old_file_alone(path: Path, has_names: bool) -> None:
    def interrupted() -> None:
        with replacing(path) as file:
            file.write(NEW)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == OLD
    assert not others_beside(path)


@pytest.mark.parametrize("num_kills", [5])
def test_killed_saves_leave_at_most_one_file_until_the_next(
    path: Path, num_kills: int, has_names: bool
) -> None:
    for _ in range(num_kills):
        killed_save(path, lambda: die_while_writing(path))
        assert path.read_bytes() == OLD
        assert len(others_beside(path)) == has_names, "a killed save sweeps those before it"
    save(path)
    assert path.read_bytes() == NEW
    assert not others_beside(path)


# The calls of the system after the content is written, in their order, and the content after each.
@pytest.mark.parametrize(
    ("call", "number", "expected", "num_left"),
    [
        ("fsync", 1, OLD, (0, 1)),
        ("link", 1, OLD, (0, None)),
        ("rename", 1, OLD, (1, 1)),
        ("fsync", 2, NEW, (0, 0)),
    ],
)
def test_a_kill_behind_the_last_byte_leaves_the_old_file_or_the_new_one(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
    expected: bytes,
    num_left: tuple[int, int | None],
    has_names: bool,
) -> None:
    left = num_left[has_names]
    if left is None:
        pytest.skip("a file with a name needs no link")
    if call == "rename":
        killed = kill_in("replace", number)
        monkeypatch.setattr(Path, "replace", killed)
    else:
        monkeypatch.setattr(os, call, kill_in(call, number))
    killed_save(path, lambda: None)
    monkeypatch.undo()
    assert path.read_bytes() == expected
    assert len(others_beside(path)) == left
    save(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert not others_beside(path)


def test_the_files_of_living_processes_are_not_swept(path: Path, has_names: bool) -> None:
    """Also not those of this process, which may save two files into one folder at once."""
    other = path.with_name("other")
    with replacing(other) as file:
        file.write(NEW)
        save(path)
    assert (path.read_bytes(), other.read_bytes()) == (NEW, NEW)
    assert not others_beside(path)[1:]


def test_a_file_that_is_swept_before_it_is_locked_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_file, "_open_nameless", lambda *_: None)
    lock, swept = fcntl.flock, []

    def sweep_first(file: Any, operation: int) -> None:
        if not swept:
            (left,) = others_beside(path)
            swept.append(left)
            path.with_name(left).unlink()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    save(path)
    assert swept
    assert path.read_bytes() == NEW
    assert not others_beside(path)


def test_without_locks_files_are_written_and_none_is_swept(
    path: Path, monkeypatch: pytest.MonkeyPatch, has_names: bool
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    path.with_name(".unfinished-1-00.tmp").write_bytes(b"")
    monkeypatch.setattr(fcntl, "flock", no_locks)
    save(path)
    assert path.read_bytes() == NEW
    assert others_beside(path) == [".unfinished-1-00.tmp"]


def test_the_folder_is_flushed_after_the_file_has_its_name(
    path: Path, monkeypatch: pytest.MonkeyPatch, has_names: bool
) -> None:
    flush, flushed = os.fsync, []

    def noted(descriptor: int) -> None:
        found = os.fstat(descriptor)
        flushed.append((found.st_ino, path.stat().st_ino == found.st_ino))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    save(path)
    (file, is_named), (folder, _) = flushed
    assert (file, is_named) == (path.stat().st_ino, False)
    assert folder == path.parent.stat().st_ino


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_folder_that_cannot_be_flushed_matters_if_the_disk_is_at_fault(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    flush = os.fsync

    def refuse(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == path.parent.stat().st_ino:
            raise OSError(number, os.strerror(number))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            save(path)
    else:
        save(path)
    assert path.read_bytes() == NEW
