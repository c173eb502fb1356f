"""Progress of long transfers and measurements, and figures in the Trainer's training bar.

The Trainer's own bar decides how progress is shown: by tqdm, by rich, or by lines in the log.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning_utilities.core.rank_zero import rank_zero_info
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

from ..model.override import stand_in

# A shorter transfer shows no progress.
PROGRESS_FROM_BYTES = 256 * 2**20

_NUM_LINES = 4


class Progress(Protocol):
    """Shows how far a long piece of work has come."""

    def advance(self, amount: int) -> None:
        """Note that so much more is done."""

    def close(self) -> None:
        """End the display, whether everything is done or not."""


# Shows the progress of so many bytes; the text is the beginning of a sentence.
ProgressOfBytes = Callable[[str, int], Progress]


class ProgressInLines:
    """Logs a line at each quarter of a long transfer, where there is no progress bar.

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
        """Leave the lines that were logged."""


_MIB = 2**20
# Refreshes of the training bar over which its tokens per second are averaged.
_REFRESHES = 32


def progress_of_bytes(trainer: pl.Trainer, what: str, num_bytes: int) -> Progress:
    """A bar for a long transfer of tensors, or lines in the log where the Trainer shows no bar."""
    if num_bytes < PROGRESS_FROM_BYTES:
        return _NoBar()
    return _bar(trainer, what, num_bytes, in_bytes=True) or ProgressInLines(what, num_bytes)


def progress_of_parts(trainer: pl.Trainer, what: str, count: int) -> Progress:
    """A bar for so many pieces of work."""
    return _bar(trainer, what, count, in_bytes=False) or _NoBar()


def _bar(trainer: pl.Trainer, what: str, total: int, in_bytes: bool) -> Progress | None:
    shown = trainer.progress_bar_callback
    if isinstance(shown, TQDMProgressBar) and shown.is_enabled:
        return _TqdmBar(what, total, in_bytes)
    if not (isinstance(shown, RichProgressBar) and shown.is_enabled):
        return None
    live = shown.progress
    if live is not None and live.live.is_started:
        return _TaskOfBar(live, what, total, _MIB if in_bytes else 1)
    return _RichBar(what, total, in_bytes)


class _NoBar:
    def advance(self, amount: int) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Leave nothing behind."""


class _TqdmBar:
    """A bar of tqdm's below the present ones; it disappears when it is done."""

    def __init__(self, what: str, total: int, in_bytes: bool) -> None:
        units: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
        self._tqdm = Tqdm(desc=what, total=total, leave=False, **(units if in_bytes else {}))

    def advance(self, amount: int) -> None:
        self._tqdm.update(amount)

    def close(self) -> None:
        self._tqdm.close()


class _RichBar:
    """A bar of rich's, for times when the Trainer's own is not on the screen."""

    def __init__(self, what: str, total: int, in_bytes: bool) -> None:
        columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
        if in_bytes:
            columns += [DownloadColumn(binary_units=True), TransferSpeedColumn()]
        else:
            columns.append(MofNCompleteColumn())
        self._rich = RichProgress(*columns, TimeRemainingColumn(), transient=True)
        self._task = self._rich.add_task(what, total=total)
        self._rich.start()

    def advance(self, amount: int) -> None:
        self._rich.advance(self._task, amount)

    def close(self) -> None:
        self._rich.stop()


class _TaskOfBar:
    """One more line in the Trainer's own bar: a screen can have only one bar of rich's.

    The columns of that bar show whole numbers, so bytes are counted in units.
    """

    def __init__(self, live: RichProgress, what: str, total: int, unit: int) -> None:
        self._live, self._unit = live, unit
        text = f"{what} (MiB)" if unit == _MIB else what
        self._task = live.add_task(text, total=max(1, round(total / unit)))
        live.refresh()

    def advance(self, amount: int) -> None:
        self._live.advance(self._task, amount / self._unit)

    def close(self) -> None:
        self._live.remove_task(self._task)
        self._live.refresh()


class TrainingFigures:
    """Tokens per second and the slowest stage in the Trainer's training bar, until `detach`.

    Every bar shows what its ``get_metrics`` returns; that of a user's own bar is called first.

    Args:
        trainer: Whose bar it is.
        num_tokens: How many were trained on so far.
        bottleneck: The slowest stage; empty while that is not known.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        num_tokens: Callable[[], int],
        bottleneck: Callable[[], str],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._bar: ProgressBar | None = trainer.progress_bar_callback
        self._num_tokens, self._bottleneck, self._clock = num_tokens, bottleneck, clock
        self._seen: deque[tuple[float, int]] = deque(maxlen=_REFRESHES)
        if self._bar is not None:
            shown = _WithFigures(self._bar.get_metrics, self.figures)
            self._put_back = stand_in(self._bar, "get_metrics", shown)

    def detach(self) -> None:
        """Leave the bar as it was."""
        if self._bar is not None:
            self._put_back()
            self._bar = None

    def figures(self) -> dict[str, str]:
        """What is shown now, by short names."""
        self._seen.append((self._clock(), self._num_tokens()))
        (before, few), (now, many) = self._seen[0], self._seen[-1]
        found = {}
        if many > few and now > before:
            found["tok/s"] = f"{(many - few) / (now - before):,.0f}"
        bottleneck = self._bottleneck()
        if bottleneck:
            found["bottleneck"] = bottleneck
        return found


class _WithFigures:
    """A bar's ``get_metrics`` with figures of this run. A copy has none."""

    def __init__(
        self, get_metrics: Callable[..., dict[str, Any]], figures: Callable[[], dict[str, str]]
    ) -> None:
        self._get_metrics = get_metrics
        self._figures = figures

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**self._get_metrics(*args, **kwargs), **self._figures()}

    def __reduce__(self) -> tuple[Any, ...]:
        return _WithFigures, (self._get_metrics, dict)
