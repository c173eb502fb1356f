"""A made-up device with streams, in which work is done as late as the marks allow.

Each stream is a queue of work. The device does the work when somebody waits for a mark, in the
latest order that the marks allow. So code that relies on luck gets wrong values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy
import torch
from torch import Tensor

from lightning_hetero.devices.copies import Bytes


class OnDevice(Tensor):
    """A tensor of the made-up device: it says that it is not in main memory."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def on_device(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of the made-up device."""
    return tensor.as_subclass(OnDevice)


class MadeUpMark:
    """A moment in a stream."""

    def __init__(self, stream: MadeUpStream) -> None:
        self._stream = stream
        self._is_past = False
        stream.do(self._come)

    def is_past(self) -> bool:
        return self._is_past

    def wait(self) -> None:
        while not self._is_past:
            self._stream.go_on()

    def _come(self) -> None:
        self._is_past = True


class MadeUpStream:
    """Things to do, in their order."""

    def __init__(self) -> None:
        self._to_do: deque[Callable[[], None]] = deque()

    def do(self, act: Callable[[], None]) -> None:
        self._to_do.append(act)

    def after(self, mark: MadeUpMark) -> None:
        self.do(mark.wait)

    def go_on(self) -> None:
        assert self._to_do, "A mark is waited for that no stream will come to."
        self._to_do.popleft()()

    def finish(self) -> None:
        while self._to_do:
            self.go_on()


class MadeUpStreams:
    """Implements `Streams`; its tensors are `OnDevice`, and in main memory all the same.

    ``used`` is what was said to be computed with, and ``pinned`` has the bytes of each buffer.
    """

    def __init__(self) -> None:
        self.computing, self.leaving, self.arriving = (MadeUpStream() for _ in range(3))
        self.used: list[Tensor] = []
        self.pinned: list[int] = []
        self.is_coming = False

    def pinned_bytes(self, num_bytes: int) -> Bytes:
        self.pinned.append(num_bytes)
        return numpy.zeros(num_bytes, numpy.uint8)

    def compute(self, act: Callable[[], None]) -> None:
        """Ask the device for something, as a forward does."""
        self.computing.do(act)

    def mark_computed(self) -> MadeUpMark:
        return MadeUpMark(self.computing)

    def copy_out(
        self, after: MadeUpMark, sources: Sequence[Tensor], hosts: Sequence[Tensor]
    ) -> MadeUpMark:
        self.leaving.after(after)
        for source, host in zip(sources, hosts, strict=True):
            self.leaving.do(lambda s=source, h=host: h.copy_(s))  # type: ignore[misc]
        return MadeUpMark(self.leaving)

    @contextmanager
    def coming(self) -> Iterator[None]:
        self.is_coming = True
        yield
        self.is_coming = False

    def copy_in(self, host: Tensor) -> Tensor:
        assert self.is_coming
        here = torch.full_like(host, -1)
        # Not by the tensor itself, whose version says whether a layer has changed it.
        self.arriving.do(lambda: here.data.copy_(host))
        return on_device(here)

    def mark_come(self) -> MadeUpMark:
        return MadeUpMark(self.arriving)

    def compute_after(self, mark: MadeUpMark, used: Iterable[Tensor]) -> None:
        self.computing.after(mark)
        self.used += used
