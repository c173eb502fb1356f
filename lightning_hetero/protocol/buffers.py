"""Receive buffers: new ones, and a pool that reuses those in which no tensor lives any more."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy
import torch

from ..errors import RemoteProtocolError

# Large buffers are kept: page faults of a new 64 MiB buffer take longer than sending its bytes over
# loopback. Small ones are cheap to allocate.
SMALLEST_KEPT_BYTES = 64 * 2**10
MOST_KEPT = 64

# A bytearray, or a numpy array of bytes over memory of another kind.
Buffer = Any


def _references_of_unused() -> int:
    """What `getrefcount` reports for a buffer that only a list holds; Pythons differ."""
    buffers = [bytearray(1)]
    return sys.getrefcount(buffers[0])


_UNUSED_REFERENCES = _references_of_unused()


def new_buffer(num_bytes: int) -> memoryview:
    """New memory for tensors that stay, aligned like torch's own; its content is undefined.

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


class BufferPool:
    """Hands out byte buffers; a buffer is free again when its last tensor is gone.

    A tensor of `torch.frombuffer` holds a reference to its buffer, so the buffer's reference count
    says whether it is in use, and no caller has to return it. Not thread-safe: a pool belongs to
    one reader.

    Args:
        allocate: Allocates a buffer of that many bytes, for example in pinned memory.
    """

    def __init__(self, allocate: Callable[[int], Buffer] = empty_memory) -> None:
        self._allocate = allocate
        self._most_kept = MOST_KEPT
        self._buffers: list[Buffer] = []

    def keep_at_most(self, count: int) -> None:
        """Keep at most ``count`` buffers; drop the oldest, which live on while in use."""
        self._most_kept = min(max(count, 1), MOST_KEPT)
        del self._buffers[: -self._most_kept]

    def forget(self) -> None:
        """Drop all buffers; they stay alive while they are in use."""
        self._buffers.clear()

    def take(self, num_bytes: int) -> Buffer:
        """A buffer of at least ``num_bytes``; its content is undefined.

        Raises:
            RemoteProtocolError: If there is not enough memory.
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
        """Make room by dropping an unused buffer, or the oldest; its tensors keep it alive."""
        if len(self._buffers) >= self._most_kept:
            unused = (i for i in range(len(self._buffers)) if self._is_unused(i))
            self._buffers.pop(next(unused, 0))


def _rounded(num_bytes: int) -> int:
    """Round up to 64 KiB, or by an eighth, so that batches of similar length share buffers."""
    step = max(SMALLEST_KEPT_BYTES, 1 << (num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step
