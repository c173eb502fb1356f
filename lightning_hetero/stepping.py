"""One training step of a LightningModule, cut into micro-batches for the driver."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, SupportsFloat

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from .coordinator.deployment import Deployment
from .coordinator.whole_batches import NOTHING_SAID, BatchOptions
from .devices.copies import Copies, HostCopy
from .errors import BatchError, ModelError
from .first_batch import FirstBatchCheck
from .loaders import BatchReader
from .model.override import stand_in
from .pipeline.driver import Driver, MicrobatchStep, StepGradients
from .pipeline.microbatch import CutBatch, LossWeighting, LossWeights
from .pipeline.recorder import Stopwatch
from .pipeline.results import (
    BatchMetrics,
    StepLog,
    are_losses,
    loss_of,
    merge_values,
    weighted_mean,
)
from .precision import scaler_of


class MicrobatchedStep:
    """Runs ``training_step`` once per micro-batch and returns what it would have returned at once.

    Args:
        module: The LightningModule, attached to its trainer.
        deployment: Where its layers are.
        loss_weighting: How micro-batch losses combine.
        seed: Start of all dropout masks.
        options: What the user said of batches.

    Attributes:
        stopwatch: Has measured what this process did for the steps.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        deployment: Deployment,
        loss_weighting: LossWeighting,
        seed: int,
        options: BatchOptions = NOTHING_SAID,
    ) -> None:
        self._module = module
        self._deployment = deployment
        self._loss_weighting = loss_weighting
        self._reader = BatchReader(module.trainer, options.dim)
        self._first_check: FirstBatchCheck | None = FirstBatchCheck(
            module, deployment, loss_weighting, options.check
        )
        self._copies = deployment.coordinator.copies
        self._scaling = LossScaling(self._copies)
        self._gradients = StepGradients(*_local_parameters(module))
        self.stopwatch = Stopwatch(module.trainer.strategy.root_device)
        coordinator = deployment.coordinator
        self._driver = Driver(
            coordinator,
            self._gradients,
            loss_of,
            seed,
            deployment.plan.starts_on_worker,
            self.stopwatch,
            coordinator.recorder,
        )

    def run(self, batch: Any, rest: Sequence[Any], accumulate: bool) -> Any:
        """The batch's loss, or a dict with it, or None, as ``training_step`` returned them.

        The gradients are already computed; the loss's ``backward`` puts them into ``.grad``.
        """
        self._scaling.check_last()
        cut, weights = self._cut(batch, rest)
        has_begun = self._check_first(cut, rest, accumulate)
        shares = cut.weights("samples", self._copies) if self._adds_up else weights
        trainer = self._module.trainer
        scaler = scaler_of(trainer.precision_plugin)
        scale = (1.0 if scaler is None else scaler.get_scale()) / trainer.accumulate_grad_batches
        metrics = BatchMetrics()
        log = StepLog(metrics, adds_losses=self._adds_up)
        work = [
            MicrobatchStep(
                partial(self._run_one, microbatch, rest, log, shares.of(index)),
                weights.of(index, scale),
            )
            for index, microbatch in enumerate(cut.microbatches)
        ]
        step = self._deployment.coordinator.dropout_step + (not has_begun)
        with (
            self._deployment.cut_step(),
            _logging_to(self._module, log),
            metrics.gathering(self._module),
        ):
            plan = self._deployment.plan
            results = self._driver.run(
                step, work, plan.max_in_flight, accumulate, plan.max_started, has_begun
            )
        log.publish(self._module.log)
        return self._merge(results, weights.all, shares.all, scale)

    @property
    def _adds_up(self) -> bool:
        """Whether the batch's loss is the sum of the micro-batches' losses, and no mean."""
        return self._loss_weighting == "sum"

    def _cut(self, batch: Any, rest: Sequence[Any]) -> tuple[CutBatch, LossWeights]:
        several = isinstance(self._module.trainer.train_dataloader, list)
        try:
            samples = None if several else self._reader.find(batch, rest)
            cut = CutBatch.of(batch, self._deployment.plan.micro_batches, samples)
            return cut, cut.weights(self._loss_weighting, self._copies)
        except BatchError as error:
            rank_zero_warn(
                f"The batch runs in one piece, so the stages work one after the other. {error}"
            )
            whole = CutBatch.uncut(batch)
            return whole, whole.weights(self._loss_weighting, self._copies)

    def _check_first(self, batch: CutBatch, rest: Sequence[Any], accumulate: bool) -> bool:
        """Check the first batch that is cut, within its own step.

        Returns:
            Whether the step has begun for that.
        """
        check = self._first_check
        if check is None or not check.is_wanted or len(batch.microbatches) == 1:
            return False
        self._first_check = None
        begin = self._deployment.coordinator.begin_step
        in_flight = self._deployment.plan.max_in_flight
        begin(in_flight, accumulate)
        check.run(batch, rest, partial(begin, in_flight, accumulate, is_trial=True))
        return True

    def _run_one(
        self, microbatch: Any, rest: Sequence[Any], log: StepLog, weight: SupportsFloat
    ) -> Any:
        """What runs in a micro-batch's turn."""
        log.weigh(weight)
        with torch.enable_grad(), self._module.trainer.precision_plugin.train_step_context():
            result = self._module.training_step(microbatch, *rest)
        self._deployment.check_forward_finished()
        log.note_loss(loss_of(result))
        return result

    def _merge(
        self, results: list[Any], weights: list[float], shares: list[float], loss_scale: float
    ) -> Any:
        rows = zip(results, weights, shares, strict=True)
        kept = [(r, w, s) for r, w, s in rows if loss_of(r) is not None]
        if not any(weight > 0 for _, weight, _ in kept):
            return None
        losses = [loss_of(result) for result, _, _ in kept]
        combined = weighted_mean(losses, [weight for _, weight, _ in kept])
        loss = _as_computed(combined, partial(self._publish, loss_scale))
        first = kept[0][0]
        if not isinstance(first, Mapping):
            return loss
        values = [{k: v for k, v in result.items() if k != "loss"} for result, _, _ in kept]
        total = sum(share for _, _, share in kept)
        merged = merge_values(values, [share / total for _, _, share in kept], "its result")
        if self._adds_up:
            added = (key for key in merged if are_losses([v[key] for v in values], losses))
            merged |= dict.fromkeys(added, combined)
        return {"loss": loss, **merged}

    def _publish(self, loss_scale: float, gradient: Tensor) -> None:
        """Show the gradients, when Lightning runs its backward."""
        self._scaling.note(gradient, loss_scale)
        self._gradients.publish()


class LossScaling:
    """Refuses a loss that was scaled after its gradients were computed.

    Where looking at a number means waiting for the device, it is looked at when the next step
    begins.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._last: tuple[HostCopy, float] | None = None

    def note(self, gradient: Tensor, expected: float) -> None:
        """The loss's own gradient, and what it should be.

        Raises:
            ModelError: If it is another.
        """
        self._last = self._copies.to_host([gradient]), expected
        if self._last[0].is_immediate:
            self.check_last()

    def check_last(self) -> None:
        """Look at what was noted last.

        Raises:
            ModelError: As `note`.
        """
        last, self._last = self._last, None
        if last is None:
            return
        copy, expected = last
        copy.wait()
        found = float(copy.tensors[0])
        # A loss in half precision is scaled in half precision.
        if math.isfinite(found) and abs(found - expected) > 5e-3 * expected:
            raise ModelError(
                f"The loss was scaled by {found:g} on its way to backward, and its gradients were "
                f"computed for {expected:g}; scale it inside training_step, or use "
                "micro_batching='boundary'."
            )


def _local_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters that are here, and those of them that several modules share."""
    local = [parameter for parameter in module.parameters() if not parameter.is_meta]
    uses: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return local, [parameter for parameter in local if uses[id(parameter)] > 1]


@contextmanager
def _logging_to(module: pl.LightningModule, log: StepLog) -> Iterator[None]:
    put_back = stand_in(module, "log", log.log)
    try:
        yield
    finally:
        put_back()


def _as_computed(loss: Tensor, publish: Callable[[Tensor], None]) -> Tensor:
    anchor = torch.zeros((), requires_grad=True)
    result: Tensor = _ComputedLoss.apply(anchor, loss, publish)  # type: ignore[no-untyped-call]
    return result


class _ComputedLoss(torch.autograd.Function):
    """A loss whose gradients exist already: its backward only shows them."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, loss: Tensor, publish: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.publish = publish
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.publish(gradient)
        return None, None, None
