"""The training step of an uncut window, piece by piece.

    piece 0  training_step ─▶ backward
    piece 1                            training_step ─▶ backward
    Lightning                                                    zero_grad ─▶ backward

Lightning's own backward comes after its `zero_grad`. So the gradients of the pieces are set aside
until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from .._lightning import pl
from ..coordinator.deployment import Deployment
from ..devices.copies import Copies, PlainCopies
from ..errors import BatchError
from ..model.override import stand_in
from ..pipeline.driver import StepGradients
from ..pipeline.results import (
    BatchMetrics,
    LoggedPieces,
    StepLog,
    loss_of,
    merge_results,
    weighted_mean,
)
from ..window import Window
from .arguments import StepOptions
from .loaders import sizes_of
from .training_step import LossScaling, WholeBatchStep, as_computed, loss_scale_of, num_batches_done


class PieceByPiece:
    """Runs ``training_step`` and its backward for one piece of a window after the other.

    Args:
        module: The LightningModule, attached to its Trainer.
        copies: Read the scale of a loss.
    """

    def __init__(self, module: pl.LightningModule, copies: Copies) -> None:
        self._module = module
        self._scaling = LossScaling(copies)

    def run(
        self,
        window: Window,
        accumulates: bool,
        forward: Callable[[int, Any], Any],
        backward: Callable[[Tensor, Tensor], None],
    ) -> Any:
        """Run the step; returns the result of ``training_step`` for a batch.

        The ``backward`` of the returned loss only puts the gradients into ``.grad``.

        Args:
            window: On its device.
            accumulates: Whether gradients of earlier batches are kept.
            forward: Runs ``training_step`` on the piece with this number.
            backward: Runs the backward of a loss, beginning with this gradient.
        """
        self._scaling.check_last()
        local = [each for each in self._module.parameters() if not each.is_meta]
        gradients = StepGradients(local, [])
        metrics = BatchMetrics()
        pieces = LoggedPieces(range(len(window.pieces)), partial(sizes_of, window.pieces))
        log = StepLog(metrics, pieces=pieces)
        scale, results = loss_scale_of(self._module.trainer), []
        gradients.begin(accumulates)
        try:
            with ExitStack() as stack:
                stack.callback(stand_in(self._module, "log", log.log))
                stack.enter_context(metrics.gathering(self._module))
                for number, piece in enumerate(window.pieces):
                    log.weigh(lambda: 1.0, number)
                    result = forward(number, piece)
                    loss = loss_of(result)
                    if loss is not None:
                        backward(loss, torch.full_like(loss, 1 / window.size * scale))
                    # The graph ends with the piece.
                    results.append(apply_to_collection(result, Tensor, Tensor.detach))
        finally:
            gradients.finish()
        log.publish(self._module.log)
        return self._merged(window, results, partial(self._publish, gradients, scale))

    def _merged(
        self, window: Window, results: Sequence[Any], publish: Callable[[Tensor], None]
    ) -> Any:
        kept = [result for result in results if loss_of(result) is not None]
        if not kept:
            return None
        weights = [1 / window.size] * len(kept)
        combined = weighted_mean([loss_of(result) for result in kept], weights)
        loss = as_computed(combined, publish)
        if not isinstance(kept[0], Mapping):
            return loss
        return {"loss": loss, **merge_results(kept, weights, None)}

    def _publish(self, gradients: StepGradients, scale: float, gradient: Tensor) -> None:
        """Publish the gradients when Lightning runs its backward."""
        self._scaling.note(gradient, scale)
        gradients.publish()


class WindowStep(WholeBatchStep):
    """Runs ``training_step`` once per batch, and once per piece of a window."""

    def __init__(
        self, module: pl.LightningModule, deployment: Deployment, options: StepOptions
    ) -> None:
        super().__init__(module, deployment, options)
        self._pieces = PieceByPiece(module, deployment.coordinator.stages.copies)

    @override
    def run(self, training_step: Callable[[], Any], args: Sequence[Any]) -> Any:
        window, *rest = args
        if not isinstance(window, Window):
            return super().run(training_step, args)
        check_automatic(self._module)
        before, accumulates = num_batches_done(self._module.trainer), self.accumulates
        recorder = self._deployment.coordinator.recorder

        def forward(number: int, piece: Any) -> Any:
            training_step = partial(training_step_of, self._module, piece, rest)
            num_samples = self._reader.count(piece, rest, number)
            step = before * window.size + number + 1
            return self._run_whole(training_step, num_samples, accumulates or number > 0, step)

        def backward(loss: Tensor, gradient: Tensor) -> None:
            with recorder.span("backward"), self._deployment.draws.of_latest():
                loss.backward(gradient)

        return self._pieces.run(window, accumulates, forward, backward)


class WindowsAlone:
    """Trains windows, uncut, when all layers are in this process."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        copies = PlainCopies(module.trainer.strategy.root_device)
        self._pieces = PieceByPiece(module, copies)

    def run(self, window: Window, rest: Sequence[Any]) -> Any:
        """Run the step of a window, as `PieceByPiece.run` does.

        Args:
            window: On its device.
            rest: The other arguments of ``training_step``.
        """
        check_automatic(self._module)
        trainer = self._module.trainer
        is_first = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0

        def forward(_number: int, piece: Any) -> Any:
            return training_step_of(self._module, piece, rest)

        return self._pieces.run(window, not is_first, forward, Tensor.backward)


def training_step_of(module: pl.LightningModule, batch: Any, rest: Sequence[Any]) -> Any:
    """The result of the user's ``training_step`` for a batch, under the Trainer's precision."""
    with torch.enable_grad(), module.trainer.precision_plugin.train_step_context():
        return module.training_step(batch, *rest)


def check_automatic(module: pl.LightningModule) -> None:
    """Refuse windows where ``training_step`` steps optimizers by itself.

    Raises:
        BatchError: With the remedy.
    """
    if not module.automatic_optimization:
        raise BatchError(
            f"{type(module).__name__} has automatic_optimization=False, so its `training_step` "
            "would step the optimizer once for each piece of a window. Give the Trainer the "
            "loader without `windows(...)`, and step after every n-th batch in `training_step`; "
            "or set automatic_optimization=True."
        )
