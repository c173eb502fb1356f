"""How far something long has come: what tells it, and telling it in lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lightning_utilities.core.rank_zero import rank_zero_info

# Below this nobody needs to watch tensors travel.
PROGRESS_FROM_BYTES = 256 * 2**20

_NUM_LINES = 4


class Progress(Protocol):
    """Tells how far something has come."""

    def advance(self, amount: int) -> None:
        """Note that so much more is done."""

    def close(self) -> None:
        """It is over, done or not."""


# Tells of so many bytes that are on their way; the text is the beginning of a sentence.
ProgressOfBytes = Callable[[str, int], Progress]


class ProgressInLines:
    """Tells each quarter of the way in a line, if the way is long: for those who have no bar.

    Args:
        what: What is being done, as the beginning of a sentence.
        num_bytes: How much of it there is.
    """

    def __init__(self, what: str, num_bytes: int) -> None:
        self._what = what
        self._num_bytes = num_bytes
        self._done_bytes = 0
        self._lines = 0

    def advance(self, amount: int) -> None:
        """Note that so many bytes more are done."""
        self._done_bytes += amount
        lines = _NUM_LINES * self._done_bytes // max(self._num_bytes, 1)
        if self._num_bytes >= PROGRESS_FROM_BYTES and self._lines < lines <= _NUM_LINES:
            self._lines = lines
            done, total = min(self._done_bytes, self._num_bytes) / 2**30, self._num_bytes / 2**30
            rank_zero_info(f"{self._what}: {done:.1f} of {total:.1f} GiB")

    def close(self) -> None:
        """Nothing is left on the screen."""
