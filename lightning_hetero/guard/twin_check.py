"""Runs micro-batches of a step for the twin test: layers on workers answer, and so do those here.

It is made before the first step of a run, and of workers that have taken the place of others.
`coordinator/twins.py` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from .._lightning import pl
from ..coordinator.deployment import Deployment
from ..coordinator.dry_run import no_trace
from ..errors import WorkerError
from ..pipeline.microbatch import CutBatch, CutWindow
from .interleaving import MicrobatchesAlone

# The interleaving check counts its own runs in the same step.
_RUN_NUMBER = 4


@dataclass(frozen=True)
class TwinCheck:
    """Compares layers on workers with those here before a step.

    Args:
        module: Attached to its Trainer.
        deployment: Where its layers are.
    """

    module: pl.LightningModule
    deployment: Deployment

    def wanted(self, num_microbatches: int) -> list[int]:
        """The micro-batches that reach the workers which are still to be compared."""
        hosted, every = self.deployment.hosted, range(num_microbatches)
        stays = [index for index in every if hosted is not None and hosted.stays(index)]
        return self.deployment.hand_overs.twins.wanted(num_microbatches, stays)

    def run(
        self,
        wanted: Sequence[int],
        batch: CutBatch | CutWindow,
        rest: Sequence[Any],
        step: int,
        begin_again: Callable[[], None],
        *,
        is_first: bool,
    ) -> None:
        """Run micro-batches in a step that has begun; everything is as before then.

        Args:
            wanted: Their numbers.
            batch: The batch as it is cut, or the window.
            rest: The other arguments of ``training_step``.
            step: The number of the step for dropout masks.
            begin_again: Begins a trial step, after something in it has failed.
            is_first: Whether no batch has been trained before.

        Raises:
            ModelError: If a layer computes something else on its worker; see `Twins.settle`.
            WorkerError: If a worker fails.
        """
        if not wanted:
            return
        alone = MicrobatchesAlone(self.module, self.deployment, rest, step, True, _RUN_NUMBER)
        away = self.deployment.modules_away
        try:
            with no_trace(self.module, away, is_timed=False) as runs:
                for index in wanted:
                    with runs.one():
                        alone.run(index, batch.microbatches[index])
        except WorkerError:
            raise  # a layer that changes itself in its first forward alone is refused only now
        except Exception as error:
            # The step itself fails in the same way, unless a trial needs more than it.
            self.deployment.abort()
            begin_again()
            rank_zero_info(
                "whether layers on workers compute what they compute here was not checked. "
                f"{type(error).__name__}: {error}"
            )
        self.deployment.hand_overs.twins.settle(is_first)
