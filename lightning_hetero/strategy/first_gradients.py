"""The gradients of a checked batch, as a whole and of its micro-batches together.

    loss ──▶ hidden states that came back      their gradients, and those of parameters
    hidden states that were sent ──▶ the rest  the same, for made-up gradients of what was sent

The layers between do not run backwards: workers compute with their own code, which is checked
elsewhere. The made-up gradient of a hidden state is a simple function of it, so that a sample has
the same one in the batch and in its micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..coordinator.handover import TriedHandOver

# A gradient that changes the loss by less than this part of it, when the hidden states change by
# as much as they are, may be what is left of gradients that cancel each other.
_NOISE = 1e-4
# Parameters that are zero as yet, as those of adapters, change by about this much.
_LEAST_CHANGE = 1e-2


@dataclass(frozen=True)
class WeighedRows:
    """A gradient, which may be large, as the sum of its rows, each with a weight of its own: those
    of an output embedding add up to zero.

    Args:
        row: The sum.
        norm: The norm of the gradient.
        noise: The norm below which it may be noise.
    """

    row: Tensor
    norm: float
    noise: float

    @classmethod
    def of(cls, gradient: Tensor, least: float, value: Tensor) -> WeighedRows:
        """Add up the rows of a gradient, dense or sparse.

        Args:
            gradient: The gradient for a tensor.
            least: The least change that counts, of what it is the gradient of.
            value: The tensor.
        """
        found = gradient.detach()
        rows, places = found, None
        if found.is_sparse:
            found = found.coalesce()
            rows, places = found.values(), found.indices()[0].cpu()
        rows = rows.float().reshape(-1, rows.shape[-1] if rows.ndim else 1)
        num_rows = len(rows) if places is None else len(gradient)
        weights = torch.randn(num_rows, generator=torch.Generator().manual_seed(0))
        weights = (weights if places is None else weights[places]).to(rows.device)
        return cls(weights @ rows, float(rows.norm()), least / _size(value))


@dataclass(frozen=True)
class Gradients:
    """The gradients that one run of a batch has.

    Args:
        of_hidden: Those of the loss for the hidden states that the layers gave, one for each
            hand-over.
        noise: The norms below which they may be noise.
        of_loss: Those of the loss for parameters.
        of_sent: Those of what was sent to the layers, for parameters and for what came back before.
        num_sent: How many numbers were sent.
        factor: The gradient of a number that was sent, relative to another such number.
    """

    of_hidden: Sequence[Tensor] = ()
    noise: Sequence[float] = ()
    of_loss: Sequence[WeighedRows] = ()
    of_sent: Sequence[WeighedRows] = ()
    num_sent: int = 0
    factor: float = 1.0

    @classmethod
    def of(
        cls,
        loss: Tensor | None,
        tried: Sequence[TriedHandOver],
        weight: float,
        scale: float = 1.0,
        parameters: Sequence[nn.Parameter] = (),
        factor: float | None = None,
    ) -> Gradients:
        """Run the backward of a loss as far as the hidden states, and that of what was sent.

        Args:
            loss: The loss; None where ``training_step`` skips the batch.
            tried: The hand-overs.
            weight: How much the loss counts.
            scale: What scales all losses, so that no gradient is too small for half precision.
            parameters: Those of the coordinator that train.
            factor: That of the whole batch for a micro-batch.
        """
        hidden = [each.back for each in tried]
        if loss is None or not loss.requires_grad or not hidden or weight == 0:
            return cls()
        least = _NOISE * scale * max(1.0, abs(float(loss.detach())))
        weights = torch.full_like(loss, weight * scale)
        of_hidden, of_loss = _gradients([loss], [weights], hidden, parameters)
        norms = [max(_norm(each), 1e-6) for each in hidden]
        if factor is None:
            # The layers are taken to change the size of a gradient as little as that of a state.
            factor = _norm(of_hidden[-1]) / norms[-1]
        sent = [each for one in tried for each in one.sent if each.requires_grad]
        made_up = [each.detach().roll(1, -1) * factor for each in sent]
        before, of_sent = _gradients(sent, made_up, hidden, parameters)
        least_sent = _NOISE * factor * sum(_norm(each) ** 2 for each in sent)
        return cls(
            of_hidden,
            [least / norm for norm in norms],
            [WeighedRows.of(g, least, p) for g, p in zip(of_loss, parameters, strict=True)],
            [
                WeighedRows.of(g, least_sent, value)
                for g, value in zip((*before, *of_sent), (*hidden, *parameters), strict=True)
            ],
            sum(each.numel() for each in sent),
            factor,
        )


def _gradients(
    of: Sequence[Tensor],
    given: Sequence[Tensor],
    hidden: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients for hidden states, and for parameters: a zero for one that is not used."""
    inputs = [*hidden, *parameters]
    found: Sequence[Tensor | None] = [None] * len(inputs)
    if of:
        found = torch.autograd.grad(of, inputs, given, retain_graph=True, allow_unused=True)
    num_hidden = len(hidden)
    for_hidden = zip(hidden, found[:num_hidden], strict=True)
    return (
        [torch.zeros_like(each) if g is None else g.detach() for each, g in for_hidden],
        [
            p.detach().new_zeros(p.shape[-1:]) if g is None else g
            for p, g in zip(parameters, found[num_hidden:], strict=True)
        ],
    )


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().float().norm())


def _size(tensor: Tensor) -> float:
    """How much a tensor may change: by as much as it is, and more if it is zero as yet."""
    return max(_norm(tensor), _LEAST_CHANGE * math.sqrt(tensor.numel()), 1e-6)


def difference_for_loss(whole: Gradients, cut: Sequence[Gradients]) -> float:
    """The largest difference of the gradients of the loss, relative to their norm; 0 where they
    cannot be compared."""
    columns = [each.of_hidden for each in cut]
    if any(len(column) != len(whole.of_hidden) for column in columns):
        return 0.0
    rows = zip(whole.of_hidden, zip(*columns, strict=True), whole.noise, strict=True)
    for_hidden = max((_difference(*row) for row in rows), default=0.0)
    return max(for_hidden, _difference_of_sums(whole.of_loss, [each.of_loss for each in cut]))


def difference_before_layers(whole: Gradients, cut: Sequence[Gradients]) -> float:
    """The largest difference of the gradients of what was sent, relative to their norm; 0 where
    they cannot be compared, as where micro-batches are padded to other lengths."""
    if sum(each.num_sent for each in cut) != whole.num_sent:
        return 0.0
    return _difference_of_sums(whole.of_sent, [each.of_sent for each in cut])


def _difference_of_sums(
    whole: Sequence[WeighedRows], cut: Sequence[Sequence[WeighedRows]]
) -> float:
    if any(len(each) != len(whole) for each in cut):
        return 0.0
    found = 0.0
    for expected, *pieces in zip(whole, *cut, strict=True):
        norm = max(expected.norm, *(each.norm for each in pieces))
        if expected.noise < norm < math.inf:
            row = sum((each.row for each in pieces), start=-expected.row)
            found = max(found, float(row.norm()) / norm)
    return found


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
