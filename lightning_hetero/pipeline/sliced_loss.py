"""The loss of a sequence in slices along its tokens: it is the sum of the losses of slices.

The label of a token is the next token. Labels are shifted before the cut, since the label of a
slice's last token lies in the next slice. Each slice divides by the number of labels of the whole
sequence:

    tokens     0   1   2  |  3   4   5
    labels     1   2   3  |  4   5   -
    loss    (l0 + l1 + l2) / 5 + (l3 + l4) / 5

A slice with ignored labels alone has the loss 0. A sequence of them has NaN, as in transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from ..errors import BatchError
from ..model.layer_call import LayerCall, put_hidden
from ..model.placeholders import tensors_in

_LOGITS = "logits"
LABELS = ("labels", "shift_labels")
"""The arguments with the tokens to predict."""

_SIGNATURE = inspect.signature(ForCausalLMLoss)


def cut_loss(call: LayerCall, start: int, end: int, num_tokens: int) -> LayerCall:
    """The call of the loss for a slice of a sequence.

    Args:
        call: The call for the whole sequence.
        start: The number of the slice's first token.
        end: The number after its last one.
        num_tokens: The length of the sequence.

    Raises:
        BatchError: If an argument has an unknown form.
    """
    kwargs = of_slice(loss_arguments(call), start, end, num_tokens)
    return replace(call, args=(), kwargs=kwargs, place=_LOGITS)


def loss_arguments(call: LayerCall) -> dict[str, Any]:
    """All arguments of a call of the loss by name, but its logits."""
    args, kwargs = put_hidden(torch.empty(0), call.args, call.kwargs, call.place)
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    others: dict[str, Any] = given.pop("kwargs")
    return {name: value for name, value in given.items() if name != _LOGITS} | others


def of_slice(given: Mapping[str, Any], start: int, end: int, num_tokens: int) -> dict[str, Any]:
    """The arguments of the loss of a slice; see `cut_loss`.

    Args:
        given: The arguments for the whole sequence.
        start: The number of the slice's first token.
        end: The number after its last one.
        num_tokens: The length of the sequence.

    Raises:
        BatchError: If an argument has an unknown form.
    """
    others = {name: value for name, value in given.items() if name not in LABELS}
    for name, value in others.items():
        for tensor in tensors_in(value):
            if tensor.ndim:
                raise _unknown(name, tensor)
    labels = shifted_labels(given, num_tokens)
    if given["num_items_in_batch"] is None:
        others["num_items_in_batch"] = int((labels != given["ignore_index"]).sum())
    return {**others, "labels": None, "shift_labels": labels[:, start:end].contiguous()}


def shifted_labels(given: Mapping[str, Any], num_tokens: int) -> Tensor:
    """The label of each token, of the shape (samples, tokens).

    Args:
        given: The arguments of the loss for the whole sequence.
        num_tokens: The length of the sequence.

    Raises:
        BatchError: If there are labels of other tokens.
    """
    labels: Tensor | None = given["shift_labels"]
    if labels is None:
        labels = nn.functional.pad(given["labels"], (0, 1), value=given["ignore_index"])[..., 1:]
    if labels.numel() % num_tokens:
        raise _unknown("labels", labels)
    return labels.reshape(-1, num_tokens)


def _unknown(name: str, tensor: Tensor) -> BatchError:
    return BatchError(
        f"The argument {name} of the loss has the shape {tuple(tensor.shape)}, and its place in "
        "slices along the tokens is unknown. Use `micro_batching='boundary'`, which leaves the "
        "loss whole."
    )
