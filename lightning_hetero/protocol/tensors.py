"""Tensors as bytes: their description in a frame, and conversions without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy
import torch
from torch import Tensor

from ..errors import LocalProtocolError, RemoteProtocolError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}

# Every tensor of a frame starts at a multiple of this, so that vector loads are aligned.
ALIGNMENT_BYTES = 64

Dimension = Annotated[int, msgspec.Meta(ge=0, le=2**40)]

# Bounds the product of a shape's dimensions, where 0 counts as 1.
MOST_ELEMENTS = 2**48


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of one tensor in a frame's header."""

    dtype: str
    shape: Annotated[list[Dimension], msgspec.Meta(max_length=16)]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Describe a tensor.

        Raises:
            LocalProtocolError: If its dtype cannot be sent.
        """
        name = dtype_name(tensor.dtype)
        if name not in DTYPES:
            raise LocalProtocolError(
                f"A tensor of dtype {name} cannot be sent; the dtypes are {', '.join(DTYPES)}."
            )
        return cls(name, list(tensor.shape))

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's content; booleans are packed, eight to a byte."""
        count = math.prod(self.shape)
        if (count or math.prod(max(dimension, 1) for dimension in self.shape)) > MOST_ELEMENTS:
            raise RemoteProtocolError(f"A tensor of shape {self.shape} is too large to exist.")
        dtype = self.torch_dtype
        return -(-count // 8) if dtype == torch.bool else count * dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype for torch.

        Raises:
            RemoteProtocolError: If the dtype cannot be sent.
        """
        try:
            return DTYPES[self.dtype]
        except KeyError:
            known = ", ".join(DTYPES)
            raise RemoteProtocolError(
                f"The dtype {self.dtype!r} cannot be sent; the dtypes are {known}."
            ) from None

    def __str__(self) -> str:
        return f"{self.dtype}{self.shape}"


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name on the wire."""
    return str(dtype).removeprefix("torch.")


def body_layout(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Offset of each tensor in the body, and the body's length in bytes."""
    offsets, end = [], 0
    for spec in specs:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets.append(start)
        end = start + spec.num_bytes
    return offsets, end


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor: its own memory if it is contiguous and on the CPU, else a copy.

    Booleans are packed.
    """
    dense = tensor.detach()
    dense = (dense if dense.device.type == "cpu" else dense.cpu()).contiguous()
    # Not reshape(-1): a tensor of one element may have any stride and still count as contiguous.
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    return numpy.packbits(flat).data if tensor.dtype == torch.bool else flat.data


def tensor_from_bytes(spec: TensorSpec, body: bytearray | memoryview, offset: int) -> Tensor:
    """A tensor that lives in ``body`` and keeps it alive. Booleans are unpacked into new memory."""
    if spec.num_bytes == 0:
        return torch.empty(spec.shape, dtype=spec.torch_dtype)
    count = math.prod(spec.shape)
    if spec.torch_dtype == torch.bool:
        packed = numpy.frombuffer(body, numpy.uint8, spec.num_bytes, offset)
        return torch.from_numpy(numpy.unpackbits(packed, count=count)).view(spec.shape).bool()
    flat = torch.frombuffer(body, dtype=spec.torch_dtype, count=count, offset=offset)
    return flat.view(spec.shape)
