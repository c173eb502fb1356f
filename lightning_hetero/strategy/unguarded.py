"""A run whose steps nothing checks."""

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
    """A `Guard` that looks for nothing."""

    def begin_batch(self, deployment: Deployment, optimizers: Sequence[RemoteOptimizer]) -> None:
        """Every batch is as good."""

    def watch(self, deployment: Deployment) -> StepWatch | None:
        """Nothing looks at the optimizers' steps."""
        return None

    def of_steps(self, deployment: Deployment) -> StepGuard:
        """Nothing looks at the training steps."""
        return _UncheckedSteps()


class _UncheckedSteps:
    """A `StepGuard` that looks for nothing."""

    def begin_batch(
        self, cut: CutBatch | CutWindow, rest: Sequence[Any], accumulates: bool, step: int
    ) -> bool:
        return False

    def begin_microbatches(self) -> None:
        pass

    def part(self, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def note_changes(self) -> None:
        pass

    def end_batch(
        self, log: StepLog, results: Sequence[Any], gradients: Callable[[], Collection[Hashable]]
    ) -> None:
        pass
