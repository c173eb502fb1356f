"""NVIDIA GPUs by CUDA, and AMD GPUs by ROCm: `torch.cuda` serves both.

Streams and events come from `torch.cuda`, because a thread keeps its core busy while it waits for a
general event of torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from .device import Accelerator
from .streams import AcceleratorStreams

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# Of NVIDIA: Ampere.
_LEAST_FOR_FLASH_ATTENTION = (8, 0)


class Cuda(Accelerator, device_type="cuda"):
    """One GPU of NVIDIA or AMD."""

    is_in_torch = torch.backends.cuda.is_built()  # true for ROCm too

    def wake(self) -> None:
        # torch holds the interpreter's lock meanwhile, so other threads could not send a sign of
        # life. It takes seconds if the driver has to start first, or if many processes begin at
        # once. A function called by ctypes does not hold the lock. Do not call torch before:
        # counting GPUs may start the driver too.
        if torch.version.hip is not None:
            return
        try:
            driver = ctypes.CDLL(_DRIVER)
        except OSError:
            return
        # If one of them fails, torch reports the reason, because it calls the same functions.
        device, context = ctypes.c_int(), ctypes.c_void_p()
        driver.cuInit(0)
        driver.cuDeviceGet(ctypes.byref(device), self.torch_device.index or 0)
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    @property
    def has_flash_attention(self) -> bool:
        is_amd = torch.version.hip is not None
        capability = torch.cuda.get_device_capability(self.torch_device)
        return is_amd or capability >= _LEAST_FOR_FLASH_ATTENTION

    @property
    def own_memory_name(self) -> str:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return str(getattr(properties, "uuid", self.torch_device))

    @classmethod
    def survives_fork(cls) -> bool:
        # Without AMD's library for management, ROCm counts GPUs by starting its runtime.
        return torch.version.hip is None or importlib.util.find_spec("amdsmi") is not None

    @classmethod
    def has_streams(cls) -> bool:
        return True

    def streams(self) -> AcceleratorStreams:
        return CudaStreams(self.torch_device)

    def timed_event(self) -> torch.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    @contextmanager
    def counting_waits(self) -> Iterator[Callable[[], int]]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield lambda: sum("synchronizing" in str(each.message) for each in said)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def library_bytes(self) -> int:
        # cuBLAS keeps a workspace for each multiplying thread and stream: here for the computing
        # thread and autograd's own. Each takes 8 MiB, and 32 MiB on Hopper (torch's CUDA notes).
        self.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        before_bytes = self.allocated_bytes()
        square = torch.ones(2, 2, device=self.torch_device, requires_grad=True)
        (square @ square).sum().backward()
        del square
        return self.allocated_bytes() - before_bytes

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


class CudaStreams(AcceleratorStreams):
    """The streams of one GPU."""

    def new_stream(self) -> torch.Stream:
        return torch.cuda.Stream(self.device)

    def new_event(self) -> torch.Event:
        return torch.cuda.Event(blocking=True)

    def current_stream(self) -> torch.Stream:
        return torch.cuda.current_stream(self.device)

    def inside(self, stream: torch.Stream) -> AbstractContextManager[None]:
        return torch.cuda.stream(stream)  # type: ignore[arg-type]  # one of this class's own
