"""Receive buffers: new ones, and those that are used again once no tensor lives in them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy
import torch

from ..errors import RemoteProtocolError

# A fresh 64 MiB buffer costs more in page faults than its bytes cost on a loopback socket, so
# big ones are kept. Small ones come cheap from the allocator.
SMALLEST_KEPT_BYTES = 64 * 2**10
MOST_KEPT = 64

# A bytearray, or a numpy array of bytes over memory of another kind.
Buffer = Any


def _references_of_unused() -> int:
    """What `getrefcount` reports of a buffer that only a list holds; Pythons differ in it."""
    buffers = [bytearray(1)]
    return sys.getrefcount(buffers[0])


_UNUSED_REFERENCES = _references_of_unused()


def new_buffer(num_bytes: int) -> memoryview:
    """Memory of its own for tensors that stay, aligned as torch's own; its content is undefined.

    Raises:
        RemoteProtocolError: If there is not so much.
    """
    try:
        return torch.empty(num_bytes, dtype=torch.uint8).numpy().data
    except RuntimeError as error:
        raise _too_much(num_bytes) from error


def _too_much(num_bytes: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"There is no memory here for a message of {num_bytes} bytes.")


def empty_memory(num_bytes: int) -> memoryview:
    """Memory that the machine hands out as it is filled, as it does not if somebody makes it zero:
    who announces much and sends little takes little."""
    try:
        return numpy.empty(num_bytes, numpy.uint8).data
    except MemoryError as error:
        raise _too_much(num_bytes) from error


class BufferPool:
    """Hands out byte buffers; one is free again when its last tensor is gone.

    `torch.frombuffer` makes a tensor hold a reference to the buffer it lives in, so the buffer's
    reference count says whether it is in use: nobody has to give anything back. Not thread-safe:
    a pool belongs to one reader.

    Args:
        allocate: Makes a buffer of so many bytes, in memory that a device can copy from for one.
    """

    def __init__(self, allocate: Callable[[int], Buffer] = empty_memory) -> None:
        self._allocate = allocate
        self._most_kept = MOST_KEPT
        self._buffers: list[Buffer] = []

    def keep_at_most(self, count: int) -> None:
        """Keep so many buffers; those that are in use beyond that are not kept afterwards."""
        self._most_kept = min(max(count, 1), MOST_KEPT)
        del self._buffers[: -self._most_kept]

    def forget(self) -> None:
        """Keep none of the buffers; those that are in use live as long as they are."""
        self._buffers.clear()

    def take(self, num_bytes: int) -> Buffer:
        """A buffer of at least ``num_bytes``; its content is undefined.

        Raises:
            RemoteProtocolError: If there is not so much memory.
        """
        if num_bytes < SMALLEST_KEPT_BYTES:
            return bytearray(num_bytes)
        size = _rounded(num_bytes)
        for index in range(len(self._buffers)):
            if len(self._buffers[index]) == size and self._is_unused(index):
                return self._buffers[index]
        self._forget_one()
        self._buffers.append(self._allocate(size))
        return self._buffers[-1]

    def _is_unused(self, index: int) -> bool:
        return sys.getrefcount(self._buffers[index]) <= _UNUSED_REFERENCES

    def _forget_one(self) -> None:
        """Make room by dropping the oldest buffer; tensors in it keep it alive by themselves."""
        if len(self._buffers) >= self._most_kept:
            unused = (i for i in range(len(self._buffers)) if self._is_unused(i))
            self._buffers.pop(next(unused, 0))


def _rounded(num_bytes: int) -> int:
    """Round up to 64 KiB, or by an eighth, so that batches of similar length share buffers."""
    step = max(SMALLEST_KEPT_BYTES, 1 << (num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step
