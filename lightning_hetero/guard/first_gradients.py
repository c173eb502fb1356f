"""The gradients of a checked batch, as a whole and of its micro-batches together.

    loss ──▶ returned hidden states            their gradients, and gradients of parameters and of
                                               collected outputs, such as router logits
    sent hidden states ──▶ the rest            the same, for made-up gradients of the sent states

The layers between do not run backwards from there. Layers with code of the user's own run backwards
each by itself, from other made-up gradients (`pipeline/trial_backward.py`). The made-up gradient of
a hidden state is a simple function of it: a sample has the same gradient in the batch and in its
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from ..coordinator.batch_trials import TriedHandOver
from ..pipeline.microbatch import inner_backward
from ..pipeline.tolerance import (
    GRADIENTS,
    GRADIENTS_OF_OUTPUTS,
    MADE_UP_GRADIENTS,
    NOISE_OF_GRADIENTS,
    NOISE_OF_OUTPUTS,
    Compared,
    dim_of_cut,
    gradient_error,
    joined,
    likely_change,
)
from ..pipeline.trial_backward import TriedBackward, difference_of_backwards, other_gradients
from ..pipeline.twin import made_up

_SAFE = "the safe mode `micro_batching='boundary'` repairs it."


@dataclass(frozen=True)
class WeighedRows:
    """A possibly large gradient, as the sum of its rows, each with a weight of its own: the plain
    sum of an output embedding's rows is zero.

    Args:
        row: The sum.
        norm: The norm of the gradient.
        noise: The norm up to which it may be noise.
    """

    row: Tensor
    norm: float
    noise: float

    @classmethod
    def of(cls, gradient: Tensor, least: float, value: Tensor) -> WeighedRows:
        """Add up the rows of a gradient, dense or sparse.

        Args:
            gradient: The gradient for a tensor.
            least: The least change of the differentiated number that counts.
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
        return cls(weights @ rows, float(rows.norm()), least / likely_change(value))

    def difference(self, cut: Sequence[WeighedRows]) -> float:
        """The difference to the sum of the micro-batches' gradients, relative to the norm."""
        norm = max(self.norm, *(each.norm for each in cut))
        if not self.noise < norm < math.inf:
            return 0.0
        return float(sum((each.row for each in cut), start=-self.row).norm()) / norm


@dataclass(frozen=True)
class Backward:
    """The gradients from a backward.

    Args:
        for_hidden: The gradients for the hidden states of the layers, one for each hand-over.
        noise: The norms up to which these may be noise.
        for_parameters: The gradients for parameters.
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
            gradients: The gradients of the ends.
            hidden: The hidden states returned by the layers.
            parameters: The trained parameters.
            least: The least change of the ends that counts.
        """
        inputs = [*hidden, *parameters]
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if ends and inputs:
            found = torch.autograd.grad(
                ends, inputs, gradients, retain_graph=True, allow_unused=True
            )
        pairs = list(zip(found, inputs, strict=True))
        behind = len(hidden)
        return cls(
            [torch.zeros_like(of) if g is None else g.detach() for g, of in pairs[:behind]],
            [least / likely_change(each) for each in hidden],
            [
                WeighedRows.of(p.detach().new_zeros(p.shape[-1:]) if g is None else g, least, p)
                for g, p in pairs[behind:]
            ],
        )

    def difference(self, cut: Sequence[Backward]) -> float:
        """The largest difference to the same backward of micro-batches together, relative to the
        gradients' norms."""
        columns = [each.for_hidden for each in cut]
        rows = zip(self.for_hidden, zip(*columns, strict=True), self.noise, strict=True)
        sums = zip(self.for_parameters, *(each.for_parameters for each in cut), strict=True)
        of_hidden = (gradient_error(*_alike(*row[:2]), row[2]) for row in rows)
        return max(
            [*of_hidden, *(whole.difference(pieces) for whole, *pieces in sums)], default=0.0
        )


@dataclass(frozen=True)
class RunGradients:
    """The gradients of one run of a batch.

    Args:
        of_loss: The gradients of the loss.
        of_outputs: The gradients of the loss for returned collected outputs, by their kind.
        of_sent: The gradients from made-up gradients of the tensors sent to the layers.
        of_layers: The answers of layers with code of the user's own to made-up gradients.
        sent: The shapes of the sent tensors.
        factor: The size of the made-up gradients of sent tensors, relative to the tensors.
    """

    of_loss: Backward
    of_outputs: Mapping[str, Backward]
    of_sent: Backward
    of_layers: Sequence[TriedBackward]
    sent: Sequence[torch.Size]
    factor: float

    @classmethod
    def of(
        cls,
        loss: Tensor | None,
        tried: Sequence[TriedHandOver],
        weight: float,
        scale: float = 1.0,
        parameters: Sequence[nn.Parameter] = (),
        whole: RunGradients | None = None,
    ) -> RunGradients:
        """Run the backward of a loss as far as the hidden states, and the backward of the sent
        tensors.

        Args:
            loss: The loss; None where ``training_step`` skips the batch.
            tried: The hand-overs.
            weight: How much the loss counts.
            scale: The scale of all losses, so gradients are not too small for half precision.
            parameters: The coordinator's trained parameters.
            whole: The whole batch's gradients, for one of two micro-batches.
        """
        hidden = [each.back for each in tried]
        ends: list[Tensor] = []
        change = scale
        if loss is not None:
            change *= max(1.0, abs(float(loss.detach())))
            # A micro-batch without labels may have a mean over none of them.
            ends += [loss] if loss.requires_grad and weight else []
        weights = [torch.full_like(end, weight * scale) for end in ends]
        of_loss = Backward.of(ends, weights, hidden, parameters, NOISE_OF_GRADIENTS * change)
        of_outputs = _of_outputs(ends, weights, tried, NOISE_OF_OUTPUTS * change)
        sent = [each for one in tried for each in one.sent if each.requires_grad]
        if whole is None:
            # The layers are taken to change the size of a gradient as little as that of a state.
            pairs = zip(of_loss.for_hidden, hidden, strict=True)
            sizes = (_norm(gradient) / likely_change(of) for gradient, of in pairs)
            factor = max(sizes, default=0.0)
            factors = [factor] * len(sent)
        else:
            factor = whole.factor
            # Each micro-batch sends the tensors without a dimension of samples.
            shapes = [each.shape for each in sent]
            is_shared = [shape in whole.sent[n : n + 1] for n, shape in enumerate(shapes)]
            factors = [factor / 2 if each else factor for each in is_shared]
        sent_back = [made_up(each) * size for each, size in zip(sent, factors, strict=True)]
        least = NOISE_OF_GRADIENTS * factor * sum(_norm(each) ** 2 for each in sent)
        of_sent = Backward.of(sent, sent_back, hidden, parameters, least)
        of_layers = [each for one in tried for each in one.backwards]
        return cls(of_loss, of_outputs, of_sent, of_layers, [each.shape for each in sent], factor)

    def has_hand_overs_of(self, cut: Sequence[RunGradients]) -> bool:
        """Whether the layers were called as often for each micro-batch."""
        num_hand_overs = len(self.of_loss.for_hidden)
        return all(len(each.of_loss.for_hidden) == num_hand_overs for each in cut)

    def is_cut_into(self, cut: Sequence[RunGradients]) -> bool:
        """Whether the sent tensors, except tensors without samples, are the micro-batches' tensors
        together. Otherwise these may be padded to other lengths."""
        columns = [each.sent for each in cut]
        return all(len(column) == len(self.sent) for column in columns) and all(
            set(row) == {shape} or dim_of_cut(shape, row) is not None
            for shape, row in zip(self.sent, zip(*columns, strict=True), strict=True)
        )

    def differing(
        self, cut: Sequence[RunGradients], rounding: float, which: str
    ) -> tuple[str, bool] | None:
        """The worst difference to the gradients of micro-batches together, in words, and whether it
        ends a run; None if rounding explains all.

        Args:
            cut: The gradients of the micro-batches, with as many hand-overs each.
            rounding: The relative difference explained by rounding.
            which: The batch, as a word.
        """
        for_outputs, kind = self.difference_for_outputs(cut)
        outputs = GRADIENTS_OF_OUTPUTS.compare(for_outputs, rounding)
        loss = GRADIENTS.compare(self.difference_for_loss(cut), rounding)
        error = self.difference_before_layers(cut) if self.is_cut_into(cut) else 0.0
        before = MADE_UP_GRADIENTS.compare(error, rounding)
        of_layers = [each.of_layers for each in cut]
        layers = difference_of_backwards(self.of_layers, of_layers, rounding)
        found = [
            (outputs, _small_part(which, outputs, f" for {kind!r}")),
            (loss, _scaled(which, loss) if loss.is_large else _small_part(which, loss)),
            (before, _before_layers(which, before)),
            (layers, other_gradients(which, layers)),
        ]
        others = [(text, each.is_large) for each, text in found if each.is_other]
        return max(others, key=lambda each: each[1], default=None)

    def difference_for_loss(self, cut: Sequence[RunGradients]) -> float:
        """The largest difference of the gradients of the loss to the micro-batches' together,
        relative to their norms."""
        return self.of_loss.difference([each.of_loss for each in cut])

    def difference_for_outputs(self, cut: Sequence[RunGradients]) -> tuple[float, str]:
        """The largest difference of the gradients of the loss for collected outputs, and their
        kind."""
        found = (
            (own.difference([each.of_outputs[kind] for each in cut]), kind)
            for kind, own in self.of_outputs.items()
            if all(
                kind in each.of_outputs
                and len(each.of_outputs[kind].for_hidden) == len(own.for_hidden)
                for each in cut
            )
        )
        return max(found, default=(0.0, ""))

    def difference_before_layers(self, cut: Sequence[RunGradients]) -> float:
        """The largest relative difference of the gradients before the first remote layer."""
        return self.of_sent.difference([each.of_sent for each in cut])


class WatchesBackwards(TorchFunctionMode):
    """Inside, a ``training_step`` may not take gradients through layers on workers by itself: its
    graph ends before these layers, so the gradients would be None or incomplete.

    Args:
        tried: The hand-overs so far; the list grows.
    """

    def __init__(self, tried: Sequence[TriedHandOver]) -> None:
        super().__init__()
        self._tried = tried

    @override
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.autograd.grad:
            self._check(*args[:2])
        elif function in (torch.Tensor.backward, torch.autograd.backward):
            self._check(args[0])
        return function(*args, **(kwargs or {}))

    def _check(self, ends: Any, inputs: Any = None) -> None:
        """Check a backward from some tensors to some others, or to all.

        Raises:
            ModelError: With the remedies.
        """
        behind, beyond = _edges_behind(ends), set[_Edge]()
        # The earliest hand-over is the farthest one.
        for one in reversed(self._tried):
            came_back = [one.back, *(output.tensor for output in one.outputs)]
            if any(_edge_of(each) in behind | beyond for each in _tensors_in(came_back)):
                beyond |= _edges_behind(one.sent)
                if inputs is None:
                    raise inner_backward()
        if any(_edge_of(each) in beyond for each in _tensors_in(inputs)):
            raise inner_backward()


_Edge: TypeAlias = tuple[Node, int]


def _edges_behind(ends: Any) -> set[_Edge]:
    """The edges in reach of a backward from some tensors."""
    found: set[_Edge] = set()
    waiting = [_edge_of(end) for end in _tensors_in(ends)]
    while waiting:
        edge = waiting.pop()
        if edge not in found:
            found.add(edge)
            waiting += [(node, place) for node, place in edge[0].next_functions if node is not None]
    return found


def _edge_of(tensor: Tensor) -> _Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _tensors_in(some: Any) -> Iterator[Tensor]:
    """The tensors that require gradients."""
    for each in [some] if isinstance(some, Tensor) else some or ():
        if isinstance(each, Tensor) and each.requires_grad:
            yield each


def _of_outputs(
    ends: Sequence[Tensor], weights: Sequence[Tensor], tried: Sequence[TriedHandOver], least: float
) -> dict[str, Backward]:
    """The gradients of a loss for collected outputs, by their kind."""
    leaves: dict[str, list[Tensor]] = {}
    for kind, tensor in (each for one in tried for each in one.outputs):
        if tensor.requires_grad:
            leaves.setdefault(kind, []).append(tensor)
    return {
        kind: Backward.of(ends, weights, tensors, [], least) for kind, tensors in leaves.items()
    }


def _scaled(which: str, difference: Compared) -> str:
    return (
        f"The loss of the {which} batch is that of its micro-batches, but its gradients are not: "
        f"they differ by {difference}. It seems that the gradients are scaled by a number of the "
        f"batch, as in `loss / loss.detach()`; {_SAFE}"
    )


def _before_layers(which: str, difference: Compared) -> str:
    return (
        f"The code before the layers on workers makes other gradients of the {which} batch than of "
        f"its micro-batches: they differ by {difference}. It seems that a hook or an "
        "`autograd.Function` there uses a number of the batch, such as the norm of a gradient; "
        f"{_SAFE}"
    )


def _small_part(which: str, difference: Compared, of: str = "") -> str:
    return (
        f"The loss of the {which} batch is that of its micro-batches up to rounding, but its "
        f"gradients{of} are not: they differ by {difference}. It seems that a small part of the "
        "loss, such as one that balances experts, couples the samples of a batch, or is a mean "
        f"over something else than the rest of it, as over all positions beside labels; {_SAFE}"
    )


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().float().norm())


def _alike(whole: Tensor, pieces: Sequence[Tensor]) -> tuple[Tensor, Iterator[Tensor]]:
    """The whole and its possible values from the pieces: these joined along their samples; or sums
    over all samples and positions if pieces are padded to other lengths than the whole."""
    whole, pieces = whole.float(), [piece.float() for piece in pieces]
    if not whole.ndim:  # a loss from a worker with the head: a mean of the batch, or a sum
        losses = torch.stack(pieces)
        return whole, iter([losses.sum(0), losses.mean(0)])
    dim = dim_of_cut(whole.shape, [piece.shape for piece in pieces])
    if dim is not None:
        return whole, joined(pieces, dim)
    if {piece.shape[-1] for piece in pieces} != {whole.shape[-1]}:
        return whole, iter(())
    sums = [each.reshape(-1, each.shape[-1]).sum(0) for each in (whole, *pieces)]
    return sums[0], iter([torch.stack(sums[1:]).sum(0)])
