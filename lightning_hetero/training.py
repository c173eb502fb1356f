"""Training over stages: where a Trainer's steps and optimizers reach the layers on workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from .checks import check_precision
from .coordinator.deployment import Deployment
from .coordinator.optimizer import remote_optimizers
from .coordinator.whole_batches import NOTHING_SAID, BatchOptions
from .loaders import BatchReader
from .manual import FollowedZeroGrad
from .pipeline.microbatch import LossWeighting
from .pipeline.recorder import Stopwatch
from .precision import RemoteSteps
from .stepping import MicrobatchedStep


class StagedTraining:
    """Ties a module's training steps and optimizers to a deployment until `detach`.

    Args:
        module: Attached to its Trainer.
        deployment: Where its layers are.
        optimizers: All of them.
        plugin: Clips and steps.
        cuts_step: Whether ``training_step`` runs once per micro-batch.
        loss_weighting: How micro-batch losses combine.
        options: What the user said of batches.

    Attributes:
        remote_steps: The optimizers' parts on the stages.
        followed: What zeroes gradients there too, under manual optimization.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        deployment: Deployment,
        optimizers: Sequence[Optimizer],
        plugin: Precision,
        cuts_step: bool,
        loss_weighting: LossWeighting,
        options: BatchOptions = NOTHING_SAID,
    ) -> None:
        self._module = module
        self._deployment = deployment
        self._reader = BatchReader(module.trainer, options.dim)
        coordinator, names_of = deployment.coordinator, deployment.names_of
        remote = remote_optimizers(optimizers, coordinator, names_of)
        for each in remote:
            check_precision(plugin, each.optimizer)
        self.remote_steps = RemoteSteps(plugin, remote, names_of)
        self.followed: FollowedZeroGrad | None = None
        self._microbatched: MicrobatchedStep | None = None
        if cuts_step:
            self._microbatched = MicrobatchedStep(
                module, deployment, loss_weighting, dropout_seed(), options
            )
        elif not module.automatic_optimization:
            self.followed = FollowedZeroGrad(module, coordinator, names_of, remote)

    @property
    def stopwatch(self) -> Stopwatch | None:
        """Measures what this process does; None where that cannot be told from waiting."""
        return None if self._microbatched is None else self._microbatched.stopwatch

    def step(
        self,
        training_step: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """One ``training_step`` of a batch, as Lightning calls it."""
        if self._microbatched is not None:
            self._deployment.follow_trained_ones()
            batch, *rest = (*args, *kwargs.values())
            return self._microbatched.run(batch, rest, self._accumulates)
        num_pieces = self._deployment.plan.micro_batches
        batch, *rest = (*args, *kwargs.values())
        with (
            self._deployment.batch_of(self._reader.count(batch, rest)),
            self._deployment.whole_batch_step(num_pieces, self._accumulates),
        ):
            result = training_step(*args, **kwargs)
        self._deployment.check_forward_finished()
        return result

    def note_backward(self) -> None:
        """The user's code has run a backward."""
        # Under automatic optimization gradients are looked at just before the step.
        if self.followed is not None:
            self.remote_steps.note_backward()

    def detach(self) -> None:
        """Leave the module's and the optimizers' own ``zero_grad`` as they were."""
        if self.followed is not None:
            self.followed.detach()

    @property
    def _accumulates(self) -> bool:
        """Whether gradients of earlier batches are kept; Lightning's own rule for this batch."""
        trainer = self._module.trainer
        is_first = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        return self.followed is not None or not is_first


def dropout_seed() -> int:
    """Where dropout masks start: the seed of `seed_everything`, or torch's own."""
    return int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())) % 2**63
