"""Progress of long transfers and measurements, and figures in the Trainer's training bar.

The Trainer's own bar decides how progress is shown: by tqdm, by rich, or by lines in the log.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

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

from .._lightning import ProgressBar, RichProgressBar, Tqdm, TQDMProgressBar, pl
from ..events import Event, Observers, Progressed
from ..model.override import stand_in

# Progress is shown from this size on.
PROGRESS_FROM_BYTES = 256 * 2**20

_NUM_LINES = 4


class Progress(Protocol):
    """Shows the progress of a long piece of work."""

    def advance(self, amount: int) -> None:
        """Note that so much more is done."""

    def close(self) -> None:
        """End the display, whether everything is done or not."""


class PublishedProgress:
    """Publishes the progress of a transfer of tensors.

    Args:
        observers: Read it.
        what: The work, as the beginning of a sentence.
        num_bytes: The size of the whole transfer.
    """

    def __init__(self, observers: Observers, what: str, num_bytes: int) -> None:
        self._observers = observers
        self._what = what
        self._num_bytes = num_bytes
        self._done_bytes = 0
        self.advance(0)

    def advance(self, amount: int, is_over: bool = False) -> None:
        """Note that so many more bytes are done."""
        self._done_bytes += amount
        event = Progressed(self._what, self._done_bytes, self._num_bytes, is_over)
        self._observers.publish(event)

    def close(self) -> None:
        """End the transfer, whether everything is done or not."""
        self.advance(0, is_over=True)


class Bars:
    """Observer for showing each transfer in a bar of its own, as the Trainer shows bars."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        # By its text, the bar of a transfer, and the bytes that it shows.
        self._open: dict[str, tuple[Progress, int]] = {}

    def on_event(self, event: Event) -> None:
        """Show the progress of a transfer."""
        if not isinstance(event, Progressed):
            return
        if event.what not in self._open:
            bar = progress_of_bytes(self._trainer, event.what, event.of_bytes)
            self._open[event.what] = bar, 0
        bar, shown_bytes = self._open.pop(event.what)
        bar.advance(event.done_bytes - shown_bytes)
        if event.is_over:
            bar.close()
        else:
            self._open[event.what] = bar, event.done_bytes


class ProgressInLines:
    """Logs a line at each quarter of a long transfer, in place of a progress bar.

    Args:
        what: The work, as the beginning of a sentence.
        num_bytes: The size of the whole transfer.
    """

    def __init__(self, what: str, num_bytes: int) -> None:
        self._what = what
        self._num_bytes = num_bytes
        self._done_bytes = 0
        self._lines = 0

    def advance(self, amount: int) -> None:
        """Note that so many more bytes are done."""
        self._done_bytes += amount
        lines = _NUM_LINES * self._done_bytes // max(self._num_bytes, 1)
        if self._num_bytes >= PROGRESS_FROM_BYTES and self._lines < lines <= _NUM_LINES:
            self._lines = lines
            done, total = min(self._done_bytes, self._num_bytes) / 2**30, self._num_bytes / 2**30
            rank_zero_info(f"{self._what}: {done:.1f} of {total:.1f} GiB")

    def close(self) -> None:
        """Leave the logged lines."""


# Refreshes of the training bar over which its tokens per second are averaged.
_REFRESHES = 32


@dataclass(frozen=True)
class _Bar:
    """A progress bar of any library."""

    advance: Callable[[int], None]
    close: Callable[[], None]


_NO_BAR = _Bar(lambda _amount: None, lambda: None)


def progress_of_bytes(trainer: pl.Trainer, what: str, num_bytes: int) -> Progress:
    """A bar for a long transfer of tensors, or lines in the log if the Trainer does not show
    bars."""
    if num_bytes < PROGRESS_FROM_BYTES:
        return _NO_BAR
    return _bar(trainer, what, num_bytes, in_bytes=True) or ProgressInLines(what, num_bytes)


def progress_of_parts(trainer: pl.Trainer, what: str, count: int) -> Progress:
    """A bar for so many pieces of work."""
    return _bar(trainer, what, count, in_bytes=False) or _NO_BAR


def _bar(trainer: pl.Trainer, what: str, total: int, in_bytes: bool) -> Progress | None:
    shown = trainer.progress_bar_callback
    if isinstance(shown, TQDMProgressBar) and shown.is_enabled:
        return _tqdm_bar(what, total, in_bytes)
    if not (isinstance(shown, RichProgressBar) and shown.is_enabled):
        return None
    live = shown.progress
    if live is not None and live.live.is_started:
        return _line_of_bar(live, what, total, in_bytes)
    return _rich_bar(what, total, in_bytes)


def _tqdm_bar(what: str, total: int, in_bytes: bool) -> Progress:
    """A bar of tqdm below the present ones; it disappears when it is done."""
    units: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    bar = Tqdm(desc=what, total=total, leave=False, **(units if in_bytes else {}))
    return _Bar(bar.update, bar.close)


def _rich_bar(what: str, total: int, in_bytes: bool) -> Progress:
    """A bar of rich, for times when the Trainer's own bar is not on the screen."""
    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
    if in_bytes:
        columns += [DownloadColumn(binary_units=True), TransferSpeedColumn()]
    else:
        columns.append(MofNCompleteColumn())
    bar = RichProgress(*columns, TimeRemainingColumn(), transient=True)
    task = bar.add_task(what, total=total)
    bar.start()
    return _Bar(partial(bar.advance, task), bar.stop)


def _line_of_bar(live: RichProgress, what: str, total: int, in_bytes: bool) -> Progress:
    """One more line in the Trainer's own bar: a screen can have only one bar of rich.

    The columns of this bar show whole numbers, so bytes are counted in MiB.
    """
    unit, text = (2**20, f"{what} (MiB)") if in_bytes else (1, what)
    task = live.add_task(text, total=max(1, round(total / unit)))
    live.refresh()

    def remove() -> None:
        live.remove_task(task)
        live.refresh()

    return _Bar(lambda amount: live.advance(task, amount / unit), remove)


class TrainingFigures:
    """Tokens per second and the slowest stage in the Trainer's training bar, until `detach`.

    Every bar shows the result of its ``get_metrics``; the user's own bar's is called first.

    Args:
        trainer: The owner of the bar.
        num_tokens: Returns the number of tokens trained on so far.
        bottleneck: Returns the slowest stage; empty while it is unknown.
        clock: Returns growing seconds.
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
        """Restore the bar."""
        if self._bar is not None:
            self._put_back()
            self._bar = None

    def figures(self) -> dict[str, str]:
        """The figures to show now, by their short names."""
        self._seen.append((self._clock(), self._num_tokens()))
        (before, few), (now, many) = self._seen[0], self._seen[-1]
        found = {}
        if many > few and now > before:
            found["tok/s"] = f"{(many - few) / (now - before):,.0f}"
        bottleneck = self._bottleneck()
        if bottleneck:
            found["bottleneck"] = bottleneck
        return found


@dataclass(frozen=True)
class _WithFigures:
    """A bar's ``get_metrics`` with the figures of this run. A copy does not add figures."""

    get_metrics: Callable[..., dict[str, Any]]
    figures: Callable[[], dict[str, str]]

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**self.get_metrics(*args, **kwargs), **self.figures()}

    def __reduce__(self) -> tuple[Any, ...]:
        return _WithFigures, (self.get_metrics, dict)
