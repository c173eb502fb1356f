"""Files that replace an earlier file at once, whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a file that replaces ``path`` when the block ends without an exception.

    Args:
        path: The path to replace, in a folder that exists.
        mode: The permissions of the file; the process's umask applies.
    """
    # Lightning searches folders for checkpoints, so the name must not look like one.
    unfinished = path.with_name(f".unfinished-{secrets.token_hex(4)}.tmp")
    try:
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL, mode))
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            # Else a crash of the machine could leave the new name without the content.
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
