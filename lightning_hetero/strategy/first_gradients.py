"""The gradients of a checked batch, as a whole and of its micro-batches together.

    loss ──▶ hidden states that came back      their gradients, and those of parameters and of
                                               collected outputs, such as router logits
    hidden states that were sent ──▶ the rest  the same, for made-up gradients of what was sent

The layers between do not run backwards: workers compute with their own code, which is checked
elsewhere. The made-up gradient of a hidden state is a simple function of it, so that a sample has
the same one in the batch and in its micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..coordinator.handover import TriedHandOver

# A gradient that changes the loss by less than this part of it, when the hidden states change by
# as much as they are, may be what is left of gradients that cancel each other.
_NOISE = 1e-4
# A small part of a loss, as one that balances experts, may make all gradients of an output.
_NOISE_OF_OUTPUTS = 1e-6
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

    def difference(self, cut: Sequence[WeighedRows]) -> float:
        """The difference to those of micro-batches together, relative to the norm."""
        norm = max(self.norm, *(each.norm for each in cut))
        if not self.noise < norm < math.inf:
            return 0.0
        return float(sum((each.row for each in cut), start=-self.row).norm()) / norm


@dataclass(frozen=True)
class Backward:
    """The gradients that a backward has found.

    Args:
        for_hidden: Those for the hidden states that the layers gave, one for each hand-over.
        noise: The norms below which these may be noise.
        for_parameters: Those for parameters.
    """

    for_hidden: Sequence[Tensor] = ()
    noise: Sequence[float] = ()
    for_parameters: Sequence[WeighedRows] = ()

    @classmethod
    def of(
        cls,
        ends: Sequence[Tensor],
        gradients: Sequence[Tensor],
        hidden: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
        least: float,
    ) -> Backward:
        """Run a backward.

        Args:
            ends: Where it begins.
            gradients: Theirs.
            hidden: The hidden states that the layers gave.
            parameters: Those that train.
            least: The least change of the ends that counts.
        """
        inputs = [*hidden, *parameters]
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if ends:
            found = torch.autograd.grad(
                ends, inputs, gradients, retain_graph=True, allow_unused=True
            )
        pairs = list(zip(found, inputs, strict=True))
        behind = len(hidden)
        return cls(
            [torch.zeros_like(of) if g is None else g.detach() for g, of in pairs[:behind]],
            [least / _size(each) for each in hidden],
            [
                WeighedRows.of(p.detach().new_zeros(p.shape[-1:]) if g is None else g, least, p)
                for g, p in pairs[behind:]
            ],
        )

    def difference(self, cut: Sequence[Backward]) -> float:
        """The largest difference to the same backward of micro-batches together, relative to the
        gradients' norms; 0 where they cannot be compared."""
        columns = [each.for_hidden for each in cut]
        if any(len(column) != len(self.for_hidden) for column in columns):
            return 0.0
        rows = zip(self.for_hidden, zip(*columns, strict=True), self.noise, strict=True)
        sums = zip(self.for_parameters, *(each.for_parameters for each in cut), strict=True)
        of_hidden = (_difference(*row) for row in rows)
        return max(
            [*of_hidden, *(whole.difference(pieces) for whole, *pieces in sums)], default=0.0
        )


@dataclass(frozen=True)
class Gradients:
    """The gradients that one run of a batch has.

    Args:
        of_loss: Those of the loss.
        of_outputs: Those of the loss for collected outputs that came back, by the kind.
        of_sent: Those of what was sent to the layers.
        num_sent: How many numbers were sent.
        factor: The gradient of a number that was sent, relative to another such number.
    """

    of_loss: Backward = Backward()
    of_outputs: Mapping[str, Backward] = field(default_factory=dict)
    of_sent: Backward = Backward()
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
        weights = torch.full_like(loss, weight * scale)
        least = _NOISE * scale * max(1.0, abs(float(loss.detach())))
        of_loss = Backward.of([loss], [weights], hidden, parameters, least)
        of_outputs = _of_outputs(loss, weights, tried, least / _NOISE * _NOISE_OF_OUTPUTS)
        if factor is None:
            # The layers are taken to change the size of a gradient as little as that of a state.
            factor = _norm(of_loss.for_hidden[-1]) / _size(hidden[-1])
        sent = [each for one in tried for each in one.sent if each.requires_grad]
        made_up = [each.detach().roll(1, -1) * factor for each in sent]
        least = _NOISE * factor * sum(_norm(each) ** 2 for each in sent)
        of_sent = Backward.of(sent, made_up, hidden, parameters, least)
        return cls(of_loss, of_outputs, of_sent, sum(each.numel() for each in sent), factor)

    def difference_for_loss(self, cut: Sequence[Gradients]) -> float:
        """The largest difference of the gradients of the loss to those of micro-batches together,
        relative to their norms; 0 where they cannot be compared."""
        return self.of_loss.difference([each.of_loss for each in cut])

    def difference_for_outputs(self, cut: Sequence[Gradients]) -> tuple[float, str]:
        """The largest difference of the gradients of the loss for collected outputs, and their
        kind."""
        nothing = Backward()
        found = (
            (own.difference([each.of_outputs.get(kind, nothing) for each in cut]), kind)
            for kind, own in self.of_outputs.items()
        )
        return max(found, default=(0.0, ""))

    def difference_before_layers(self, cut: Sequence[Gradients]) -> float:
        """The same of what was sent; 0 too where micro-batches are padded to other lengths, and
        where something is sent that does not belong to samples."""
        if sum(each.num_sent for each in cut) != self.num_sent:
            return 0.0
        return self.of_sent.difference([each.of_sent for each in cut])


def _of_outputs(
    loss: Tensor, weights: Tensor, tried: Sequence[TriedHandOver], least: float
) -> dict[str, Backward]:
    """The gradients of a loss for collected outputs, by their kind."""
    leaves: dict[str, list[Tensor]] = {}
    for kind, tensor in (each for one in tried for each in one.outputs):
        if tensor.requires_grad:
            leaves.setdefault(kind, []).append(tensor)
    return {
        kind: Backward.of([loss], [weights], tensors, [], least) for kind, tensors in leaves.items()
    }


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().float().norm())


def _size(tensor: Tensor) -> float:
    """How much a tensor may change: by as much as it is, and more if it is zero as yet."""
    return max(_norm(tensor), _LEAST_CHANGE * math.sqrt(tensor.numel()), 1e-6)


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
