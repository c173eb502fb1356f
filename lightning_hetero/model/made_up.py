"""Layers with values made up: as fast and as large as those with real weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .four_bit import describe_parameter, is_four_bit, quantize
from .tensors import fill, locate, named_tensors

# As transformers starts its weights.
_SPREAD = 0.02


def fill_with_made_up_values(
    layers: Mapping[int, nn.Module],
    dtypes: Mapping[str, torch.dtype],
    given: Mapping[str, Tensor],
    device: torch.device,
) -> None:
    """Give layers on ``meta`` values on a device.

    Args:
        layers: The layers by their numbers.
        dtypes: The dtype of each tensor there, by its name.
        given: Tensors whose values matter, such as masks and tables in buffers.
        device: Where they are to be.
    """
    for name, tensor in list(named_tensors(layers)):
        owner, leaf, place = locate(layers, name)
        if not place.is_meta:
            continue  # a tensor that the layer has twice
        if name in given:
            fill(owner, leaf, given[name].to(device), {})
        elif is_four_bit(owner, leaf):
            shape = torch.Size(describe_parameter(owner, leaf).shape)
            plain = _made_up(leaf, shape, _unpacked_dtype(layers), device)
            fill(owner, leaf, *quantize(owner, leaf, plain))
        else:
            fill(owner, leaf, _made_up(leaf, tensor.shape, dtypes[name], device), {})


def _unpacked_dtype(layers: Mapping[int, nn.Module]) -> torch.dtype:
    """What 4-bit weights were before: the norms beside them still are."""
    for layer in layers.values():
        for parameter in layer.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                return parameter.dtype
    return torch.float32


def _made_up(leaf: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Matrices like those of a new model; vectors are factors of a norm, or else biases."""
    content = torch.empty(shape, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        return content.zero_()
    if content.ndim > 1:
        return content.normal_(0.0, _SPREAD)
    return content.zero_() if "bias" in leaf else content.fill_(1.0)
