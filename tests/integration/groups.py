"""One device that adds up the gradients of the plan's groups apart, and then adds the groups.

A group is a process and the micro-batches of which it runs a stage. Parameters that belong to no
stage on workers have one group, in the order of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeVar

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_hetero import Plan
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.pipeline.placement import COORDINATOR_STAGE, Placement

from ..models import fit

Module = TypeVar("Module", bound=pl.LightningModule)


class GroupSums:
    """The gradients of an accumulation window, by their groups.

    Args:
        module: The LightningModule.
        plan: Says which process runs which stage on a micro-batch.
    """

    def __init__(self, module: pl.LightningModule, plan: Plan) -> None:
        self._placement = Placement.of(plan)
        self._parameters = list(module.parameters())
        self._stage_of: dict[nn.Parameter, int] = {}
        layers = find_decoder_layers(module)
        for stage in self._placement.stages:
            for number in stage.layers:
                own = layers[number].module.parameters()
                self._stage_of |= dict.fromkeys(own, stage.number)
        self._sums: dict[tuple[str, nn.Parameter], Tensor] = {}

    def take(self, microbatch: int) -> None:
        """Take the gradients of a micro-batch of a window; no other backward has run since."""
        for parameter in self._parameters:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                stage = self._stage_of.get(parameter, COORDINATOR_STAGE)
                place = self._placement.process(stage, microbatch), parameter
                before = self._sums.get(place)
                self._sums[place] = gradient if before is None else before + gradient

    def put(self) -> None:
        """Put the sum of the groups into ``.grad``, in the plan's order of the processes."""
        for parameter in self._parameters:
            stage = self._stage_of.get(parameter)
            names = self._placement.processes[:1]
            names = names if stage is None else self._placement.stage(stage).processes
            found = [self._sums[n, parameter] for n in names if (n, parameter) in self._sums]
            parameter.grad = reduce(Tensor.add, found) if found else None
        self._sums.clear()


class InGroups(pl.Callback):
    """Lets Lightning on one device add up in groups; its batches are the plan's micro-batches.

    Args:
        plan: Says which process runs which stage on a micro-batch.
        window: The micro-batches of an optimizer step.
    """

    def __init__(self, plan: Plan, window: int) -> None:
        self._plan = plan
        self._window = window
        self._num_taken = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._sums = GroupSums(pl_module, self._plan)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The micro-batches are numbered on through an accumulation window.
        self._sums.take(self._num_taken % self._window)
        self._num_taken += 1
        if self._num_taken % self._window == 0:
            self._sums.put()


class InTurns(pl.Callback):
    """Adds up each window by another plan.

    Args:
        sums: One for each window; their plans have as many micro-batches.
        window: The micro-batches of an optimizer step.
    """

    def __init__(self, sums: Sequence[InGroups], window: int) -> None:
        self._sums = sums
        self._window = window
        self._num_taken = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for each in self._sums:
            each.on_fit_start(trainer, pl_module)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        number = self._num_taken // self._window
        self._num_taken += 1
        self._sums[number].on_after_backward(trainer, pl_module)


def fit_in_groups(
    module: Module, plan: Plan, data: Any, accumulate: int = 1, **options: Any
) -> Module:
    """Train on one device; ``data`` are the micro-batches, and the options those of the Trainer."""
    window = plan.micro_batches * accumulate
    callbacks = [*options.pop("callbacks", ()), InGroups(plan, window)]
    return fit(module, data=data, accumulate_grad_batches=window, callbacks=callbacks, **options)
