"""Keeps the gradients of a running step apart from those that Lightning knows of.

Lightning's order is forward, `zero_grad`, backward. Under the driver the backwards run inside the
forward, so their gradients must not be in `.grad` yet when `zero_grad` comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


class StepGradients:
    """Gradients of the coordinator's own parameters while a step's micro-batches run.

    Args:
        parameters: The coordinator's parameters.
        tied: Those of them that several parts of the model use, such as an embedding that is also
            the head. Their gradients come in several backwards per micro-batch; they are added up
            per micro-batch first, as one backward would, so that the sums come out bit-equal.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], tied: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._tied = tied
        self._before: list[Tensor | None] | None = None
        self._pending: list[Tensor | None] | None = None
        self._partial: dict[int, list[Tensor | None]] = {}

    def begin(self, accumulate: bool) -> None:
        """Start a step; with ``accumulate`` its gradients are added to those already there."""
        self._partial.clear()
        self._pending = None
        self._before = None if accumulate else self._take(self._parameters)

    def finish(self) -> None:
        """Set the step's gradients aside until `publish`, and show the ones from before."""
        if self._before is not None:
            self._pending = self._take(self._parameters)
            self._put(self._parameters, self._before)
            self._before = None

    def publish(self) -> None:
        """Add the step's gradients to `.grad`: this is the step's backward, seen from outside."""
        if self._pending is None:
            return
        for parameter, gradient in zip(self._parameters, self._pending, strict=True):
            _add(parameter, gradient)
        self._pending = None

    @contextmanager
    def of_microbatch(self, microbatch: int) -> Iterator[None]:
        """Inside, backwards of this micro-batch may run."""
        total = self._take(self._tied)
        self._put(self._tied, self._partial.pop(microbatch, [None] * len(self._tied)))
        try:
            yield
        finally:
            self._partial[microbatch] = self._take(self._tied)
            self._put(self._tied, total)

    def finish_microbatch(self, microbatch: int) -> None:
        """All backwards of the micro-batch have run."""
        partial = self._partial.pop(microbatch, [None] * len(self._tied))
        for parameter, gradient in zip(self._tied, partial, strict=True):
            _add(parameter, gradient)

    def _take(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        taken = [parameter.grad for parameter in parameters]
        self._put(parameters, [None] * len(parameters))
        return taken

    def _put(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _add(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    elif gradient is not None:
        parameter.grad += gradient
