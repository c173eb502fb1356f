"""How far something long has come, told in lines.

No bar of its own: Lightning's is on the screen already while a checkpoint is gathered.
"""

from __future__ import annotations

from lightning_utilities.core.rank_zero import rank_zero_info

# Below this nobody needs to watch tensors travel.
PROGRESS_FROM_BYTES = 256 * 2**20

_NUM_LINES = 4


class Progress:
    """Tells each quarter of the way, if the way is long.

    Args:
        what: What is being done, as the beginning of a sentence.
        num_bytes: How much of it there is.
    """

    def __init__(self, what: str, num_bytes: int) -> None:
        self._what = what
        self._num_bytes = num_bytes
        self._done_bytes = 0
        self._lines = 0

    def advance(self, num_bytes: int) -> None:
        """Note that so much more is done."""
        self._done_bytes += num_bytes
        lines = _NUM_LINES * self._done_bytes // max(self._num_bytes, 1)
        if self._num_bytes >= PROGRESS_FROM_BYTES and self._lines < lines <= _NUM_LINES:
            self._lines = lines
            done, total = min(self._done_bytes, self._num_bytes) / 2**30, self._num_bytes / 2**30
            rank_zero_info(f"{self._what}: {done:.1f} of {total:.1f} GiB")
