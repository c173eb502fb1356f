"""A step begun for checks: micro-batches run in it, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from .._lightning import pl
from ..coordinator.deployment import Deployment
from ..coordinator.dry_run import Runs, no_trace
from ..coordinator.precision import computing_dtypes
from ..pipeline.handover import LoneMicrobatch
from ..pipeline.microbatch import copied
from ..pipeline.tolerance import Rounding


@dataclass(frozen=True)
class Trial:
    """Runs ``training_step`` in a step for checks.

    Args:
        module: Attached to its Trainer.
        deployment: Where its layers are.
        rest: The other arguments of ``training_step``.
        step: The number of the step for dropout masks.
        begin_again: Begins a trial step, after something in it has failed.
    """

    module: pl.LightningModule
    deployment: Deployment
    rest: Sequence[Any]
    step: int
    begin_again: Callable[[], None]

    @property
    def rounding(self) -> Rounding:
        """How coarse the computation is."""
        dtypes = [*computing_dtypes(self.module), *self.deployment.stage_dtypes]
        return Rounding.of(self.module.parameters(), dtypes)

    def recover(self) -> None:
        """Go on after an error."""
        self.deployment.abort()
        self.begin_again()

    def no_trace(self) -> AbstractContextManager[Runs]:
        """Inside, the code of the module may run. The end of the block restores it."""
        return no_trace(self.module, self.deployment.modules_away, is_timed=False)

    def run_alone(
        self, index: int, microbatch: Any, run_number: int, *, has_gradients: bool = True
    ) -> Any:
        """Run a micro-batch of the step alone; returns the result of ``training_step``.

        Args:
            index: Its number.
            microbatch: Its content.
            run_number: How often it has run so, this time included.
            has_gradients: Whether torch records gradients in this process.
        """
        draws, hosted = self.deployment.draws, self.deployment.hosted
        own = draws.microbatch(self.step, index)
        stays = hosted is not None and hosted.stays(index)
        with (
            self.deployment.hand_overs.alone(LoneMicrobatch(index, own, run_number, stays)),
            draws.of(own),
            torch.set_grad_enabled(has_gradients),
            self.module.trainer.precision_plugin.train_step_context(),
        ):
            own.go_on()
            result = self.module.training_step(copied(microbatch), *self.rest)
        self.deployment.check_forward_finished()
        return result
