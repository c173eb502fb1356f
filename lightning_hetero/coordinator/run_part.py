"""What the coordinator calls of a part that a run need not have: recovery.

The core has one such object, which does nothing; `Coordinator.replace_lost_by` takes another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import HeteroError, WorkerLost
from ..model.stored import State

if TYPE_CHECKING:
    from .member import Member

# Names of tensors, by the worker that holds them.
Names = Mapping["Member", Collection[str]]

Contents = Iterator[tuple[str, Tensor, State]]


class RunPart:
    """A part of a run that does nothing: a lost worker ends the run.

    Attributes:
        losses: All of the run, in their order; None if lost workers are not replaced.
    """

    losses: Sequence[Any] | None = None

    def begin(self) -> None:
        """The workers have their layers, and no step has run."""

    def connect_again(self, cause: WorkerLost, num_losses: int) -> None:
        """Open a session anew with each worker, since one was lost while the layers were sent.

        Args:
            cause: The loss.
            num_losses: How many there were, this one included.

        Raises:
            WorkerLost: If lost workers are not replaced, or nobody comes.
        """
        raise cause

    def replace(self, _worker: Member, _cause: HeteroError) -> str | None:
        """Put another process in the place of a lost worker.

        Returns:
            Why that is not possible, as a sentence that may be empty; None if the run can go on.
        """
        return ""

    def spooled(
        self, _worker: int, contents: Contents, _is_wanted: Callable[[str], bool]
    ) -> Contents:
        """Pass the tensors on that the worker of a number gets; those that are wanted are in no
        checkpoint."""
        return contents

    def before_move(self) -> None:
        """Layers are about to move."""

    def after_move(self, _kept: Names, _got: Names) -> None:
        """Layers have moved: each worker has kept some tensors, and got some that no checkpoint
        has."""

    def on_failed_move(self, _error: BaseException) -> None:
        """A move has failed."""

    def before_step(self, _keeps_gradients: bool) -> None:
        """A step is about to begin; gradients from before it may stay."""

    def close(self) -> None:
        """The run is over. May be called twice."""
