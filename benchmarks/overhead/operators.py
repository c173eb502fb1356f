"""CPU time of torch's operators, counted in every thread of a process that computes.

A dispatch mode sees each operator below autograd, so that forwards, backwards and optimizers are
counted, and Python, autograd's own bookkeeping and everything else is not. Modes belong to threads,
therefore threads are given one when they start; those that read and write sockets are not, what
they copy is no part of the model.

A mode takes time itself, some ten microseconds for each operator: what it takes is measured first
and counted too, so that it can be left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

SOCKET_THREADS = ("read ", "write ")
"""How the threads of channels are called."""

CALIBRATION_OPERATORS = 20_000


@dataclass(frozen=True)
class Counted:
    """CPU seconds of operators, and those that counting them took."""

    operator_seconds: float
    counting_seconds: float


class OperatorClock:
    """Sums the CPU seconds of operators in a file, where another process may read them."""

    def __init__(self, file: Path) -> None:
        self._seconds = numpy.memmap(file, dtype=numpy.float64, mode="w+", shape=2)
        self._lock = threading.Lock()
        self._seconds_per_count = self._calibrate()
        self._seconds[:] = 0

    def start(self) -> None:
        """Count in this thread, and in those that start from now on."""
        self.mode().__enter__()
        run = threading.Thread.run

        def counted_run(thread: threading.Thread) -> None:
            if thread.name.startswith(SOCKET_THREADS):
                return run(thread)
            with self.mode():
                return run(thread)

        threading.Thread.run = counted_run  # type: ignore[method-assign]

    def mode(self) -> TorchDispatchMode:
        return _Counting(self._add)

    def _add(self, seconds: float) -> None:
        with self._lock:
            self._seconds += (seconds, self._seconds_per_count)

    def _calibrate(self) -> float:
        """What counting adds to an operator."""
        self._seconds_per_count = 0.0
        plain_seconds = _small_operators_seconds()
        with self.mode():
            counted_seconds = _small_operators_seconds()
        return (counted_seconds - plain_seconds) / CALIBRATION_OPERATORS


def _small_operators_seconds() -> float:
    number = torch.zeros(1)
    start = time.thread_time()
    for _ in range(CALIBRATION_OPERATORS):
        number.add_(1)
    return time.thread_time() - start


def read_counted(file: Path) -> Counted:
    """What a process has counted so far."""
    return Counted(*numpy.fromfile(file, dtype=numpy.float64).tolist())


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, whether they live or not."""
    # Linux numbers the CPU clock of a process so; the standard library has no name for it.
    return time.clock_gettime((~pid << 3) | 2)


class _Counting(TorchDispatchMode):
    """One thread's mode."""

    def __init__(self, add: Callable[[float], None]) -> None:
        super().__init__()
        self._add = add

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        start = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self._add(time.thread_time() - start)
        return result
