"""Where a thread computes: its device, its stream, its default device, and on how many cores.

torch keeps all four per thread. A new thread starts on the first device of the machine, on its
default stream, makes tensors in main memory, and multiplies matrices on all cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .device import uses_streams


@dataclass(frozen=True)
class ThreadDevice:
    """Where a thread computes; another thread can take this over.

    Args:
        default_device: The device of new tensors by default.
        stream: The current stream of the current accelerator, if one is in use.
    """

    default_device: torch.device
    stream: torch.Stream | None

    @classmethod
    def present(cls) -> ThreadDevice:
        """Where the calling thread computes now. The call does not initialize an accelerator."""
        return cls(torch.get_default_device(), _current_stream())

    def take_over(self) -> None:
        """Make the calling thread compute here from now on, on as many cores as all threads do."""
        heed_num_threads()
        # A default device costs time at each call of torch, so the processor's is not set.
        is_main_memory = self.default_device == torch.device("cpu")
        torch.set_default_device(None if is_main_memory else self.default_device)
        if self.stream is not None:
            _set_stream(self.stream)

    @contextmanager
    def stream_taken_over(self) -> Iterator[None]:
        """Inside, the calling thread uses this device and stream."""
        before = _current_stream()
        if self.stream is None or before is None or before == self.stream:
            yield
            return
        _set_stream(self.stream)
        try:
            yield
        finally:
            _set_stream(before)

    def wait_for(self, other: ThreadDevice) -> None:
        """Make later work of this stream wait for all work so far of another thread's stream."""
        if self.stream is None or other.stream is None or self.stream == other.stream:
            return
        self.stream.wait_stream(other.stream)


def heed_num_threads() -> None:
    """Make the calling thread use the number of cores set by `torch.set_num_threads`.

    Only some operations give this number to a new thread. A product of matrices before them would
    take all cores, and wait in a busy loop for busy ones.
    """
    torch.get_num_threads()


def _current_stream() -> torch.Stream | None:
    return torch.accelerator.current_stream() if uses_streams() else None


def _set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_device_index(stream.device)
    torch.accelerator.set_stream(stream)
