"""A running average of weights, kept beside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

AveragingAction = Literal["begin", "update", "swap", "adopt"]


class AveragesWeights(Protocol):
    """Who keeps averages of weights that are not here."""

    def average_weights(
        self, action: AveragingAction, num_averaged: int = 0, decay: float | None = None
    ) -> None:
        """Do with those averages what is done with the ones here."""


class WeightAverages:
    """The averages of some tensors, at first equal to them.

    Args:
        tensors: Parameters and buffers that real numbers are stored in.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._pairs = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def update(self, num_averaged: int, decay: float | None) -> None:
        """Take the present weights in, as torch's `AveragedModel` does.

        Args:
            num_averaged: Updates before this one; the first one of all copies.
            decay: How much of the average stays; None weighs all updates equally.
        """
        for tensor, average in self._pairs:
            if num_averaged == 0:
                average.copy_(tensor)
            elif decay is None:
                average.lerp_(tensor, 1 / (num_averaged + 1))
            else:
                average.copy_(decay * average + (1 - decay) * tensor)

    def swap(self) -> None:
        """Exchange the weights and their averages."""
        self._pairs = [(tensor, _exchange(tensor, average)) for tensor, average in self._pairs]

    @torch.no_grad()
    def adopt(self) -> None:
        """Make the averages the weights."""
        for tensor, average in self._pairs:
            tensor.copy_(average)


def averaged_tensors(module: nn.Module) -> list[Tensor]:
    """What is averaged of a module: what trains, and its buffers, as far as they are here.

    What is frozen is its own average.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    return [tensor for tensor in (*trained, *buffers) if not tensor.is_meta]


def _exchange(tensor: Tensor, average: Tensor) -> Tensor:
    """Give the tensor its average's content; what it had is returned. Nothing is copied."""
    present = tensor.data
    tensor.data = average
    return present
