"""How much memory a piece of work takes and keeps: the allocator's word, or a count of tensors.

CUDA's allocator says what is taken at any time. Elsewhere the tensors that operations return are
counted while they live; what an operation takes and frees within itself is not seen there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..errors import StageFailed
from .arenas import give_back_free_memory

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class MemoryMeter(Protocol):
    """Counts from where it began."""

    def taken_bytes(self) -> int:
        """What is taken now and was not at the beginning."""

    def peak_bytes(self) -> int:
        """The most that was taken at once since the beginning, or since the last `reset_peak`."""

    def reset_peak(self) -> None:
        """Begin a new peak at what is taken now."""


@contextmanager
def metering(device: torch.device) -> Iterator[MemoryMeter]:
    """Inside, memory on the device is metered."""
    if device.type == "cuda":
        yield _CudaMeter(device)
        return
    with _TensorCount(device) as count:
        yield count


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory, of whatever device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    may_say_so = isinstance(error, (RuntimeError, StageFailed))
    return may_say_so and any(text in str(error) for text in _OUT_OF_MEMORY)


def free_cached_memory(device: torch.device) -> None:
    """Give back what the allocator keeps for later."""
    library: Any = getattr(torch, device.type, None)
    if hasattr(library, "empty_cache"):
        library.empty_cache()
    elif device.type == "cpu":
        give_back_free_memory()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    library: Any = getattr(torch, device.type, None)
    if device.type == "mps":
        library.synchronize()
    elif device.type != "cpu" and hasattr(library, "synchronize"):
        library.synchronize(device)


class _CudaMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._start = torch.cuda.memory_allocated(device)

    def taken_bytes(self) -> int:
        return max(0, torch.cuda.memory_allocated(self._device) - self._start)

    def peak_bytes(self) -> int:
        return max(0, torch.cuda.max_memory_allocated(self._device) - self._start)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class _TensorCount(TorchDispatchMode):
    """Sees every operation of this thread, those of a backward too, and the tensors it returns."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device.type
        self._alive: dict[int, weakref.finalize[Any, Any]] = {}
        self._taken = self._peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        # What works in place, or returns a view, takes nothing.
        given = {_storage(t)._cdata for t in tree_iter((args, kwargs)) if self._counts(t)}
        for tensor in tree_iter(result):
            if self._counts(tensor) and _storage(tensor)._cdata not in given:
                self._note(_storage(tensor))
        return result

    def taken_bytes(self) -> int:
        return self._taken

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._taken

    def _counts(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.device.type == self._device_type
            and value.layout is torch.strided
        )

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._alive:
            return
        num_bytes = storage.nbytes()
        self._taken += num_bytes
        self._peak = max(self._peak, self._taken)
        forget = weakref.finalize(storage, self._forget, storage._cdata, num_bytes)
        forget.atexit = False
        self._alive[storage._cdata] = forget

    def _forget(self, identity: int, num_bytes: int) -> None:
        self._taken -= num_bytes
        del self._alive[identity]


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
