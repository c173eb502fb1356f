"""Parameters and buffers of layers: naming them, emptying them to ``meta`` and filling them again.

A layer's tensors are named ``<layer number>.<name inside the layer>`` on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from ..errors import ModelError


def named_tensors(layers: Mapping[int, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, of numbered layers; a tensor that occurs twice comes twice."""
    for number, layer in layers.items():
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            yield f"{number}.{name}", parameter
        for name, buffer in layer.named_buffers(remove_duplicate=False):
            yield f"{number}.{name}", buffer


def set_tensor(layers: Mapping[int, nn.Module], name: str, content: Tensor) -> None:
    """Give a named parameter or buffer this content, with its identity and its flags kept.

    An optimizer, a tied module or a user's list that holds the parameter sees the new content.

    Raises:
        ModelError: If there is no such tensor, or its shape differs.
    """
    owner, leaf, old = _locate(layers, name)
    if old.shape != content.shape:
        raise ModelError(
            f"The tensor {name!r} should have the shape {tuple(old.shape)} and has "
            f"{tuple(content.shape)}."
        )
    if isinstance(old, nn.Parameter):
        swap_tensors(old, nn.Parameter(content, requires_grad=old.requires_grad))
    else:
        owner._buffers[leaf] = content


def _locate(layers: Mapping[int, nn.Module], name: str) -> tuple[nn.Module, str, Tensor]:
    """The module that owns a named tensor, the tensor's own name there, and the tensor."""
    number, _, inner = name.partition(".")
    path, _, leaf = inner.rpartition(".")
    try:
        owner = layers[int(number)].get_submodule(path)
    except (KeyError, ValueError, AttributeError):
        raise ModelError(f"The stage has no tensor {name!r}.") from None
    found = owner._parameters.get(leaf, owner._buffers.get(leaf))
    if found is None:
        raise ModelError(f"The stage has no tensor {name!r}.")
    return owner, leaf, found


def empty_tensors(layers: Mapping[int, nn.Module]) -> None:
    """Free the memory of all parameters and buffers: they become ``meta`` tensors.

    Raises:
        ModelError: If that is not possible; nothing is lost then.
    """
    tensors = list(named_tensors(layers))
    for name, tensor in tensors:
        _check_can_be_swapped(name, tensor)
    for name, tensor in tensors:
        if not tensor.is_meta:
            set_tensor(layers, name, torch.empty_like(tensor, device="meta"))


def _check_can_be_swapped(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, nn.Parameter):
        return
    try:
        swap_tensors(tensor, nn.Parameter(tensor.detach(), tensor.requires_grad))
    except RuntimeError as error:
        raise ModelError(
            f"The parameter {name} is still held by an autograd graph or a weak reference, so it "
            "cannot move to a worker; delete old losses and outputs of the model first."
        ) from error
