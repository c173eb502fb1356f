"""A failed run ends, and frees its workers, even if a user's ``on_exception`` raises.

Lightning calls this hook on the callbacks and the datamodule, and then ends the strategy and the
loggers. It comes to neither if a hook raises, for example because a checkpoint cannot be written.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from .._lightning import pl
from ..model.override import stand_in

_HOOK = "on_exception"
_WITHOUT_EFFECT = (pl.Callback.on_exception, pl.LightningDataModule.on_exception)


def guard_hooks(trainer: pl.Trainer, end: Callable[[BaseException], None]) -> ExitStack:
    """Let a run end even if an ``on_exception`` raises, until the returned stack is closed.

    Args:
        trainer: It has all callbacks.
        end: Ends the run after its error.
    """
    guards = ExitStack()
    owners = [*trainer.callbacks, trainer.datamodule]  # type: ignore[attr-defined]
    for owner in owners:
        if getattr(type(owner), _HOOK, None) not in (None, *_WITHOUT_EFFECT):
            guards.callback(stand_in(owner, _HOOK, _Guarded(owner, end)))
    return guards


class _Guarded:
    """Runs in the place of an owner's ``on_exception``."""

    def __init__(self, owner: Any, end: Callable[[BaseException], None]) -> None:
        self._owner = owner
        self._end = end
        self._own = getattr(owner, _HOOK)

    def __call__(self, *args: Any) -> None:
        try:
            self._own(*args)
        except BaseException:
            self._end(args[-1])
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the owner has the hook of its class.
        return getattr, (self._owner, _HOOK)
