"""Copies between a device and main memory that no computing thread waits for.

Where a device has streams, copies have their own, and moments in the streams say who may go on:

    compute  ── forward 0 ──▪── forward 1 ─────── waits ▫── backward 0 ──
                             ╲                          ╱
    leaving                   ▫── copy ──▪             ╱
                                          ╲           ╱
    sender thread                          ▫ socket  ╱
    coming                        ── copy ──────────▪

Everywhere else a copy is made at once.

The few things that copies want of a device with streams; `torch.cuda` is CUDA and ROCm alike.

Decides nothing: what waits for what is the business of `copies`, which is tested with a device
that is made up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import Field, dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy
import numpy.typing as npt
import torch
from torch import Tensor

from ..protocol.buffers import SMALLEST_KEPT_BYTES, BufferPool
from ..protocol.tensors import ALIGNMENT_BYTES

Bytes = npt.NDArray[numpy.uint8]


class Mark(Protocol):
    """A moment in a stream."""

    def is_past(self) -> bool:
        """Whether the device has come to it; does not wait."""

    def wait(self) -> None:
        """Wait in this thread until it has.

        Raises:
            ChannelError: If the device fails before.
        """


AnyMark = TypeVar("AnyMark", bound=Mark)


class Streams(Protocol[AnyMark]):
    """Three streams of one device: what it computes, what leaves it, and what comes to it."""

    def pinned_bytes(self, num_bytes: int) -> Bytes:
        """New memory of this machine that the device copies from and to by itself."""

    def mark_computed(self) -> AnyMark:
        """The moment at which all that was asked to be computed so far is computed."""

    def copy_out(
        self, after: AnyMark, sources: Sequence[Tensor], hosts: Sequence[Tensor]
    ) -> AnyMark:
        """Copy tensors into main memory once ``after`` is past; the moment when they are there.

        Their memory on the device is not used for others before.
        """

    def coming(self) -> AbstractContextManager[None]:
        """Inside, tensors are made in the stream of what comes."""

    def copy_in(self, host: Tensor) -> Tensor:
        """Inside `coming`: the tensor on the device, as soon as its copy is through."""

    def mark_come(self) -> AnyMark:
        """The moment at which all copies to the device so far are through."""

    def compute_after(self, mark: AnyMark, used: Iterable[Tensor]) -> None:
        """Compute nothing that is asked for from now on before ``mark``.

        The memory of ``used``, which came by another stream, is kept while it is computed with.
        """


Land = Callable[[], None]

# Buffers that are kept for each micro-batch in flight: it leaves twice, forward and backward, to
# either neighbor, with its layers' arguments.
_KEPT_PER_MICROBATCH = 4


def already_here() -> None:
    """What is there needs no waiting for."""


class Arriving(Protocol):
    """A value with tensors that may still be on their way to the device.

    ``land`` must be called before anything is computed with them; the device waits then, and not
    the thread.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def land(self) -> Land:
        """Makes the device wait for the tensors."""

    @property
    def tensors(self) -> Sequence[Tensor | None]:
        """What is to be waited for."""


Content = TypeVar("Content", bound=Arriving)


class HostCopy(Protocol):
    """Tensors on their way to main memory, or there."""

    @property
    def is_immediate(self) -> bool:
        """Whether the device's copies are there as soon as they are begun, this and all others."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in main memory; their content is there after `wait`."""

    def wait(self) -> None:
        """Wait for the content, in the thread that sends it, as long as the device takes.

        There is no deadline: no more can be done with a device that hangs, and whoever waits for
        the content has one.

        Raises:
            ChannelError: If the device fails before.
        """


class Copies(Protocol):
    """Between one device and main memory; made once per device.

    Its methods belong to the thread that computes, and `HostCopy.wait` to any.
    """

    def receive_pool(self) -> BufferPool:
        """Memory for a channel's reader to fill with what is to come to the device."""

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Begin to copy tensors to main memory, as they are when all asked for so far is done."""

    def to_device(
        self, tensors: Sequence[Tensor], read: Callable[[tuple[Tensor, ...]], Content]
    ) -> Content:
        """Begin to copy tensors to the device; what is read out of them there."""

    def keep_for(self, num_microbatches: int) -> None:
        """Keep as much memory for copies as so many micro-batches in flight need."""


class PlainCopies:
    """Copies that are there when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def receive_pool(self) -> BufferPool:
        return BufferPool()

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        return _Finished(tuple(tensor.detach().to("cpu") for tensor in tensors))

    def to_device(
        self, tensors: Sequence[Tensor], read: Callable[[tuple[Tensor, ...]], Content]
    ) -> Content:
        return read(tuple(tensor.to(self._device) for tensor in tensors))

    def keep_for(self, num_microbatches: int) -> None:
        pass


@dataclass(frozen=True)
class _Finished:
    tensors: tuple[Tensor, ...]
    is_immediate: bool = True

    def wait(self) -> None:
        pass


class StreamedCopies(Generic[AnyMark]):
    """Copies in streams of their own, by way of pinned memory that is used again and again.

    Args:
        streams: The device's.
    """

    def __init__(self, streams: Streams[AnyMark]) -> None:
        self._streams = streams
        self._pool = BufferPool(streams.pinned_bytes)
        # What is being copied to the device: its memory here must not get other content yet.
        self._coming: deque[tuple[AnyMark, Sequence[Tensor]]] = deque()

    def receive_pool(self) -> BufferPool:
        return BufferPool(self._streams.pinned_bytes)

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        sources = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        hosts = self._hosts_for(sources)
        computed = self._streams.mark_computed()
        mark = self._streams.copy_out(computed, sources, hosts) if sources else None
        left = iter(hosts)
        copied = tuple(t.detach() if t.device.type == "cpu" else next(left) for t in tensors)
        return _Leaving(copied, mark)

    def to_device(
        self, tensors: Sequence[Tensor], read: Callable[[tuple[Tensor, ...]], Content]
    ) -> Content:
        while self._coming and self._coming[0][0].is_past():
            self._coming.popleft()
        with self._streams.coming():
            here = tuple(map(self._streams.copy_in, tensors))
            content = read(here)
        mark = self._streams.mark_come()
        self._coming.append((mark, tuple(tensors)))

        def land() -> None:
            made = [tensor for tensor in content.tensors if tensor is not None]
            self._streams.compute_after(mark, [*here, *made])

        return replace(content, land=land)

    def keep_for(self, num_microbatches: int) -> None:
        self._pool.keep_at_most(_KEPT_PER_MICROBATCH * num_microbatches)

    def _hosts_for(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Room for tensors in one buffer; it is free again when nobody holds one of them."""
        offsets, end = [], 0
        for source in sources:
            offsets.append(end)
            end += -(-source.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        # Only what the pool keeps is pinned.
        memory = torch.frombuffer(self._pool.take(max(end, SMALLEST_KEPT_BYTES)), dtype=torch.uint8)
        return [
            memory[offset : offset + source.nbytes].view(source.dtype).view(source.shape)
            for source, offset in zip(sources, offsets, strict=True)
        ]


@dataclass(frozen=True)
class _Leaving:
    tensors: tuple[Tensor, ...]
    mark: Mark | None
    is_immediate: bool = False

    def wait(self) -> None:
        if self.mark is not None:
            self.mark.wait()
