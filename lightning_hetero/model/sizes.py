"""Bytes of layers and of the rest of a model, whether their content is there or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .four_bit import describe_parameter, is_four_bit
from .layers import DecoderLayer
from .tensors import dtypes_on_stage, locate, named_tensors


def stored_bytes(layers: Mapping[int, nn.Module], dtype: torch.dtype | None = None) -> int:
    """Bytes of all parameters and buffers, on a stage that computes in ``dtype``."""
    dtypes = dtypes_on_stage(layers, dtype)
    found: dict[int, int] = {}
    for name, tensor in named_tensors(layers):
        owner, leaf, _ = locate(layers, name)
        if is_four_bit(owner, leaf):
            found[id(tensor)] = describe_parameter(owner, leaf).stored_bytes
        else:
            found[id(tensor)] = tensor.numel() * dtypes[name].itemsize
    return sum(found.values())


def num_trained(parameters: Iterable[nn.Parameter]) -> int:
    """How many numbers train."""
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the gradients of what trains."""
    return sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)


def ends_of(root: nn.Module, layers: Sequence[DecoderLayer]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of the model before its layers, and those behind them; each once."""
    inside = {module for layer in layers for module in layer.module.modules()}
    before: dict[int, Tensor] = {}
    behind: dict[int, Tensor] = {}
    found = before
    for module in root.modules():
        if module in inside:
            found = behind
            continue
        own = [*module._parameters.values(), *module._buffers.values()]
        found.update({id(t): t for t in own if t is not None and id(t) not in before})
    return list(before.values()), list(behind.values())


def tied_parameters(root: nn.Module, layers: Sequence[DecoderLayer]) -> list[nn.Parameter]:
    """Parameters outside of the layers that several modules share."""
    inside = {id(p) for layer in layers for p in layer.module.parameters()}
    uses: dict[int, int] = {}
    found: dict[int, nn.Parameter] = {}
    for _, parameter in root.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        found[id(parameter)] = parameter
    return [p for key, p in found.items() if uses[key] > 1 and key not in inside]
