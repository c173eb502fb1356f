"""Copies between a device and main memory. Computing threads do not wait for them.

On a device with streams, copies run in streams of their own. Marks in the streams order the work:

    compute  ── forward 0 ──▪── forward 1 ─────── waits ▫── backward 0 ──
                             ╲                          ╱
    leaving                   ▫── copy ──▪             ╱
                                          ╲           ╱
    sender thread                          ▫ socket  ╱
    coming                        ── copy ──────────▪

On any other device a copy is made at once. `Streams` is the interface to a device with streams,
without decisions. `StreamedCopies` decides the order of all waits, so tests run it with made-up
streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import Field, dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import ChannelError, ModelError
from ..protocol.tensor_bytes import (
    ALIGNMENT_BYTES,
    SMALLEST_KEPT_BYTES,
    BufferPool,
    to_power_of_two,
)
from .main_memory import is_in_main_memory

Bytes = npt.NDArray[numpy.uint8]


class Mark(Protocol):
    """A mark in a stream."""

    def is_past(self) -> bool:
        """Whether the device has reached the mark; does not wait."""

    def wait(self) -> None:
        """Block this thread until the device has reached the mark.

        Raises:
            ChannelError: If the device fails before.
        """


AnyMark = TypeVar("AnyMark", bound=Mark)


class Streams(Protocol[AnyMark]):
    """Three streams of one device: for its computation, for copies out, and for copies in."""

    def pinned_bytes(self, num_bytes: int) -> Bytes:
        """Allocate pinned main memory; the device copies from and to it by itself."""

    def mark_computed(self) -> AnyMark:
        """Mark the stream of computation after all work so far."""

    def copy_out(
        self, after: AnyMark, sources: Sequence[Tensor], hosts: Sequence[Tensor]
    ) -> AnyMark:
        """Copy tensors into main memory once ``after`` is past, and mark the end of the copies.

        Their memory on the device is not reused before the returned mark.
        """

    def coming(self) -> AbstractContextManager[None]:
        """Inside, tensors are made in the stream of copies in."""

    def copy_in(self, host: Tensor) -> Tensor:
        """Inside `coming`: begin a copy, and return the tensor on the device."""

    def mark_come(self) -> AnyMark:
        """Mark the stream of copies in after all copies so far."""

    def compute_after(self, mark: AnyMark, used: Iterable[Tensor]) -> None:
        """Make all later computation wait for ``mark``.

        Another stream has filled the memory of ``used``; this keeps the memory while it is in use.
        """


Land = Callable[[], None]

# Buffers kept per micro-batch in flight: it leaves forward and backward, to either neighbor, and
# its layers' arguments leave with it.
_KEPT_PER_MICROBATCH = 4


def already_here() -> None:
    """The `Land` of tensors already on the device."""


class Arriving(Protocol):
    """A value with tensors. Their copies to the device may still run.

    Call ``land`` before you compute with the tensors. The device waits then, and not the thread.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def land(self) -> Land:
        """Makes the device wait for the copies."""

    @property
    def tensors(self) -> Sequence[Tensor | None]:
        """The tensors to wait for."""


Content = TypeVar("Content", bound=Arriving)


@dataclass(frozen=True)
class HostCopy:
    """Copies of tensors in main memory, or on their way there.

    Args:
        tensors: The tensors in main memory; call `wait` before you read their content.
        is_immediate: Whether the device finishes all copies before the call returns.
        mark: The end of the copies in their stream; None if they are finished.
    """

    tensors: tuple[Tensor, ...]
    is_immediate: bool
    mark: Mark | None = None

    def wait(self) -> None:
        """Wait for the content, in the sending thread, as long as the device takes.

        This wait is without a deadline: the receiver of the content has one, and a hanging device
        is useless anyway.

        Raises:
            ChannelError: If the device fails before.
        """
        if self.mark is not None:
            self.mark.wait()


class PlainCopies:
    """Copies finished within the call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def receive_pool(self) -> BufferPool:
        """Memory for a channel's reader to fill with tensors for the device."""
        return BufferPool()

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Begin to copy tensors to main memory, with their values after all work so far."""
        copied = tuple(tensor.detach().to("cpu") for tensor in tensors)
        return HostCopy(copied, is_immediate=True)

    def to_device(
        self, tensors: Sequence[Tensor], read: Callable[[tuple[Tensor, ...]], Content]
    ) -> Content:
        """Begin to copy tensors to the device, and return the result of ``read`` for them."""
        return read(tuple(map(self._here, tensors)))

    def _here(self, tensor: Tensor) -> Tensor:
        try:
            return tensor.to(self._device)
        except TypeError as error:  # as torch says of float64 on Apple's GPUs
            raise ModelError(
                f"The device {str(self._device)!r} cannot hold a tensor of {tensor.dtype}. Convert "
                "it to torch.float32 before it goes to the decoder layers."
            ) from error

    def keep_for(self, num_microbatches: int) -> None:
        """Keep buffers for this number of micro-batches in flight."""

    def close(self) -> None:
        """Wait for all pending copies; then their memory may be used again."""


class StreamedCopies(Generic[AnyMark]):
    """Copies in streams of their own, through reused pinned memory.

    Args:
        streams: The streams of the device.
    """

    def __init__(self, streams: Streams[AnyMark]) -> None:
        self._streams = streams
        self._pool = BufferPool(streams.pinned_bytes, to_power_of_two)
        # Sources of running copies to the device: their memory must not be reused yet.
        self._coming: deque[tuple[AnyMark, Sequence[Tensor]]] = deque()
        # The end of the latest copy from the device; all others have ended before.
        self._left: AnyMark | None = None

    def receive_pool(self) -> BufferPool:
        return BufferPool(self._streams.pinned_bytes, to_power_of_two)

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        sources = [tensor for tensor in tensors if not is_in_main_memory(tensor)]
        hosts = self._hosts_for(sources)
        computed = self._streams.mark_computed()
        mark = self._streams.copy_out(computed, sources, hosts) if sources else None
        self._left = mark or self._left
        left = iter(hosts)
        copied = tuple(t.detach() if is_in_main_memory(t) else next(left) for t in tensors)
        return HostCopy(copied, is_immediate=False, mark=mark)

    def to_device(
        self, tensors: Sequence[Tensor], read: Callable[[tuple[Tensor, ...]], Content]
    ) -> Content:
        while self._coming and self._coming[0][0].is_past():
            self._coming.popleft()
        tensors = tuple(map(self._pinned, tensors))
        with self._streams.coming():
            here = tuple(map(self._streams.copy_in, tensors))
            content = read(here)
        mark = self._streams.mark_come()
        self._coming.append((mark, tensors))

        def land() -> None:
            made = [tensor for tensor in content.tensors if tensor is not None]
            self._streams.compute_after(mark, [*here, *made])

        return replace(content, land=land)

    def keep_for(self, num_microbatches: int) -> None:
        self._pool.keep_at_most(_KEPT_PER_MICROBATCH * num_microbatches)

    def close(self) -> None:
        # A failed device does not copy any more.
        with suppress(ChannelError):
            if self._left is not None:
                self._left.wait()
            if self._coming:
                self._coming[-1][0].wait()
        self._left = None
        self._coming.clear()

    def _pinned(self, tensor: Tensor) -> Tensor:
        """The tensor in pinned memory: threads do not wait for its copy.

        Booleans arrive packed, and were unpacked into other memory.
        """
        if tensor.dtype != torch.bool or tensor.nbytes < SMALLEST_KEPT_BYTES:
            return tensor
        (host,) = self._hosts_for([tensor])
        return host.copy_(tensor)

    def _hosts_for(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Tensors in one buffer. The buffer is free again after the last tensor is dropped."""
        sizes = [-(-source.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for source in sources]
        # The pool pins only buffers of its kept sizes.
        buffer = self._pool.take(max(sum(sizes), SMALLEST_KEPT_BYTES))
        parts = torch.frombuffer(buffer, dtype=torch.uint8)[: sum(sizes)].split(sizes)
        return [
            part[: source.nbytes].view(source.dtype).view(source.shape)
            for source, part in zip(sources, parts, strict=True)
        ]


Copies = PlainCopies | StreamedCopies[Any]
"""Copies between one device and main memory; make one such object per device.

Only the computing thread may call its methods, which `PlainCopies` describes. Any thread may call
`HostCopy.wait`.
"""
