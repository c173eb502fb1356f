"""RecoveryCallback: reports coming and going workers to a user's callback."""

from __future__ import annotations

from .._lightning import Callback, pl
from ..events import Departed, Entered, Event, Lost, Recovered


class RecoveryCallback(Callback):
    """Base of callbacks for coming and going workers; override any method.

    `on_worker_lost` and `on_worker_restored` are called in the middle of a step, while the run
    waits for a worker. So they must not use the model, and should be quick. An exception in any
    method ends the run. Workers come back and leave only with
    ``HeteroPipelineStrategy(recovery=...)``.
    """

    def on_run_event(self, trainer: pl.Trainer, event: Event) -> None:
        """Call the method for a worker's event; the strategy calls it with each event.

        Args:
            trainer: The Trainer.
            event: The event of the run.
        """
        if isinstance(event, Lost) and event.is_awaited:
            self.on_worker_lost(trainer, event.name, event.step)
        elif isinstance(event, Recovered):
            self.on_worker_restored(trainer, event.name, event.step, event.seconds)
        elif isinstance(event, Entered):
            self.on_worker_joined(trainer, event.name, event.step)
        elif isinstance(event, Departed):
            self.on_worker_left(trainer, event.name, event.step)

    def on_worker_lost(self, trainer: pl.Trainer, name: str, step: int) -> None:
        """A worker is lost, and the run waits for another process in its place.

        Args:
            trainer: The Trainer.
            name: The worker's name in the plan.
            step: The step in which it was lost, as the log counts steps: every training batch and
                every batch of an evaluation is one.
        """

    def on_worker_restored(self, trainer: pl.Trainer, name: str, step: int, seconds: float) -> None:
        """Another process has repeated all work of a lost worker.

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
            step: Its first step.
        """

    def on_worker_left(self, trainer: pl.Trainer, name: str, step: int) -> None:
        """A worker has given its layers to others between two steps, as its owner wanted, and ends.

        Args:
            trainer: The Trainer.
            name: The worker's name in plans.
            step: The first step without it.
        """
