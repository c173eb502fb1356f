"""The accumulation window: the backwards of its batches go on while the next batch begins.

    training_step of batch 0   forwards, losses │ backwards are left
    Lightning, hooks           zero_grad, backward, on_train_batch_end, on_train_batch_start
    training_step of batch 1   the left backwards, and the forwards and losses of this batch
    ...
    the window's last batch    everything, to the end: the optimizer steps after it

The user's code, its order and every bit are the same as for batches one after the other. Code that
looks at a gradient or at a parameter waits (`pipeline/awaited.py`), and so do messages to the
workers outside of the step (`Connections.settle`). So a list of hooks is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from .._lightning import pl
from ..model.placeholders import training_flags
from ..pipeline.awaited import AwaitedGradients, asking_for_gradients, may_be_awaited
from ..pipeline.driver import Driver
from ..pipeline.turns import current_turn

if TYPE_CHECKING:
    from ..coordinator.connections import Connections
    from ..coordinator.replicas import HostedReplicas

_NOTHING = object()


@dataclass(frozen=True)
class _Left:
    """The parameters' training flags, and the attributes of each module, as a batch has left
    them."""

    flags: Sequence[bool]
    attributes: Sequence[Mapping[str, Any]]


class AccumulationWindow:
    """Leaves backwards of a batch for the time of the next one. Implements `Unfinished`.

    Args:
        driver: Runs the micro-batches.
        parameters: The parameters of this process.
        modules: The modules of this process.
        connections: The workers.
        hosted: The layers with a replica in this process; None without them.
    """

    def __init__(
        self,
        driver: Driver,
        parameters: Sequence[nn.Parameter],
        modules: Iterable[nn.Module],
        connections: Connections,
        hosted: HostedReplicas | None,
    ) -> None:
        self._driver = driver
        self._parameters = parameters
        self._modules = [*modules]
        self._attributes = [vars(module) for module in self._modules]
        self._ignored = {*vars(pl.LightningModule())} - {"training"}
        self._connections = connections
        self._hosted = hosted
        self._awaited = AwaitedGradients(parameters, self._wait)
        # By the number of a batch's first micro-batch.
        self._left: dict[int, _Left] = {}
        self._num_microbatches = 0
        self._is_inside = False
        # Whether the gradients of the latest left batch are in `.grad`.
        self._is_guarded = False
        self._has_said = self._has_said_observed = False

    @property
    def has_left(self) -> bool:
        """Whether backwards of its batches have still to run."""
        return self._driver.has_left

    def may_leave(self, is_last: bool) -> bool:
        """Whether the present batch's backwards may be left.

        Args:
            is_last: Whether the optimizer steps after the batch.
        """
        if is_last:
            return False
        if obstacle := self._obstacle():
            self._say(obstacle)
            return False
        return self._driver.gradients.can_be_left

    def _obstacle(self) -> str:
        """Why backwards cannot be left, in words; empty if they can be."""
        if torch.is_anomaly_enabled():
            return "anomaly detection is on"
        if any(each._backward_hooks or each._backward_pre_hooks for each in self._modules):
            return "a module here has a backward hook"  # hooks of the batch read what it keeps
        if not may_be_awaited(self._parameters):
            return "a parameter that trains here is of a class of its own"
        return self._driver.gradients.obstacle

    def _say(self, obstacle: str) -> None:
        """Say once why each batch of a window waits for its backwards."""
        if not self._has_said:
            self._has_said = True
            rank_zero_info(
                "each batch of an accumulation window waits for its backwards, so that stages work "
                f"one after the other: {obstacle}; `lightning_hetero.windows(loader, n)` fills them"
            )

    def _stay(self) -> None:
        """Let the present batch wait for its backwards: code has asked for a gradient of one."""
        if self._driver.stay():
            self._say("`training_step` asks for gradients of tensors by a hook or `retain_grad`")

    def _observe(self, num_microbatches: int, function: str) -> None:
        """Warn once that code gets the gradients of micro-batches."""
        if num_microbatches > 1 and not self._has_said_observed:
            self._has_said_observed = True
            rank_zero_warn(
                f"`training_step` looks at the gradient of a tensor by `{function}`: it gets that "
                "of each micro-batch, by the micro-batch's part of the batch, and not that of the "
                "batch at once. With `micro_batching='boundary'` it gets that of the batch."
            )

    @contextmanager
    def batch(self, accumulates: bool, num_microbatches: int) -> Iterator[int]:
        """Inside, a batch runs; the block gets the number of its first micro-batch in the window.

        Args:
            accumulates: Whether gradients of the batches before are kept.
            num_microbatches: The micro-batches of the batch.
        """
        if not accumulates:
            self.finish()  # of a window without an optimizer step
            self._num_microbatches = 0
        self._connections.take_up()
        self._is_guarded = False
        if self.has_left:
            self._awaited.begin(while_step_runs=True)
        first = self._num_microbatches
        self._num_microbatches += num_microbatches
        self._is_inside = True
        try:
            with asking_for_gradients(self._stay, partial(self._observe, num_microbatches)):
                yield first
        except BaseException:
            self._is_inside = False
            self.drop()
            raise
        self._is_inside = False
        if self.has_left:
            self._left[first] = self._present()
            self._connections.leave(self)

    def guard(self) -> None:
        """From now on, let code wait when it looks at gradients: `.grad` has the batch's
        gradients."""
        if self.has_left:
            self._is_guarded = True
            self._awaited.begin(while_step_runs=False)

    def finish(self) -> None:
        """Wait until all backwards have run.

        Raises:
            WorkerError: If a worker fails.
        """
        self._connections.take_up()
        self._awaited.end()
        was_guarded, self._is_guarded = self._is_guarded, False
        if self.has_left:
            self._driver.finish()
            if self._hosted is not None and was_guarded:
                self._hosted.note_gradients()
        self._left.clear()

    def drop(self) -> None:
        """Forget the left backwards, after an error."""
        self._awaited.end()
        self._is_guarded = False
        self._driver.drop()
        self._left.clear()

    @contextmanager
    def as_left(self, first: int) -> Iterator[None]:
        """Inside, parameters train and modules have the attributes as a batch has left them.

        A parameter frozen meanwhile would miss its gradient, and a forward repeated in its backward
        would compute other values in another mode or with other attributes.

        Args:
            first: The number of the batch's first micro-batch.
        """
        present, left = self._present(), self._left[first]
        self._become(left, present)
        try:
            yield
        finally:
            self._become(present, left)

    def _present(self) -> _Left:
        attributes = [
            {name: value for name, value in held.items() if name not in self._ignored}
            for held in self._attributes
        ]
        return _Left(training_flags(self._parameters), attributes)

    def _become(self, wanted: _Left, before: _Left) -> None:
        """Change the differing flags and attributes, except attributes set meanwhile by a hook of a
        backward."""
        for parameter, flag in zip(self._parameters, wanted.flags, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        for held, new, old in zip(
            self._attributes, wanted.attributes, before.attributes, strict=True
        ):
            for name in new.keys() | old.keys():
                value, former = new.get(name, _NOTHING), old.get(name, _NOTHING)
                if value is former or held.get(name, _NOTHING) is not former:
                    continue
                if value is _NOTHING:
                    del held[name]
                else:
                    held[name] = value

    def _wait(self) -> None:
        """Wait for the gradients at which code looks."""
        if not self._is_inside:
            self.finish()
        elif current_turn() is not None:
            self._driver.wait_for_earlier()
            self._awaited.end()
