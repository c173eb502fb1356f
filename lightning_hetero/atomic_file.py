"""Files to replace an earlier file at once, whole or not at all.

    a file without a name ── written, flushed ──▶ .unfinished-4711-1f0c93ab.tmp ── renamed ──▶ path

A file without a name vanishes with its process. If the system lacks such files, the file has its
unfinished name from the beginning. A killed process may then leave it; the next save into the
folder removes it. The lock of an unfinished file shows whether its process lives: in containers
every run may have the same process id.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# Linux shows the open files of a process here, also those without a name.
_OPEN_FILES = Path("/proc/self/fd")

# Some network file systems write folders at once, and refuse to flush them.
_NOTHING_TO_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a file to replace ``path`` when the block ends without an exception.

    Unfinished files of killed processes in the folder are removed.

    Args:
        path: The path to replace, in an existing folder.
        mode: The permissions of the file; the process's umask applies.

    Raises:
        OSError: If the file cannot be written.
    """
    _sweep(path.parent)
    # Lightning searches folders for checkpoints, so the name must not look like one.
    unfinished = path.with_name(f".unfinished-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    nameless = _open_nameless(path.parent, mode)
    try:
        with open(_open_named(unfinished, mode) if nameless is None else nameless, "wb") as file:
            yield file
            file.flush()
            # Else a crash of the machine could leave the new name without the content.
            os.fsync(file.fileno())
            if nameless is not None:
                # A link cannot replace a file, and a renaming can. Without a descriptor of a folder
                # Python would link to the entry in /proc instead of its file.
                os.link(_OPEN_FILES / str(nameless), unfinished, src_dir_fd=nameless)
            unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    _flush_folder(path.parent)


def _open_nameless(folder: Path, mode: int) -> int | None:
    """Open a file without a name, if the system can open it and name it later."""
    if not hasattr(os, "O_TMPFILE") or not _OPEN_FILES.is_dir():
        return None
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY, mode)
    except OSError:
        return None  # opening a file with a name raises if the folder itself is at fault
    _lock(descriptor)
    return descriptor


def _open_named(unfinished: Path, mode: int) -> int:
    """Open a new file; its lock keeps other processes from sweeping it."""
    while True:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        _lock(descriptor)
        if os.fstat(descriptor).st_nlink > 0:
            return descriptor
        os.close(descriptor)  # another process has swept it before it was locked


def _lock(descriptor: int) -> None:
    """Show other processes that this one lives; the lock ends with the process."""
    # If this file system lacks locks, files are not swept there, because `_sweep` needs the lock.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _sweep(folder: Path) -> None:
    """Remove the unfinished files of ended processes, as far as this one may."""
    for left in folder.glob(".unfinished-*.tmp"):
        with suppress(OSError), left.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def _flush_folder(folder: Path) -> None:
    """Write the new name to the disk; else a crash of the machine could bring back the old file."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return  # a folder may take new files and still hide its content
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOTHING_TO_FLUSH:
            raise
    finally:
        os.close(descriptor)


def folder_in_cache(name: str) -> Path | None:
    """This package's folder of a name in the user's cache, if the user has a home folder."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # As its specification says, a relative one is invalid and ignored.
        base = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "lightning-hetero" / name
