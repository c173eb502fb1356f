"""The gradients of a checked batch, as a whole and of its micro-batches together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A gradient that changes the loss by less than this part of it, when the hidden states change by
# as much as they are, may be what is left of gradients that cancel each other.
_NOISE = 1e-4


@dataclass(frozen=True)
class Gradients:
    """The gradients of a loss for the hidden states that the layers gave, one for each hand-over.

    Args:
        tensors: The gradients.
        noise: The norms below which they may be noise.
    """

    tensors: Sequence[Tensor]
    noise: Sequence[float]

    @classmethod
    def of(
        cls, loss: Tensor | None, hidden: Sequence[Tensor], weight: float, scale: float = 1.0
    ) -> Gradients:
        """Run the backward of a loss as far as the hidden states.

        Args:
            loss: The loss; None where ``training_step`` skips the batch.
            hidden: The hidden states, which want gradients.
            weight: How much the loss counts.
            scale: What scales all losses, so that no gradient is too small for half precision.
        """
        if loss is None or not loss.requires_grad or not hidden or weight == 0:
            return cls([], [])
        factor = torch.full_like(loss, weight * scale)
        found = torch.autograd.grad(loss, hidden, factor, allow_unused=True, materialize_grads=True)
        least = _NOISE * scale * max(1.0, abs(float(loss.detach())))
        norms = (max(float(each.detach().float().norm()), 1e-6) for each in hidden)
        return cls([each.detach() for each in found], [least / norm for norm in norms])


def difference_of_gradients(whole: Gradients, cut: Sequence[Gradients]) -> float:
    """The largest difference, relative to the gradients' norm; 0 where they cannot be compared."""
    columns = [each.tensors for each in cut]
    if any(len(column) != len(whole.tensors) for column in columns):
        return 0.0
    rows = zip(whole.tensors, zip(*columns, strict=True), whole.noise, strict=True)
    return max((_difference(*row) for row in rows), default=0.0)


def _difference(whole: Tensor, pieces: Sequence[Tensor], noise: float) -> float:
    found, expected = _alike(whole.float(), [piece.float() for piece in pieces])
    if found.shape != expected.shape:
        return 0.0
    scale = max(float(found.norm()), float(expected.norm()))
    # What is not finite is too large, and a loss scaler would skip the step.
    if not noise < scale < math.inf:
        return 0.0
    return float((found - expected).norm()) / scale


def _alike(whole: Tensor, pieces: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The pieces joined along their samples, and the whole; or sums over all samples and positions
    if pieces are padded to other lengths than the whole."""
    for dim in range(min(whole.ndim, 2)):
        sizes = [_others(piece, dim) for piece in pieces]
        num_samples = sum(piece.shape[dim] for piece in pieces)
        if sizes == [_others(whole, dim)] * len(pieces) and num_samples == whole.shape[dim]:
            return torch.cat([*pieces], dim), whole
    if {piece.shape[-1] for piece in pieces} != {whole.shape[-1]}:
        return whole.new_zeros(0), whole
    sums = [each.reshape(-1, each.shape[-1]).sum(0) for each in (whole, *pieces)]
    return torch.stack(sums[1:]).sum(0), sums[0]


def _others(tensor: Tensor, dim: int) -> list[int]:
    """The sizes of a tensor's other dimensions."""
    return [*tensor.shape[:dim], *tensor.shape[dim + 1 :]]
