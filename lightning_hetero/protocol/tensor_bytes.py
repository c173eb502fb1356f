"""Tensors as bytes: their description in a frame, conversions without a copy, receive buffers.

A pool reuses a receive buffer after the last tensor in it is gone.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any

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
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}

# Every tensor of a frame starts at a multiple of this, so vector loads are aligned.
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
            LocalProtocolError: If its dtype or its layout cannot be sent.
        """
        if tensor.layout is not torch.strided:
            raise LocalProtocolError(
                f"A tensor of layout {tensor.layout} cannot be sent. An embedding with "
                "`sparse=True` has such gradients; use `sparse=False`, or give its layer to one "
                "process instead of replicas."
            )
        name = dtype_name(tensor.dtype)
        if name not in DTYPES:
            raise LocalProtocolError(
                f"A tensor of dtype {name} cannot be sent; convert it to one of "
                f"{', '.join(DTYPES)}."
            )
        return cls(name, list(tensor.shape))

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's content; booleans are packed, eight to a byte."""
        count = math.prod(self.shape)
        if (count or math.prod(max(dimension, 1) for dimension in self.shape)) > MOST_ELEMENTS:
            raise RemoteProtocolError(f"A tensor of shape {self.shape} is too large to exist.")
        return num_packed_bytes(count, self.torch_dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype for torch.

        Raises:
            RemoteProtocolError: If the dtype cannot be sent.
        """
        try:
            return DTYPES[self.dtype]
        except KeyError:
            raise RemoteProtocolError(
                f"The dtype {self.dtype!r} cannot be sent; the dtypes are {', '.join(DTYPES)}."
            ) from None

    def __str__(self) -> str:
        return f"{self.dtype}{self.shape}"


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name on the wire."""
    return str(dtype).removeprefix("torch.")


def num_packed_bytes(num_elements: int, dtype: torch.dtype) -> int:
    """Bytes of so many elements on the wire."""
    return -(-num_elements // 8) if dtype == torch.bool else num_elements * dtype.itemsize


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

    Booleans are packed. Complex numbers are pairs of real ones.
    """
    dense = _materialized(tensor.detach().cpu()).contiguous()
    # Not reshape(-1): a tensor of one element may have any stride and still count as contiguous.
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    return numpy.packbits(flat).data if tensor.dtype == torch.bool else flat.data


def _materialized(tensor: Tensor) -> Tensor:
    """A tensor whose memory has its numbers: torch conjugates and negates some only when it reads
    them."""
    return tensor.resolve_conj().resolve_neg()


def tensor_behind(buffer: memoryview) -> Tensor | None:
    """The tensor that owns memory returned by `tensor_bytes`; None for memory of another kind."""
    owner = getattr(buffer.obj, "base", None)
    return owner if isinstance(owner, Tensor) else None


def fingerprint_of(parts: Mapping[str, Tensor]) -> bytes:
    """SHA-256 of the names, dtypes, shapes and bytes of tensors.

    Processors have instructions for SHA-256: it takes about an eighth of the time of a link of 1
    Gbit/s for the bytes.
    """
    found = hashlib.sha256()
    for name, tensor in parts.items():
        found.update(f"{name} {TensorSpec.of(tensor)}\n".encode())
        found.update(tensor_bytes(tensor))
    return found.digest()


def tensor_from_bytes(spec: TensorSpec, body: bytearray | memoryview, offset: int) -> Tensor:
    """A tensor inside ``body``; it keeps ``body`` alive. Booleans are unpacked into new memory."""
    count, dtype = math.prod(spec.shape), spec.torch_dtype
    if count == 0:
        return torch.empty(spec.shape, dtype=dtype)
    if dtype == torch.bool:
        packed = numpy.frombuffer(body, numpy.uint8, num_packed_bytes(count, dtype), offset)
        return torch.from_numpy(numpy.unpackbits(packed, count=count)).view(spec.shape).bool()
    flat = torch.frombuffer(body, dtype=dtype, count=count, offset=offset)
    return flat.view(spec.shape)


# Large buffers are kept: page faults of a new 64 MiB buffer take longer than sending its bytes over
# loopback. Small ones are cheap to allocate.
SMALLEST_KEPT_BYTES = 64 * 2**10
MOST_KEPT = 64

# A bytearray, or a numpy array of bytes over memory of another kind.
Buffer = Any

# Allocates so many bytes with a function, and counts them until the buffer is gone.
Counted = Callable[[Callable[[int], Buffer], int], Buffer]


def _references_of_unused() -> int:
    """The `getrefcount` of a buffer held only by a list; Pythons differ."""
    buffers = [bytearray(1)]
    return sys.getrefcount(buffers[0])


_UNUSED_REFERENCES = _references_of_unused()


def new_buffer(num_bytes: int) -> memoryview:
    """New memory for lasting tensors, aligned like torch's own; its content is undefined.

    Raises:
        RemoteProtocolError: If there is not enough memory.
    """
    try:
        return torch.empty(num_bytes, dtype=torch.uint8).numpy().data
    except RuntimeError as error:
        raise _too_much(num_bytes) from error


def _too_much(num_bytes: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"There is too little memory here for a message of {num_bytes} bytes."
    )


def empty_memory(num_bytes: int) -> memoryview:
    """Lazily committed memory: pages are allocated as data arrives, so a peer that announces a
    large frame but sends little costs little."""
    try:
        return numpy.empty(num_bytes, numpy.uint8).data
    except MemoryError as error:
        raise _too_much(num_bytes) from error


def sums_of_bits(tensors: Sequence[Tensor]) -> list[int]:
    """A number for each of some tensors on one device. It changes with the content but for rare
    accidents, and takes a small part of the time of `fingerprint_of`."""
    if not tensors:
        return []
    # All at once, because each `item` would wait for the device.
    found: list[int] = torch.stack([_sum_of_bits(tensor.detach()) for tensor in tensors]).tolist()
    return found


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of a tensor's words of eight bytes, and of the bytes after them."""
    content = _materialized(tensor).contiguous().view(-1).view(torch.uint8)
    end = len(content) // 8 * 8
    words = content[:end]
    if words.storage_offset() % 8:
        words = words.clone()
    return words.view(torch.int64).sum() + content[end:].sum()


# The most that one frame carries of many tensors: their number, and bytes unless one of them has
# more.
_MOST_TENSORS = 256
_MOST_BYTES = 2**25


def in_frames(
    tensors: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Named tensors in groups that fit into frames, each with whether it is the last group; there
    is at least one group, possibly empty."""
    group: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        if group and (len(group) == _MOST_TENSORS or num_bytes + tensor.nbytes > _MOST_BYTES):
            yield group, False
            group, num_bytes = {}, 0
        group[name] = tensor
        num_bytes += tensor.nbytes
    yield group, True


def in_eighths(num_bytes: int) -> int:
    """Round up to 64 KiB, or by an eighth, so batches of similar length share buffers."""
    step = max(SMALLEST_KEPT_BYTES, 1 << (num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step


def to_power_of_two(num_bytes: int) -> int:
    """Round up to a power of two, as torch does with pinned memory: any other size would leave a
    part of the memory unused."""
    return 1 << max(0, num_bytes - 1).bit_length()


class BufferPool:
    """Hands out byte buffers; a buffer is free again when its last tensor is gone.

    A tensor of `torch.frombuffer` holds a reference to its buffer, so the buffer's reference count
    says whether it is in use, and callers do not return it. Not thread-safe: a pool belongs to one
    reader.

    Args:
        allocate: Allocates a buffer of so many bytes, for example in pinned memory.
        round_up: The size of the buffer for so many bytes.
    """

    def __init__(
        self,
        allocate: Callable[[int], Buffer] = empty_memory,
        round_up: Callable[[int], int] = in_eighths,
    ) -> None:
        self._allocate, self._round_up = allocate, round_up
        self._count: Counted | None = None
        self._most_kept = MOST_KEPT
        self._buffers: list[Buffer] = []

    def keep_at_most(self, count: int) -> None:
        """Keep at most ``count`` buffers; drop the oldest. Dropped buffers live on while in use."""
        self._most_kept = min(max(count, 1), MOST_KEPT)
        del self._buffers[: -self._most_kept]

    def count_with(self, count: Counted) -> None:
        """Let every new buffer be counted, even a small one."""
        self._count = count

    def new(self, num_bytes: int) -> Buffer:
        """A buffer for lasting tensors; it is never reused.

        Raises:
            RemoteProtocolError: If there is not enough memory.
        """
        return self._counted(new_buffer, num_bytes)

    def _counted(self, allocate: Callable[[int], Buffer], num_bytes: int) -> Buffer:
        return allocate(num_bytes) if self._count is None else self._count(allocate, num_bytes)

    def forget(self) -> None:
        """Drop all buffers; they stay alive while they are in use."""
        self._buffers.clear()

    def take(self, num_bytes: int) -> Buffer:
        """A buffer of at least ``num_bytes``; its content is undefined.

        Raises:
            RemoteProtocolError: If there is not enough memory.
        """
        if num_bytes < SMALLEST_KEPT_BYTES:
            # Only a counted buffer needs an object that reports its end.
            return bytearray(num_bytes) if self._count is None else self._small(num_bytes)
        size = self._round_up(num_bytes)
        for index in range(len(self._buffers)):
            if len(self._buffers[index]) == size and self._is_unused(index):
                return self._buffers[index]
        self._forget_one()
        self._buffers.append(self._counted(self._allocate, size))
        return self._buffers[-1]

    def _small(self, num_bytes: int) -> Buffer:
        return self._counted(empty_memory, num_bytes) if num_bytes else bytearray()

    def _is_unused(self, index: int) -> bool:
        return sys.getrefcount(self._buffers[index]) <= _UNUSED_REFERENCES

    def _forget_one(self) -> None:
        """Make room by dropping an unused buffer, or the oldest; its tensors keep it alive."""
        if len(self._buffers) >= self._most_kept:
            unused = (i for i in range(len(self._buffers)) if self._is_unused(i))
            self._buffers.pop(next(unused, 0))
