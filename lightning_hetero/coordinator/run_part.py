"""The seam of recovery: the coordinator calls these methods at each turn of a run.

The core has one such object, with empty methods; `Connections.replace_lost_by` takes another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..errors import HeteroError, WorkerLost
from ..model.stored import State
from ..protocol import messages as m

if TYPE_CHECKING:
    from ..pipeline.journal import Journal
    from .member import Member

# The source of a worker's tensor: a worker, maybe itself, or None for this process.
Sources = Mapping[tuple[str, "Member"], "Member | None"]


class Loaded(NamedTuple):
    """A tensor for a worker, or some of its rows.

    Args:
        name: The name of the tensor.
        tensor: Its content.
        state: The other tensors of a tensor in 4 bits, by their names.
        row: The number of the first row in ``tensor``; None for a whole tensor.
        is_end: Whether the tensor is complete with it.
    """

    name: str
    tensor: Tensor
    state: State
    row: int | None = None
    is_end: bool = True

    @property
    def message(self) -> m.LoadTensor:
        """The message that brings it."""
        return m.LoadTensor(self.name, list(self.state), self.row)


Contents = Iterator[Loaded]


class RunPart:
    """A run without recovery: a lost worker ends it.

    Attributes:
        losses: All losses of the run, in their order; None without recovery.
        journals: The messages to each worker since its latest snapshot, if they are kept.
    """

    losses: Sequence[Any] | None = None
    journals: Mapping[Member, Journal] = MappingProxyType({})

    def begin(self, _sources: Sources, _rounded: Collection[str]) -> None:
        """The workers have their layers, before the next step.

        Args:
            _sources: After a move, the sources of tensors missing in the checkpoint.
            _rounded: The tensors with another dtype than before.
        """

    def connect_again(self, cause: WorkerLost, num_losses: int) -> None:
        """Open a session anew with each worker, after a loss while the layers were sent.

        Args:
            cause: The loss.
            num_losses: The number of losses, with this one.

        Raises:
            WorkerLost: Without recovery, or if a worker does not come back.
        """
        raise cause

    def replace(self, _worker: Member, _cause: HeteroError) -> str | None:
        """Put another process in the place of a lost worker.

        Returns:
            The obstacle, as a sentence or an empty text; None if the run can go on.
        """
        return ""

    def spooled(
        self, _worker: int, contents: Contents, _is_wanted: Callable[[str], bool]
    ) -> Contents:
        """Pass on the tensors for the worker of a number. The wanted ones are missing in the
        checkpoint."""
        return contents

    def before_move(self) -> None:
        """Layers are about to move."""

    def on_failed_move(self, _error: BaseException) -> None:
        """A move has failed."""

    def before_step(self, _keeps_gradients: bool) -> None:
        """A step is about to begin, perhaps on top of earlier gradients."""

    def close(self) -> None:
        """The run is over. May be called twice."""
