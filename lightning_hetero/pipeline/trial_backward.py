"""The backward of layers in a trial: do the samples of a batch have the gradients that they have in
their micro-batches?

A hook, an ``autograd.Function`` or a scale in a layer's forward may use a number of the batch, such
as the norm of a gradient. The forwards are the same then, and the gradients are not. So each layer
with code of the user's own runs backwards in a trial, by itself, from a made-up gradient that is a
simple function of what it returns. Of the gradients a stage sends one number for each row of its
input, and three for each parameter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..model.captured_outputs import collecting
from ..model.layer_call import LayerCall, put_hidden, tensors_of
from ..model.layers import describe_layer, has_own_code
from .tolerance import (
    FINE,
    MADE_UP_GRADIENTS,
    NOISE_IN_LAYERS,
    Compared,
    dim_of_cut,
    joined,
    likely_change,
)
from .twin import made_up, numbers_of, rows_of

logger = logging.getLogger(__name__)

TRIED = "gradients of layers"
"""The kind of the collected outputs sent by a trial with backwards."""

# The sizes at which gradients are clipped, or divided by their norms, are not known here: these are
# about the largest and the smallest of a training.
_SIZES = (1.0, 1e-3)


def tried_backward(layer: nn.Module, call: LayerCall, hidden: Tensor) -> list[Tensor]:
    """Run a layer with code of the user's own backwards, and leave no trace.

    Args:
        layer: The layer.
        call: Its call, with its tensors.
        hidden: Its hidden states.

    Returns:
        The tensors to send; empty if the layer has no such code, or cannot run backwards in a
        trial.
    """
    # Token ids have no gradient, and a forward would fill the cache.
    if not has_own_code(layer) or not hidden.is_floating_point() or call.cache is not None:
        return []
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    sent: list[Tensor] = []
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_()
        args, kwargs = put_hidden(leaf, call.args, call.kwargs, call.place)
        try:
            with collecting(()):
                out = tensors_of(layer(*args, **kwargs), layer, call)[call.hidden_at]
            least = NOISE_IN_LAYERS * float(out.detach().float().norm()) ** 2
            for size in _SIZES:
                of_input, *others = torch.autograd.grad(
                    out,
                    [leaf, *trained],
                    made_up(out) * size,
                    retain_graph=size != _SIZES[-1],
                    allow_unused=True,
                )
                sent.append(_rows(torch.zeros_like(leaf) if of_input is None else of_input))
                sent.append(_numbers(trained, others, least * size, leaf.device))
        except Exception as error:
            # The step itself fails in the same way, unless the layer must be in training mode.
            logger.info(
                "%s cannot run backwards in the check of the first batch, so whether its gradients "
                "depend on how a batch is cut is not known: %s",
                describe_layer(call.layer_index),
                error,
            )
            return []
    return sent


def _rows(gradient: Tensor) -> Tensor:
    """One number for each row."""
    if gradient.ndim < 2:
        return gradient.detach().float()
    return rows_of(gradient)[:, 0].reshape(gradient.shape[:-1])


def _numbers(
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor | None],
    least: float,
    device: torch.device,
) -> Tensor:
    """For each gradient of a parameter one number, its norm, and the norm below which it may be
    noise."""
    found = torch.zeros(len(parameters), 3, device=device)
    for row, parameter, gradient in zip(found, parameters, gradients, strict=True):
        row.copy_(numbers_of(gradient, device)[[0, 2, 2]])
        row[2] = math.inf if gradient is None else least / likely_change(parameter)
    return found


@dataclass(frozen=True)
class TriedBackward:
    """The answer of one backward of one layer.

    Args:
        rows: A number for each row of the gradient of the layer's input.
        parameters: Three numbers for each parameter's gradient.
    """

    rows: Tensor
    parameters: Tensor


def backwards_in(tensors: Sequence[Tensor]) -> list[TriedBackward]:
    """The answers of layers, one after the other."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return [TriedBackward(rows, parameters) for rows, parameters in pairs]


def difference_of_backwards(
    whole: Sequence[TriedBackward], cut: Sequence[Sequence[TriedBackward]], rounding: float
) -> Compared:
    """The largest relative difference of the backwards of a batch to those of its micro-batches
    together; 0 where they cannot be compared.

    Args:
        whole: The backwards of the batch.
        cut: The backwards of each micro-batch.
        rounding: The relative difference explained by rounding. Where it is large, the gradients of
            parameters are not compared: the gradient of a key's bias is only rounding, and a token
            may take another expert by rounding.
    """
    has_exact_sums = rounding < FINE and torch.get_float32_matmul_precision() == "highest"
    found = [0.0]
    if all(len(piece) == len(whole) for piece in cut):
        for one, pieces in zip(whole, zip(*cut, strict=True), strict=True):
            rows = [piece.rows for piece in pieces]
            dim = dim_of_cut(one.rows.shape, [each.shape for each in rows])
            if dim is None:
                found = [0.0]  # padded to other lengths, for example
                break
            found.append(_difference_of_rows(one.rows, rows, dim))
            if has_exact_sums:
                found.append(_difference_of_sums(one, pieces))
    return MADE_UP_GRADIENTS.compare(max(found), rounding)


def _difference_of_rows(whole: Tensor, pieces: Sequence[Tensor], dim: int) -> float:
    """The median difference of the rows: a single row may differ by rounding, for example if its
    token takes another expert."""
    differences = []
    for together in joined(pieces, dim):
        scale = torch.maximum(whole.abs(), together.abs())
        relative = ((whole - together).abs() / scale).nan_to_num(0.0, 0.0)
        differences.append(float(relative.median()) if relative.numel() else 0.0)
    return min(differences, default=0.0)


def _difference_of_sums(whole: TriedBackward, pieces: Sequence[TriedBackward]) -> float:
    numbers = torch.stack([whole.parameters, *(piece.parameters for piece in pieces)])
    norms = numbers[:, :, 1].amax(0)
    apart = (numbers[1:, :, 0].sum(0) - numbers[0, :, 0]).abs()
    counts = (norms > numbers[0, :, 2]) & norms.isfinite() & apart.isfinite()
    return float((apart / norms)[counts].max()) if bool(counts.any()) else 0.0


def other_gradients(which: str, difference: Compared) -> str:
    """A sentence on other gradients, with the remedies.

    Args:
        which: The batch, as a word.
        difference: The difference of the gradients.
    """
    return (
        f"The layers on workers make other gradients of the {which} batch than of its "
        f"micro-batches: they differ by {difference}. It seems that a hook, an "
        "`autograd.Function` or a scale in their forward uses a number of the batch, such as the "
        "norm of a gradient or how many numbers there are. `micro_batches=1` keeps the batch whole,"
        " or keep these layers with the coordinator and use `micro_batching='boundary'`."
    )
