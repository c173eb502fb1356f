"""The parts of a deployment besides its steps: comparisons, moves, replicas in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from ..errors import ModelError
from ..pipeline.handover import Request
from ..pipeline.microbatch import BatchOptions
from ..pipeline.rule import Key
from ..plan import Plan
from .handover import WholeBatches

if TYPE_CHECKING:
    from .replicas import HostedReplicas
    from .token_slices import TokenSlices


class NoTwins:
    """Stands in for `Twins`, without comparisons."""

    def ask_again(self, number: int) -> None:
        """Let a layer answer once more in the next step: something may have changed meanwhile,
        without a report to its workers. A difference is a warning then.

        Args:
            number: The layer.
        """

    def wanted(
        self, num_microbatches: int, stays: Collection[int] = (), request: Request | None = None
    ) -> list[int]:
        """The micro-batches that reach all workers with layers not compared yet. Each worker is
        asked for once.

        Args:
            num_microbatches: The number of micro-batches of the step.
            stays: The micro-batches with their layers in this process.
            request: The hand-over; None for a training step's.
        """
        return []

    def compare(self, key: Key, request: Request, is_whole: bool) -> None:
        """Let the uncompared layers of a hand-over answer; `settle` reports differences.

        You must begin a step before. The answer leaves no trace.

        Args:
            key: The micro-batch, and a visit of its own in the step.
            request: The hand-over.
            is_whole: Whether it is a piece of a whole batch; only workers run the layers then.
        """

    def settle(self, is_first: bool = True) -> None:
        """Report differences.

        Args:
            is_first: Whether this is the first batch or the first check of the run.

        Raises:
            ModelError: If a layer differs, the mode is ``"stop"``, and it is the first batch.
        """


def _untried(
    layers: Mapping[int, nn.Module], plan: Plan, options: BatchOptions, *_: Any
) -> WholeBatches:
    return WholeBatches(layers, plan, options)


def _no_twins(*_: Any) -> NoTwins:
    return NoTwins()


def _no_move(*_: Any) -> None:
    raise ModelError(
        "This installation of lightning-hetero cannot move layers, since `coordinator.moves` is "
        "missing; install the whole package, or leave layers where they are."
    )


def _no_hosting(*_: Any) -> NoReturn:
    raise ModelError(
        "In this installation of lightning-hetero the coordinator cannot be a replica, since "
        "`coordinator.replicas` is missing; install the whole package, or take 'coordinator' out "
        "of the stage."
    )


def _no_slices(*_: Any) -> NoReturn:
    raise ModelError(
        "This installation of lightning-hetero cannot cut sequences along their tokens, since "
        "`coordinator.token_slices` is missing; install the whole package, or use "
        "`micro_batching='boundary'`."
    )


@dataclass(frozen=True)
class DeploymentParts:
    """The parts of a deployment; by default the core's alone.

    Args:
        batches: Cuts whole batches: `TriedBatches`.
        twins: Compares layers on workers with the layers of this process: `Twins`.
        move: Moves layers between workers: `coordinator.moves.move`.
        hosted: Runs the layers of this process as a replica: `HostedReplicas`.
        slices: Cuts sequences along their tokens: `TokenSlices`.
    """

    batches: Callable[..., WholeBatches] = _untried
    twins: Callable[..., NoTwins] = _no_twins
    move: Callable[..., None] = _no_move
    hosted: Callable[..., HostedReplicas] = _no_hosting
    slices: Callable[..., TokenSlices] = _no_slices
