"""The parts of a deployment besides its steps: comparisons, moves, replicas in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ModelError
from ..pipeline.handover import Request
from ..pipeline.rule import Key

if TYPE_CHECKING:
    from .replicas import HostedReplicas


class NoTwins:
    """Compares no layer on a worker with that of this process."""

    def ask_again(self, number: int) -> None:
        """Let a layer answer once more in the next step: something may have changed meanwhile, and
        its workers were not told. A difference is a warning then.

        Args:
            number: The layer.
        """

    def wanted(
        self, num_microbatches: int, stays: Collection[int] = (), request: Request | None = None
    ) -> list[int]:
        """The micro-batches that reach all workers whose layers were not compared. Each worker is
        asked for once.

        Args:
            num_microbatches: How many the step has.
            stays: The micro-batches with their layers in this process.
            request: The hand-over; None for those of a training step.
        """
        return []

    def compare(self, key: Key, request: Request, is_whole: bool) -> None:
        """Let the layers of a hand-over answer that were not compared; `settle` says what differs.

        You must begin a step before. Nothing is left behind.

        Args:
            key: The micro-batch, and a visit that no other hand-over of the step has.
            request: The hand-over.
            is_whole: Whether it is a piece of a whole batch, whose layers only workers run.
        """

    def settle(self, is_first: bool = True) -> None:
        """Say what differs.

        Args:
            is_first: Whether no batch has been trained before.

        Raises:
            ModelError: If something does, the mode is ``"stop"``, and it is the first batch.
        """


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


@dataclass(frozen=True)
class DeploymentParts:
    """The parts of a deployment; by default those of the core alone.

    Args:
        twins: Compares layers on workers with the layers of this process: `Twins`.
        move: Moves layers between workers: `coordinator.moves.move`.
        hosted: Runs the layers of this process as a replica: `HostedReplicas`.
    """

    twins: Callable[..., NoTwins] = _no_twins
    move: Callable[..., None] = _no_move
    hosted: Callable[..., HostedReplicas] = _no_hosting
