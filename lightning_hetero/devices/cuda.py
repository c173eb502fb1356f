"""NVIDIA GPUs by CUDA, and AMD GPUs by ROCm, which `torch.cuda` serves alike.

Copies run in streams of their own, and events in the streams tell when work is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ChannelError
from .copies import Bytes, Copies, StreamedCopies
from .device import Accelerator, Clock, Moment


class Cuda(Accelerator, device_type="cuda"):
    """One GPU of NVIDIA or AMD."""

    is_in_torch = torch.backends.cuda.is_built()  # true for ROCm too

    @property
    def memory_name(self) -> str:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return str(getattr(properties, "uuid", self.torch_device))

    def moment(self, clock: Clock = time.perf_counter) -> Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return EventMoment(event)

    def copies(self) -> Copies:
        return StreamedCopies(CudaStreams(self.torch_device))

    @classmethod
    def versions(cls) -> dict[str, str | None]:
        return {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}

    def sensor_functions(self) -> dict[str, Callable[[], float]]:
        # torch returns NVML's milliwatts, but the watts of AMD's library.
        units_per_watt = 1000 if torch.version.hip is None else 1
        return {
            "temperature_celsius": lambda: torch.cuda.temperature(self.torch_device),
            "power_watts": lambda: torch.cuda.power_draw(self.torch_device) / units_per_watt,
        }


@dataclass(frozen=True)
class EventMoment:
    """A moment that an event marks in the stream that computes."""

    event: torch.cuda.Event

    def seconds_after(self, earlier: EventMoment) -> float:
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1000


class CudaStreams:
    """The streams of one GPU: torch's current one, and two of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._leaving = torch.cuda.Stream(device)
        self._coming = torch.cuda.Stream(device)

    def pinned_bytes(self, num_bytes: int) -> Bytes:
        # Without this, a new thread would pin memory for the first GPU of the machine.
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

    def coming(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._coming)

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
    """An event that marks the present end of a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: a waiting thread leaves its core to others.
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def is_past(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        try:
            self.event.synchronize()
        except RuntimeError as error:
            raise ChannelError(f"A copy from the device failed: {error}.") from error
