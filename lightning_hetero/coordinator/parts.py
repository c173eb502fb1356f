"""The parts of a deployment besides its steps: comparisons, moves, replicas in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..errors import ModelError
from ..model.hollow import HollowLayers
from ..pipeline.handover import Request
from ..pipeline.microbatch import CheckFirstBatch
from ..pipeline.placement import Placement
from ..pipeline.rule import Key
from .layers import RemoteLayers
from .worker_stages import RemoteStage

if TYPE_CHECKING:
    from .replicas import HostedReplicas
    from .session import Coordinator
    from .steps import RemoteStages


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


class DeploymentParts:
    """Makes the parts of a deployment; here those that the core alone has."""

    def twins(
        self,
        layers: Mapping[int, nn.Module],
        kept: Collection[int],
        remote: RemoteLayers,
        stages: RemoteStages,
        seed: int,
        mode: CheckFirstBatch,
        told: Callable[[], Mapping[Tensor, bool]],
    ) -> NoTwins:
        """The comparison of layers on workers with the layers of this process; see `Twins`."""
        return NoTwins()

    def move(
        self,
        remote: RemoteLayers,
        stages: Sequence[RemoteStage],
        placement: Placement,
        seed: int,
        is_on_disk: Callable[[str], bool],
    ) -> None:
        """Move layers between workers; see `coordinator.moves.move`.

        Raises:
            ModelError: If nothing here can.
        """
        raise ModelError(
            "This installation of lightning-hetero cannot move layers, since "
            "`coordinator.moves` is missing; install the whole package, or leave layers where they "
            "are."
        )

    def hosted(
        self,
        coordinator: Coordinator,
        placement: Placement,
        layers: Mapping[int, nn.Module],
        hollow: HollowLayers,
    ) -> HostedReplicas:
        """The layers of this process as a replica.

        Raises:
            ModelError: If nothing here can.
        """
        raise ModelError(
            "In this installation of lightning-hetero the coordinator cannot be a replica, since "
            "`coordinator.replicas` is missing; install the whole package, or take 'coordinator' "
            "out of the stage."
        )
