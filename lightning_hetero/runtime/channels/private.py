"""Files that nobody but their owner may use."""

from __future__ import annotations

import os
import stat
from typing import IO, Any

from ...errors import HeteroError


def check_private(file: IO[Any], what: str, danger: str, error: type[HeteroError]) -> None:
    """Refuse an open file that others than its owner may read, write or run.

    Args:
        what: The file, as the beginning of a sentence.
        danger: What others may do.
        error: What is raised.
    """
    mode = os.fstat(file.fileno()).st_mode
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise error(
            f"{what} {str(file.name)!r} has mode {stat.S_IMODE(mode):04o}, so that others may "
            f"{danger}; `chmod 600 {file.name}`."
        )
