"""The streams and events of an accelerator, by torch's functions for any kind of accelerator.

A backend makes streams and events itself if torch has classes for its kind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ChannelError
from ..units import in_bytes
from .copies import Bytes

logger = logging.getLogger(__name__)


@contextmanager
def in_stream(stream: torch.Stream) -> Iterator[None]:
    """Inside, the calling thread uses a stream and its device."""
    before, beside = torch.accelerator.current_stream(), None
    if before.device != stream.device:
        beside = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        if beside is not None:
            torch.accelerator.set_stream(beside)
        # This sets the current device as well.
        torch.accelerator.set_stream(before)


class AcceleratorStreams:
    """The streams of one device: the calling thread's current one, and two of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._leaving = self.new_stream()
        self._coming = self.new_stream()

    def new_stream(self) -> torch.Stream:
        """A new stream of the device."""
        return torch.Stream(self.device)

    def new_event(self) -> torch.Event:
        """A new event; a waiting thread should leave its core to others."""
        return torch.Event(self.device)

    def current_stream(self) -> torch.Stream:
        """The calling thread's current stream of the device."""
        return torch.accelerator.current_stream(self.device)

    def inside(self, stream: torch.Stream) -> AbstractContextManager[None]:
        """Inside, the calling thread uses a stream."""
        return in_stream(stream)

    def pinned_bytes(self, num_bytes: int) -> Bytes:
        """As in `Streams`; other memory, with a warning, where the system pins no more."""
        # Without this, a new thread would pin memory for the first device of the machine.
        with self.inside(self.current_stream()):
            try:
                found = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                # Copies wait for this memory: they are slower, and as right.
                logger.warning(
                    "The system does not pin %s of memory for %s, so copies there are slower; "
                    "smaller micro-batches or a lower `in_flight` need less. (%s)",
                    in_bytes(num_bytes),
                    self.device,
                    error,
                )
                found = torch.empty(num_bytes, dtype=torch.uint8)
        content: Bytes = found.numpy()
        return content

    def mark_computed(self) -> EventMark:
        return self._mark(self.current_stream())

    def copy_out(
        self, after: EventMark, sources: Sequence[Tensor], hosts: Sequence[Tensor]
    ) -> EventMark:
        self._leaving.wait_event(after.event)
        with self.inside(self._leaving):
            for source, host in zip(sources, hosts, strict=True):
                host.copy_(source.detach(), non_blocking=True)
                source.record_stream(self._leaving)
        return self._mark(self._leaving)

    def coming(self) -> AbstractContextManager[None]:
        return self.inside(self._coming)

    def copy_in(self, host: Tensor) -> Tensor:
        return host.to(self.device, non_blocking=True)

    def mark_come(self) -> EventMark:
        return self._mark(self._coming)

    def compute_after(self, mark: EventMark, used: Iterable[Tensor]) -> None:
        stream = self.current_stream()
        stream.wait_event(mark.event)
        for tensor in used:
            if tensor.device.type == self.device.type:
                tensor.record_stream(stream)

    def _mark(self, stream: torch.Stream) -> EventMark:
        event = self.new_event()
        event.record(stream)
        return EventMark(event)


@dataclass(frozen=True)
class EventMark:
    """An event as a mark in a stream."""

    event: torch.Event

    def is_past(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        try:
            self.event.synchronize()
        except RuntimeError as error:
            raise ChannelError(f"A copy from the device failed: {error}.") from error


@dataclass(frozen=True)
class EventMoment:
    """A moment in the computing stream, marked by an event."""

    event: torch.Event

    def seconds_after(self, earlier: EventMoment) -> float:
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1000
