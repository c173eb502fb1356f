"""The trial of slices: does a layer compute on two slices what it computes on both together?

The layer runs on both as one sequence and slice by slice, forward and backward from a made-up
gradient. It answers with two relative differences: of its results, and of its gradients.

The loss is compared with the labels of each batch, for made-up logits of a small vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..model.captured_outputs import collecting
from ..model.layer_call import LayerCall, ResultForm, put_hidden
from ..model.layers import describe_layer
from .sliced_loss import LABELS, loss_arguments, of_slice, shifted
from .token_slices import REMEDY, SequenceKeys, Slice, SlicePass
from .tolerance import norm_error, relative_error, worst_gradient
from .twin import made_up

TRIED_SLICES = "slices of layers"
"""The kind of the collected outputs sent by a trial of slices."""

_INPUT = "hidden states"
_MOST = 1e3
# The entries of the vocabulary in the trial of a loss.
_FEW = 8
Gradients = dict[str, Tensor]


def tried_in_slices(
    layer: nn.Module,
    call: LayerCall,
    hidden: Tensor,
    run: Callable[..., Any] | None = None,
) -> Tensor:
    """Run a layer on a sequence and on its two slices; leaves no trace.

    Args:
        layer: The layer, in evaluation mode.
        call: Its call for the sequence, without a cache.
        hidden: Its hidden states, of the shape (samples, tokens, features).
        run: Calls the layer; None for the layer itself.

    Returns:
        The relative differences of results and of gradients, of the shape (2,).

    Raises:
        ModelError: If the layer cannot run on slices.
    """
    num_tokens = hidden.shape[1]
    end = (num_tokens + 1) // 2
    slices = [Slice(0, end, num_tokens), Slice(end, num_tokens, num_tokens)]
    try:
        with torch.enable_grad(), collecting(()):
            whole, expected = _whole(layer, call, hidden, run or layer)
            pieces, found = _in_slices(layer, call, hidden, run or layer, slices)
    except Exception as error:
        raise ModelError(
            f"{describe_layer(call.layer_index).capitalize()} ({type(layer).__name__}) cannot run "
            f"on slices of a sequence: {error} {REMEDY}"
        ) from error
    of_results = norm_error(torch.cat(pieces, 1), whole)
    of_gradients = worst_gradient(_defined(found, expected), _defined(expected, found)).error
    # A plan may round whatever crosses a boundary, and infinity would make all numbers undefined.
    return torch.tensor([of_results, of_gradients]).nan_to_num(_MOST).clamp(max=_MOST)


def loss_difference(
    call: LayerCall, function: Callable[..., Tensor], slices: Sequence[Slice]
) -> float:
    """How far the sum of the slices' losses is from the loss of the sequence.

    Args:
        call: The call of the loss for the sequence, with the labels.
        function: The loss.
        slices: The slices of the sequence.

    Returns:
        The relative difference of the losses or of the gradients of their logits, whichever is
        larger; infinite if one is undefined.

    Raises:
        BatchError: If an argument has an unknown form.
    """
    given, num_tokens = loss_arguments(call), slices[-1].end
    given |= {name: _of_few(given[name], given["ignore_index"]) for name in LABELS}
    given["vocab_size"] = _FEW
    of_sequence = shifted(given, num_tokens)
    labels = of_sequence["shift_labels"]
    numbers = torch.arange(labels.numel() * _FEW, dtype=torch.float32, device=labels.device)
    logits = numbers.sin().view(*labels.shape, _FEW).requires_grad_()
    with torch.enable_grad():
        whole = function(logits, **given)
        cut = logits.split([each.end - each.start for each in slices], 1)
        pieces = [
            function(piece.contiguous(), **of_slice(of_sequence, each.start, each.end))
            for each, piece in zip(slices, cut, strict=True)
        ]
        total = torch.stack(pieces).sum()
        of_slices, of_whole = (torch.autograd.grad(each, logits)[0] for each in (total, whole))
    if bool(total.isnan() & whole.isnan()):  # no label counts
        return 0.0
    return max(relative_error(total, whole), relative_error(of_slices, of_whole))


def _of_few(labels: Tensor | None, ignore_index: int) -> Tensor | None:
    """Labels of a small vocabulary; ignored ones stay."""
    return None if labels is None else torch.where(labels == ignore_index, labels, labels % _FEW)


def _defined(gradients: Gradients, others: Gradients) -> Gradients:
    """The gradients with zeros where the others are undefined too: the step fails by itself."""
    return {
        name: gradient.masked_fill(gradient.isnan() & others[name].isnan(), 0.0)
        if name in others
        else gradient
        for name, gradient in gradients.items()
    }


def _leaf(hidden: Tensor) -> Tensor:
    """Hidden states as a leaf with a gradient. Token ids have none, and the gradient of a whole
    embedding is large: their results are compared alone."""
    return hidden.detach().requires_grad_(hidden.is_floating_point())


def _trained(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in layer.named_parameters() if p.requires_grad}


def _whole(
    layer: nn.Module, call: LayerCall, hidden: Tensor, run: Callable[..., Any]
) -> tuple[Tensor, Gradients]:
    """The result for the sequence, and its gradients by name."""
    leaf, trained = _leaf(hidden), _trained(layer)
    args, kwargs = put_hidden(leaf, call.args, call.kwargs, call.place)
    out = ResultForm.of(run(*args, **kwargs), layer, call.layer_index).hidden
    if not leaf.requires_grad:
        return out.detach(), {}
    inputs = {_INPUT: leaf, **trained}
    gradients = torch.autograd.grad(out, [*inputs.values()], made_up(out), allow_unused=True)
    return out.detach(), _named(inputs, gradients)


def _in_slices(
    layer: nn.Module,
    call: LayerCall,
    hidden: Tensor,
    run: Callable[..., Any],
    slices: Sequence[Slice],
) -> tuple[list[Tensor], Gradients]:
    """The results for slices, and the sums of their gradients by name."""
    keys, trained = SequenceKeys(), _trained(layer)
    outs: list[Tensor] = []
    done: list[tuple[Tensor, SlicePass]] = []
    for each in slices:
        leaf, one = _leaf(each.cut(hidden)), SlicePass(keys)
        cut = each.cut_call(call, layer)
        result = one.calling(run, cut, layer)(leaf)
        outs.append(ResultForm.of(result, layer, call.layer_index).hidden)
        one.end_forward()
        done.append((leaf, one))
    if not leaf.requires_grad:
        return [out.detach() for out in outs], {}
    of_input: list[Tensor] = []
    sums: Gradients = {}
    for out, (leaf, one) in zip(reversed(outs), reversed(done), strict=True):
        one.begin_backward()
        inputs = {_INPUT: leaf, **trained}
        found = torch.autograd.grad(out, [*inputs.values()], made_up(out), allow_unused=True)
        for name, gradient in _named(inputs, found).items():
            if name == _INPUT:
                of_input.insert(0, gradient)
            else:
                sums[name] = sums[name] + gradient if name in sums else gradient
        one.end_backward()
    return [out.detach() for out in outs], {_INPUT: torch.cat(of_input, 1), **sums}


def _named(inputs: dict[str, Any], gradients: Sequence[Tensor | None]) -> Gradients:
    pairs = zip(inputs, gradients, strict=True)
    return {name: gradient for name, gradient in pairs if gradient is not None}
