"""Narrower forms of what crosses a boundary, for links that are slower than the devices.

bfloat16 and float16 round each number; int8 rounds the numbers of a block to 255 steps of the
greatest of them:

    scale = max |x| / 127            an error of at most scale / 2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..plan import INT8_BLOCK, WireDtype

_STEPS = 127
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def narrow(tensor: Tensor, wire_dtype: WireDtype | None) -> list[Tensor]:
    """The tensor as it is sent: itself, or rounded, or rounded with its scales."""
    if wire_dtype is None or not tensor.is_floating_point():
        return [tensor]
    tensor = tensor.detach()
    if wire_dtype == "int8":
        return _to_steps(tensor) if tensor.ndim else [tensor]
    dtype = _FLOATS[wire_dtype]
    return [tensor.to(dtype) if dtype.itemsize < tensor.dtype.itemsize else tensor]


def widen(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """What `narrow` was given, rounded.

    Raises:
        ValueError: If the parts do not belong together.
    """
    if len(parts) == 1:
        return parts[0].to(dtype)
    steps, scales = parts
    blocks = -(-steps.shape[-1] // INT8_BLOCK)
    if scales.shape != (*steps.shape[:-1], blocks) or steps.dtype != torch.int8:
        raise ValueError(f"{tuple(scales.shape)} scales for {steps.dtype}{tuple(steps.shape)}")
    return (steps.to(scales.dtype) * _spread(scales, steps.shape[-1])).to(dtype)


def _to_steps(tensor: Tensor) -> list[Tensor]:
    length = tensor.shape[-1]
    values = tensor.float()
    blocked = torch.nn.functional.pad(values, (0, -length % INT8_BLOCK)).unflatten(
        -1, (-1, INT8_BLOCK)
    )
    # A number that is none must arrive as none: its whole block does.
    scales = blocked.abs().amax(-1) / _STEPS
    divisors = _spread(scales, length)
    steps = (values / divisors.where(divisors > 0, 1.0)).round().nan_to_num().to(torch.int8)
    return [steps, scales]


def _spread(scales: Tensor, length: int) -> Tensor:
    """Each block's scale for each of its numbers."""
    return scales.repeat_interleave(INT8_BLOCK, dim=-1)[..., :length]
