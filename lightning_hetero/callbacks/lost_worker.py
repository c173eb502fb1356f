"""RecoveryCallback: what a user's callback is told of workers that come and go."""

from __future__ import annotations

from .._lightning import Callback, pl
from ..events import Departed, Entered, Event, Lost, Recovered


class RecoveryCallback(Callback):
    """Base of callbacks that want to know which workers come and go; override any method.

    `on_worker_lost` and `on_worker_restored` are called in the middle of a step, while the run
    waits for a worker. So they must not use the model, and should be quick. An exception in any
    method ends the run. Workers come back and leave only with
    ``HeteroPipelineStrategy(recovery=...)``.
    """

    def on_worker_lost(self, trainer: pl.Trainer, name: str, step: int) -> None:
        """A worker is lost, and the run waits for another process in its place.

        Args:
            trainer: The Trainer.
            name: The worker's name in the plan.
            step: The step in which it was lost, as the log counts steps: every training batch and
                every batch of an evaluation is one.
        """

    def on_worker_restored(self, trainer: pl.Trainer, name: str, step: int, seconds: float) -> None:
        """Another process has repeated all that a lost worker had done.

        Args:
            trainer: The Trainer.
            name: The worker's name in the plan.
            step: The step in which it was lost.
            seconds: The time since the loss was noticed.
        """

    def on_worker_joined(self, trainer: pl.Trainer, name: str, step: int) -> None:
        """A worker has got layers between two steps.

        Args:
            trainer: The Trainer.
            name: The worker's name in plans.
            step: The first step in which it takes part.
        """

    def on_worker_left(self, trainer: pl.Trainer, name: str, step: int) -> None:
        """A worker has given its layers to others between two steps, as its owner wanted, and ends.

        Args:
            trainer: The Trainer.
            name: The worker's name in plans.
            step: The first step in which it takes no part.
        """


class CallbackObserver:
    """Observer that calls the recovery callbacks of a Trainer."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def on_event(self, event: Event) -> None:
        """Call each callback with what has become of a worker."""
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        for each in callbacks:
            if not isinstance(each, RecoveryCallback):
                continue
            if isinstance(event, Lost) and event.is_awaited:
                each.on_worker_lost(self._trainer, event.name, event.step)
            elif isinstance(event, Recovered):
                each.on_worker_restored(self._trainer, event.name, event.step, event.seconds)
            elif isinstance(event, Entered):
                each.on_worker_joined(self._trainer, event.name, event.step)
            elif isinstance(event, Departed):
                each.on_worker_left(self._trainer, event.name, event.step)
