"""Files that take another's place at once, whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file that takes the path's place when the block has ended well.

    Args:
        path: In a folder that is there.
        mode: Who may do what with the file, less the process's umask.
    """
    # Its name must not look like a checkpoint's: Lightning reads folders to find the last one.
    unfinished = path.with_name(f".unfinished-{secrets.token_hex(4)}.tmp")
    try:
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL, mode))
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            # Or a machine that fails now could be left with the new name and without the content.
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
