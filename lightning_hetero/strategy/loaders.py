"""Data loaders of windows, as Lightning trains with them.

Lightning looks at a loader before it trains: it seeds the processes of the loader, turns shuffling
off for `overfit_batches`, names the epoch to a sampler, ends processes. It knows loaders of torch.
Here all this reaches the inner loader, as if it stood alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from .._lightning import (
    _SUPPORTED_MODES,
    CombinedLoader,
    MisconfigurationException,
    RunningStage,
    TrainerFn,
    _process_dataloader,
    _resolve_overfit_batches,
    _set_sampler_epoch,
    extract_batch_size,
    pl,
    sized_len,
)
from ..errors import BatchError
from ..model.override import stand_in
from ..window import StatefulWindows, Window, Windows


class TrainingWindows(Windows):
    """A loader of windows to train with."""

    @override
    def __iter__(self) -> Iterator[Window | None]:
        # The loader begins at once, as it would alone: it draws random numbers then.
        return self.cut(iter(self.loader))

    @override
    def __len__(self) -> int:
        if not isinstance(self.loader, CombinedLoader):
            return super().__len__()
        lengths = [sized_len(each) for each in self.loaders]
        known = [math.inf if length is None else length for length in lengths]
        length = _SUPPORTED_MODES[self.loader._mode]["fn"](known)  # type: ignore[arg-type]
        if math.isinf(length):
            raise TypeError("The loaders of the CombinedLoader have no length.")
        return math.ceil(length / self.size)

    @property
    def batch_sampler(self) -> _Epochs:
        """Where Lightning looks for a sampler to give it the epoch."""
        return _Epochs(self.loaders)

    @property
    def _iterator(self) -> Any:
        """Where Lightning looks for processes to end with the training."""
        return getattr(self.loader, "_iterator")  # noqa: B009

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        setattr(self.loader, "_iterator", iterator)  # noqa: B010


class StatefulTrainingWindows(TrainingWindows, StatefulWindows):
    """A loader of windows to train with; the inner loader remembers its position.

    Without a length, Lightning fetches one window ahead to find the last one. The state is the one
    before the waiting window, so a resumed run trains on it.

    Args:
        loader: The loader.
        size: How many of its batches make a window.
        num_waiting: Returns how many windows Lightning has fetched and not trained on.
    """

    def __init__(self, loader: Any, size: int, num_waiting: Callable[[], int]) -> None:
        super().__init__(loader, size)
        self._num_waiting = num_waiting
        # Before the latest window, and after it.
        self._states: list[dict[str, Any]] = []

    @override
    def cut(self, given: Iterator[Any]) -> Iterator[Window | None]:
        if sized_len(self) is not None:
            yield from super().cut(given)
            return
        self._states = [super().state_dict()]
        for window in super().cut(given):
            self._states = [self._states[-1], super().state_dict()]
            yield window

    @override
    def state_dict(self) -> dict[str, Any]:
        waits = len(self._states) > 1 and self._num_waiting() > 0
        return self._states[0] if waits else super().state_dict()


class _Epochs:
    """Stands for a batch sampler and for its sampler, and gives the epoch to the loaders'
    samplers."""

    def __init__(self, loaders: list[Any]) -> None:
        self._loaders = loaders

    @property
    def sampler(self) -> _Epochs:
        return self

    def set_epoch(self, epoch: int) -> None:
        for loader in self._loaders:
            _set_sampler_epoch(loader, epoch)


def prepared(trainer: pl.Trainer, loader: Any) -> Any:
    """A data loader as a Trainer uses it; a loader without windows stays as it is.

    Raises:
        BatchError: If windows were given for an evaluation.
    """
    if not isinstance(loader, Windows):
        return loader
    stage = trainer.state.stage
    if stage != RunningStage.TRAINING:
        _refuse_evaluation()
    if isinstance(loader, TrainingWindows):
        return loader
    inside = loader.loader
    combined = inside if isinstance(inside, CombinedLoader) else CombinedLoader(inside)
    if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
        _resolve_overfit_batches(combined, mode=stage)
    combined.flattened = [
        _process_dataloader(trainer, TrainerFn.FITTING, stage, each) for each in combined.flattened
    ]
    whole = combined if inside is combined else combined.flattened[0]
    if not isinstance(loader, StatefulWindows):
        return TrainingWindows(whole, loader.size)

    def num_waiting() -> int:
        fetcher = trainer.fit_loop._data_fetcher
        return len(getattr(fetcher, "batches", ()))

    return StatefulTrainingWindows(whole, loader.size, num_waiting)


def check_is_training(batch: Any, *_rest: Any) -> None:
    """Refuse to evaluate a window.

    Raises:
        BatchError: With the remedy.
    """
    if isinstance(batch, Window):
        _refuse_evaluation()


def _refuse_evaluation() -> NoReturn:
    raise BatchError(
        "A loader to validate, test or predict with gives windows, which only a training takes "
        "apart. Give the Trainer that loader without `windows(...)`."
    )


def transferring(module: pl.LightningModule) -> Callable[[], None]:
    """Let `on_before_batch_transfer` get each piece of a window, until the returned function is
    called."""
    name = "_on_before_batch_transfer"
    if name in vars(module):  # since the Trainer asked for the data before
        return lambda: None
    own = module._on_before_batch_transfer

    def before_transfer(batch: Any, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, Window):
            return batch.map(lambda piece: own(piece, dataloader_idx))
        return own(batch, dataloader_idx)

    return stand_in(module, name, before_transfer)


def check_no_window_inside(batch: Any) -> None:
    """Refuse a batch of several loaders if one gives windows.

    Raises:
        BatchError: With the remedy.
    """
    inside = batch.values() if isinstance(batch, dict) else batch
    if isinstance(inside, Window) or not isinstance(batch, (dict, list, tuple)):
        return
    if any(isinstance(part, Window) for part in inside):
        raise BatchError(
            "One of several training loaders gives windows, and a batch of all of them would be "
            "partly a window. Wrap them together: "
            "`windows(CombinedLoader(loaders, 'max_size_cycle'), size)`."
        )


def sizes_of(pieces: list[Any]) -> list[int] | None:
    """The samples of each piece, as Lightning counts them; None if it cannot count a piece."""
    try:
        return [extract_batch_size(piece) for piece in pieces]
    except MisconfigurationException:
        return None


def note_size(trainer: pl.Trainer, window: Window) -> None:
    """Let Lightning weigh hooks' logs for an epoch by all samples of a window."""
    if trainer._results is not None:
        trainer._results.batch = _AllSamples(window)


class _AllSamples:
    """Where Lightning looks for the samples of a batch, if it needs their number.

    Args:
        window: The batch.
    """

    def __init__(self, window: Window) -> None:
        self._window = window

    def __iter__(self) -> Iterator[Tensor]:
        count = sum(extract_batch_size(piece) for piece in self._window.pieces)
        yield torch.empty(count, device="meta")
