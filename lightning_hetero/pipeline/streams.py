"""The few things that copies want of a device with streams; `torch.cuda` is CUDA and ROCm alike.

Decides nothing: what waits for what is the business of `copies`, which is tested with a device
that is made up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

import numpy
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import ChannelError

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


class CudaStreams:
    """Those of one CUDA or ROCm device. Created without asking it for anything but two streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._leaving = torch.cuda.Stream(device)
        self._coming = torch.cuda.Stream(device)

    def pinned_bytes(self, num_bytes: int) -> Bytes:
        # In a thread that has not said so, the device would be the first one of the machine.
        with torch.cuda.device(self._device):
            found: Bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return found

    def mark_computed(self) -> CudaMark:
        return CudaMark(torch.cuda.current_stream(self._device))

    def copy_out(
        self, after: CudaMark, sources: Sequence[Tensor], hosts: Sequence[Tensor]
    ) -> CudaMark:
        self._leaving.wait_event(after.event)
        with torch.cuda.stream(self._leaving):
            for source, host in zip(sources, hosts, strict=True):
                host.copy_(source.detach(), non_blocking=True)
                source.record_stream(self._leaving)
        return CudaMark(self._leaving)

    @contextmanager
    def coming(self) -> Iterator[None]:
        with torch.cuda.stream(self._coming):
            yield

    def copy_in(self, host: Tensor) -> Tensor:
        return host.to(self._device, non_blocking=True)

    def mark_come(self) -> CudaMark:
        return CudaMark(self._coming)

    def compute_after(self, mark: CudaMark, used: Iterable[Tensor]) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(mark.event)
        for tensor in used:
            if tensor.device.type == "cuda":
                tensor.record_stream(stream)


class CudaMark:
    """An event that a stream has just recorded."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: a thread that waits leaves its core to others.
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def is_past(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        try:
            self.event.synchronize()
        except RuntimeError as error:
            raise ChannelError(f"A copy from the device failed: {error}.") from error
