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


def shift_loss(call: LayerCall, num_tokens: int) -> LayerCall:
    """The call of the loss for a whole sequence, with its labels shifted and counted.

    Args:
        call: The call for the whole sequence.
        num_tokens: The length of the sequence.

    Raises:
        BatchError: If an argument has an unknown form.
    """
    return replace(call, args=(), kwargs=shifted(loss_arguments(call), num_tokens), place=_LOGITS)


def loss_arguments(call: LayerCall) -> dict[str, Any]:
    """All arguments of a call of the loss by name, but its logits."""
    args, kwargs = put_hidden(torch.empty(0), call.args, call.kwargs, call.place)
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    others: dict[str, Any] = given.pop("kwargs")
    return {name: value for name, value in given.items() if name != _LOGITS} | others


def shifted(given: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
    """The arguments of the loss with a label for each token, of the shape (samples, tokens), and
    the number of labels that count.

    Args:
        given: The arguments as a model gives them.
        num_tokens: The length of the sequence.

    Raises:
        BatchError: If an argument has an unknown form.
    """
    for name, value in given.items():
        for tensor in tensors_in(value):
            if tensor.ndim and name not in LABELS:
                raise _unknown(name, tensor)
    labels: Tensor | None = given["shift_labels"]
    if labels is None:
        labels = nn.functional.pad(given["labels"], (0, 1), value=given["ignore_index"])[..., 1:]
    if labels.numel() % num_tokens:
        raise _unknown("labels", labels)
    count = given["num_items_in_batch"]
    if count is None:
        count = int((labels != given["ignore_index"]).sum())
    labels = labels.reshape(-1, num_tokens)
    return {**given, "labels": None, "shift_labels": labels, "num_items_in_batch": count}


def of_slice(given: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    """The arguments of the loss of a slice.

    Args:
        given: The arguments for the whole sequence, from `shifted`.
        start: The number of the slice's first token.
        end: The number after its last one.
    """
    return {**given, "shift_labels": given["shift_labels"][:, start:end].contiguous()}


def _unknown(name: str, tensor: Tensor) -> BatchError:
    return BatchError(
        f"The argument {name} of the loss has the shape {tuple(tensor.shape)}, and its place in "
        "slices along the tokens is unknown. Use `micro_batching='boundary'`, which leaves the "
        "loss whole."
    )
