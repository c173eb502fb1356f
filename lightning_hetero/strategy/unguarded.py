"""A run without checks of its steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..coordinator.deployment import Deployment
from ..coordinator.optimizers import RemoteOptimizer
from ..pipeline.microbatch import CutBatch, CutWindow
from ..pipeline.results import StepLog
from .optimizers import StepWatch
from .training_step import StepGuard


class Unguarded:
    """A `Guard` without checks."""

    def begin_batch(self, optimizers: Sequence[RemoteOptimizer]) -> None:
        """Do not look at the batch."""

    def watch(self, deployment: Deployment) -> StepWatch | None:
        """None: the optimizers' steps are unwatched."""
        return None

    def of_steps(self, deployment: Deployment) -> StepGuard:
        """A guard without checks."""
        return _UncheckedSteps()


class _UncheckedSteps:
    """A `StepGuard` without checks."""

    def begin_batch(
        self, cut: CutBatch | CutWindow, rest: Sequence[Any], accumulates: bool, step: int
    ) -> bool:
        return False

    def begin_microbatches(self) -> bool:
        return False

    def part(self, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def note_changes(self) -> None:
        pass

    def end_batch(
        self, log: StepLog, results: Sequence[Any], gradients: Callable[[], Collection[Hashable]]
    ) -> None:
        pass
