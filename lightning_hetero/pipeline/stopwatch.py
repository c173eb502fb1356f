"""Measures what actions take while a step runs, without making the device wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

Kind = Literal["forward", "backward", "loss"]


@dataclass(frozen=True)
class Laps:
    """The seconds of each action that was measured, by its kind."""

    found: Mapping[Kind, Sequence[float]] = field(default_factory=dict)

    def seconds(self, kind: Kind) -> float:
        """All actions of a kind together."""
        return sum(self.found.get(kind, ()))

    def count(self, kind: Kind) -> int:
        """How many actions of a kind there were."""
        return len(self.found.get(kind, ()))


class Stopwatch:
    """Adds up what actions take until `take`.

    On CUDA the device marks the moments itself, since a function returns before the device has
    done what it asks for; elsewhere it is the clock's word.

    Args:
        device: Where the actions compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[tuple[Kind, Callable[[], float]]] = []

    @contextmanager
    def measuring(self, kind: Kind) -> Iterator[None]:
        """Inside, an action runs; one that raises does not count."""
        end = _cuda_lap(self._device) if self._device.type == "cuda" else _clock_lap()
        yield
        self._laps.append((kind, end()))

    def take(self) -> Laps:
        """What was measured since the last call. On CUDA it waits for the last action's end."""
        laps, self._laps = self._laps, []
        found: dict[Kind, list[float]] = {}
        for kind, seconds in laps:
            found.setdefault(kind, []).append(seconds())
        return Laps(found)


def _clock_lap() -> Callable[[], Callable[[], float]]:
    """Begin a lap; what is returned ends it, and what that returns knows its seconds."""
    start = time.perf_counter()

    def end() -> Callable[[], float]:
        seconds = time.perf_counter() - start
        return lambda: seconds

    return end


def _cuda_lap(device: torch.device) -> Callable[[], Callable[[], float]]:
    """The same by events in the device's stream."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(torch.cuda.current_stream(device))

    def seconds() -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000

    def end() -> Callable[[], float]:
        stop.record(torch.cuda.current_stream(device))
        return seconds

    return end
