"""Copies of a Trainer's callbacks during a run.

A callback holds what Lightning gave it: every one the module's ``log``, a progress bar the Trainer.
Neither can be copied while layers are on workers, so copies of callbacks share them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar

from ..model.override import stand_in


def let_callbacks_be_copied(trainer: pl.Trainer) -> list[Callable[[], None]]:
    """Allow ``copy.deepcopy(trainer.callbacks)`` from now on; returns what ends that."""
    put_back = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for name in ("log", "log_dict"):
            given = vars(callback).get(name)
            if getattr(given, "__self__", None) is trainer.lightning_module:
                put_back.append(stand_in(callback, name, _Shared(given)))
        if isinstance(callback, ProgressBar):
            put_back.append(stand_in(callback, "__deepcopy__", _BarCopy(trainer, callback)))
    return put_back


class _Shared:
    """A method of an object that copies have in common."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Shared:
        return self


class _BarCopy:
    """Makes a copy of a progress bar that belongs to the same Trainer."""

    def __init__(self, trainer: pl.Trainer, bar: ProgressBar) -> None:
        self._trainer, self._bar = trainer, bar

    def __call__(self, memo: dict[int, Any]) -> ProgressBar:
        made: ProgressBar = type(self._bar).__new__(type(self._bar))
        memo[id(self._bar)] = made
        memo.setdefault(id(self._trainer), self._trainer)
        # Without what bars leave out of copies themselves, such as their consoles.
        state: Any = self._bar.__reduce_ex__(4)[2]
        kept = {name: value for name, value in state.items() if value is not self}
        vars(made).update(copy.deepcopy(kept, memo))
        return made
